"""What to run: ``experiment.toml`` -> cells, all mistakes at once."""
