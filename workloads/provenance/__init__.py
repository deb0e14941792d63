"""Which code, packages and machine produced a result."""
