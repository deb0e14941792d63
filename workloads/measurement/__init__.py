"""Times of steps, memory and GPU telemetry of a run."""
