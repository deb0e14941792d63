"""Cells + shapes + store -> plan: what is new, done or stale, its GPU-hours, and what stands against it."""
