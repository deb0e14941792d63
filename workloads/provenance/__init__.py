"""Code, packages and machine that a result was measured with."""
