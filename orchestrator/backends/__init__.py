"""Backends execute runs: ``local`` on this machine, ``slurm`` on a cluster. Both implement ``base.Executor``."""
