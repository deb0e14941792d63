"""The job process: launch, checks against the plan, rendezvous, staging, watchdog."""
