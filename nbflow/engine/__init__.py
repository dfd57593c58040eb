"""The engine.

`request` is what is asked for, `scheduler` says which rows run next, `rank` is one rank's work, and
`model` is what the user holds.
"""

from nbflow.engine.model import Generation, Model, load

__all__ = ["Generation", "Model", "load"]
