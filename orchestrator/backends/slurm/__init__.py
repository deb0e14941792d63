"""Slurm: job arrays submitted through submitit, status from squeue and sacct."""
