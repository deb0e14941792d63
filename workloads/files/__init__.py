"""What crosses between login and compute nodes as files: run folders, event logs, arrays. Standard library only."""
