"""``python -m nbflow``: the command line."""

from nbflow.cli import main

main()
