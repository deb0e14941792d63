"""What is asked about the options of one command together."""

from __future__ import annotations

import typer


def all_written(context: typer.Context, *names: str) -> bool:
    """Whether all of these options stand on the command line itself, not in the environment.

    Never while a shell completes the line: it shows no errors.
    """
    # Told by its word: some releases of typer bring click's enumeration along, others import it.
    sources = [context.get_parameter_source(name) for name in names]
    return not context.resilient_parsing and all(s is not None and s.name == "COMMANDLINE" for s in sources)
