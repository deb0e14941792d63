"""Local mode: a queue process that leases devices, and one supervisor process per run."""
