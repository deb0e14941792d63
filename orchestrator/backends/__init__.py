"""How runs are carried out: ``local`` (a queue with leases on this machine) or ``slurm``, behind one ``protocol``."""
