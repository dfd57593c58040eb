"""Engine: from requests to tokens.

`load` returns an `llm.LLM`.  `core` submits requests to the workers and runs steps, for direct
calls (`model_lock`) and for a running `llm_engine`.  On each rank `scheduler` selects the tokens of
a step and `worker` runs it; `sampler` and `outputs` turn logits into tokens.
"""

from nbflow.engine.llm import LLM
from nbflow.engine.load import load
from nbflow.engine.outputs import RequestOutput

__all__ = ["LLM", "RequestOutput", "load"]
