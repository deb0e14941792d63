"""What became of runs: witnesses -> state, what is done about an ending, and what may be deleted."""
