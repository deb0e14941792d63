"""The login side: what runs on login nodes and workstations. It never imports a framework."""

from orchestrator import own_packages

own_packages.install()
