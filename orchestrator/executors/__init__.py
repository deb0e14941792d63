"""How runs are carried out: ``local`` (a queue with leases on this machine), and ``protocol``, the schedulers' seam."""
