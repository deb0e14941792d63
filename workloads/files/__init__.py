"""Files that cross between login and compute nodes: run folders, event logs, Slurm arrays. Standard library only."""
