"""What goes into the matrices of a model while it reads a text: the facts encoders weigh with."""

from __future__ import annotations

from nbflow.calibrate.collect import Inputs, collect
from nbflow.calibrate.files import merge, write_inputs
from nbflow.calibrate.moments import write_moments

__all__ = ["Inputs", "collect", "merge", "write_inputs", "write_moments"]
