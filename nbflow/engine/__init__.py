"""The engine.

`request` is what is asked for, `scheduler` says which rows run next, `rank` is one rank's work,
`model` is what the user holds, and `load` makes it.
"""

from nbflow.engine.load import load
from nbflow.engine.model import Model
from nbflow.engine.outputs import Generation

__all__ = ["Generation", "Model", "load"]
