"""Checks of this machine, of a cluster file against its cluster, and of compute nodes."""
