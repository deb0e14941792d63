"""What became of runs: the tracker updates the store, recovery decides about failures, clean deletes files."""
