"""Server whose steps fail on token 666, to simulate a kernel fault.

With token 667 in a prompt its engine ends, as something beyond the step fails.
"""

import sys

from nbflow.cli import main
from nbflow.engine.scheduler import Scheduler
from nbflow.executor.cpu import CpuExecutor

run, next_step = CpuExecutor.run, Scheduler.next_step


def failing(self, step, *args, **options):
    if 666 in list(step.ids):
        raise RuntimeError("planted")
    return run(self, step, *args, **options)


def ending(self, *args):
    if any(667 in request.prompt for request in self.requests):
        raise RuntimeError("planted")
    return next_step(self, *args)


CpuExecutor.run = failing
Scheduler.next_step = ending
main(["serve", *sys.argv[1:]])
