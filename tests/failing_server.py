"""A server whose steps fail when token 666 is among their tokens: what a fault in a kernel does.

With token 667 its engine ends, as if something beyond the step had failed.
"""

import sys

from nbflow.cli import main
from nbflow.execute.cpu import CpuExecutor

run = CpuExecutor.run


def failing(self, step, *args, **options):
    if 666 in list(step.ids):
        raise RuntimeError("planted")
    if 667 in list(step.ids):
        raise SystemExit("planted")
    return run(self, step, *args, **options)


CpuExecutor.run = failing
main(["serve", *sys.argv[1:]])
