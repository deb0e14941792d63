"""The login side: study, cluster, environment, executors, tracking, planning, sending, doctor and cli.

Imports no framework.
"""
