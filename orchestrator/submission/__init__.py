"""A plan -> attempts in a queue: intent first, canaries, and again what ended too early."""
