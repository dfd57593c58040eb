"""The program: a flat list of op records, the one description of a forward pass.

`build` makes the program of a whole model from its specification, `partition` cuts one rank's part
out of it and inserts communication, `fuse` joins ops, `cost` counts bytes and operations.  The
executors in `nbflow.executor` run what comes out; nothing else knows how an architecture is made.
"""

from nbflow.program.build import build, build_memory
from nbflow.program.fuse import fuse
from nbflow.program.partition import partition
from nbflow.program.records import Buffer, Op, Operand, Program

__all__ = ["Buffer", "Op", "Operand", "Program", "build", "build_memory", "fuse", "partition"]
