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
`search`          what searches offer: `beam` search, `contrastive` search
`structured`      choice, regular expression, JSON schema, grammar
`build`           the strategy and constraints of `nbflow.options.SamplingParams`
================  =================================================================================
"""

from __future__ import annotations

from nbflow.decoding.beam import BeamSearch
from nbflow.decoding.build import build_strategy, end_ids
from nbflow.decoding.chain import Chain
from nbflow.decoding.constraints import Constrained, Constraints
from nbflow.decoding.contrastive import ContrastiveSearch
from nbflow.decoding.filters import Filters
from nbflow.decoding.greedy import Greedy
from nbflow.decoding.min_p import MinP
from nbflow.decoding.mirostat import Mirostat
from nbflow.decoding.sample import Sample
from nbflow.decoding.search import Search
from nbflow.decoding.strategy import State, Strategy
from nbflow.decoding.structured import Grammar
from nbflow.decoding.table import STRATEGIES, make_strategy
from nbflow.decoding.top_k import TopK
from nbflow.decoding.top_p import TopP

__all__ = [
    "STRATEGIES",
    "BeamSearch",
    "Chain",
    "Constrained",
    "Constraints",
    "ContrastiveSearch",
    "Filters",
    "Grammar",
    "Greedy",
    "MinP",
    "Mirostat",
    "Sample",
    "Search",
    "State",
    "Strategy",
    "TopK",
    "TopP",
    "build_strategy",
    "end_ids",
    "make_strategy",
]
