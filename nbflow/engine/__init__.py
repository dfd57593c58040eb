"""The engine.

`load` makes a `model`, which the user holds.  `core` runs its steps, for the model's own callers
(`turns`) and for a running `engine`; on each rank `scheduler` chooses the rows of a step and `rank`
runs it.  `request` goes in, `outputs` come out.
"""

from nbflow.engine.llm import LLM
from nbflow.engine.load import load
from nbflow.engine.outputs import RequestOutput

__all__ = ["LLM", "RequestOutput", "load"]
