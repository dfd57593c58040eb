"""``python -m nbflow``: the command line."""

import sys

from nbflow.cli import main

sys.exit(main())
