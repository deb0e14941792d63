"""Times, memory and GPU telemetry of a run."""
