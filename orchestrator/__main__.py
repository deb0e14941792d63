"""``python -m orchestrator``: the command line without the installed script."""

from orchestrator.cli import main

main()
