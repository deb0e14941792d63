"""Slurm: job arrays through submitit, queries to squeue and sacct."""
