"""Decoding: how the next token is chosen.  One file for each strategy, one line in `STRATEGIES`.

A strategy is a frozen dataclass of its parameters.  Draws come from a counter-based generator: the
n-th token of a request depends on its seed and n, not on what else is in the batch.

================  =================================================================================
`table`           the strategies by name
`strategy`        what every strategy offers: compiled ones and ones with a state
`filters`         temperature, top-k, top-p and min-p together
`chain`           llama.cpp's samplers in settable order; `mirostat`
`inferflow`       Inferflow's strategies with its rules and random numbers
`constraints`     biases, penalties, forbidden tokens, for every strategy
`structured`      choice, regular expression, JSON schema, grammar
`build`           the strategy and constraints of `nbflow.options.SamplingParams`
================  =================================================================================
"""

from __future__ import annotations

from nbflow.sampling.build import build_strategy, end_ids
from nbflow.sampling.filters import Filters
from nbflow.sampling.greedy import Greedy
from nbflow.sampling.logits_processors import Constrained, LogitsProcessors
from nbflow.sampling.min_p import MinP
from nbflow.sampling.mirostat import Mirostat
from nbflow.sampling.sample import Sample
from nbflow.sampling.sampler_chain import Chain
from nbflow.sampling.strategies import STRATEGIES, make_strategy
from nbflow.sampling.strategy import State, Strategy
from nbflow.sampling.structured_output import Grammar
from nbflow.sampling.top_k import TopK
from nbflow.sampling.top_p import TopP

__all__ = [
    "STRATEGIES",
    "Chain",
    "Constrained",
    "Filters",
    "Grammar",
    "Greedy",
    "LogitsProcessors",
    "MinP",
    "Mirostat",
    "Sample",
    "State",
    "Strategy",
    "TopK",
    "TopP",
    "build_strategy",
    "end_ids",
    "make_strategy",
]
