"""Data shipped with the package: Jinja job scripts, starter studies, cluster profiles."""
