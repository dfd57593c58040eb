"""Programs: a forward pass as a flat list of op records.

`build` makes the program of a whole model from its specification, `partition` cuts out one rank's
shard and inserts communication, `fuse` joins ops, `cost` counts bytes and operations.  The
executors in `nbflow.executor` run programs and know no architectures.
"""

from nbflow.program.build import build, build_cross_kv
from nbflow.program.fuse import fuse
from nbflow.program.partition import partition
from nbflow.program.records import Buffer, Op, Operand, Program

__all__ = ["Buffer", "Op", "Operand", "Program", "build", "build_cross_kv", "fuse", "partition"]
