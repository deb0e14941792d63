"""What is wrong with this machine, with a cluster file at its cluster, and as nodes see it."""
