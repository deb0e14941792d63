"""Where to run on Slurm: ``cluster.toml`` -> profile, resource shapes, job scripts; and how such a file is made."""
