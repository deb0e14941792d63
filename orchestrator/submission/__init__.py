"""Plan -> attempts: intents first, canaries before the rest, resubmission of what ended early."""
