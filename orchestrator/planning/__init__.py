"""What would run: state, shape, GPU-hours, checks and job scripts of an experiment on a target."""
