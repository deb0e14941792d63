"""Data sets: one file each that binds ``DECLARATION``. Read on the login side, so no framework at module level."""
