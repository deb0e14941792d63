"""Data sets, one file each that binds ``DECLARATION``. The login node reads them: no framework at module level."""
