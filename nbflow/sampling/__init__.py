"""Decoding: samplers, logits processors and structured output, by name in `STRATEGIES`.

A strategy is a frozen dataclass of its parameters.  Random numbers are counter-based: the n-th
token of a request depends on its seed and n, not on the rest of the batch.

====================  =============================================================================
`strategies`          the table, and the strategies without state: greedy, top-k, top-p, min-p
`strategy`            interfaces: compiled strategies, and states of the others
`sampler_chain`       llama.cpp's samplers in any order; `mirostat`
`logits_processors`   logit bias, penalties and banned tokens, for every strategy
`structured_output`   choice, regular expression, JSON schema, grammar
`build`               strategy and processors from `nbflow.options.SamplingParams`
====================  =============================================================================
"""

from __future__ import annotations

from nbflow.sampling.build import (
    build_strategy,
    end_ids,
    implied_decoding,
    of_other_strategies,
    with_recommended,
)
from nbflow.sampling.candidates import Candidates
from nbflow.sampling.logits_processors import Constrained, LogitsProcessors
from nbflow.sampling.mirostat import Mirostat
from nbflow.sampling.sampler_chain import Chain
from nbflow.sampling.strategies import (
    STRATEGIES,
    Filters,
    Greedy,
    MinP,
    Sample,
    TopK,
    TopP,
    make_strategy,
    register_strategy,
)
from nbflow.sampling.strategy import SampledState, State, Strategy
from nbflow.sampling.structured_output import Grammar

__all__ = [
    "STRATEGIES",
    "Candidates",
    "Chain",
    "Constrained",
    "Filters",
    "Grammar",
    "Greedy",
    "LogitsProcessors",
    "MinP",
    "Mirostat",
    "Sample",
    "SampledState",
    "State",
    "Strategy",
    "TopK",
    "TopP",
    "build_strategy",
    "end_ids",
    "implied_decoding",
    "make_strategy",
    "of_other_strategies",
    "register_strategy",
    "with_recommended",
]
