r"""An adapter for lm-evaluation-harness, in process.

    python -m nbflow_experiments.scoring.lm_eval run --model nbflow \
        --model_args model=MODEL,weights=q4_k,kv=q8_0 --tasks TASKS

is the harness' own command line with one more model, ``nbflow``; its arguments are those of
`nbflow.load`.  Through a server: ``lm_eval --model local-completions`` against `nbflow serve`.

Source: EleutherAI, lm-evaluation-harness 0.4 (the interface `lm_eval.api.model.LM`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

import nbflow
from nbflow.tokenization.chat import format_chat
from nbflow_experiments.optional_packages import require
from nbflow_experiments.scoring.multiple_choice import continuation_log_prob, encode_pair
from nbflow_experiments.scoring.score_text import score_text
from nbflow_experiments.scoring.windows import cut
from nbflow_kernels.errors import MissingExtraError, UsageError, install_command

try:
    from lm_eval.api.model import LM
except ImportError as error:
    raise MissingExtraError(
        f"this needs lm-evaluation-harness: {install_command('harness')}"
    ) from error

DEFAULT_NEW_TOKENS = 256
"""Tokens generated where a task sets no limit, as in the harness' own models."""
IGNORED = ("batch_size", "max_batch_size", "device")
"""Arguments that the harness passes to every model; requests run one by one on the CPU."""
GREEDY = {"do_sample": False, "temperature": 0.0}


class HarnessModel(LM):  # type: ignore[misc]
    """Harness adapter of an nbflow model.

    Parameters
    ----------
    model : str
        As `nbflow.load` takes it.
    max_gen_toks : int
        Tokens generated where a task sets no limit.
    **options
        Of `nbflow.load`.
    """

    def __init__(self, model: str, max_gen_toks: int = DEFAULT_NEW_TOKENS, **options: Any) -> None:
        super().__init__()
        self._name = model
        self._new_tokens = int(max_gen_toks)
        self.model = nbflow.load(
            model, **{key: value for key, value in options.items() if key not in IGNORED}
        )
        self._tokenizer = self.model.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """Return the tokenizer's key in the harness cache."""
        return Path(self._name).name

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether greedy decoding gives it."""
        results = []
        for request in _shown(requests, disable_tqdm):
            ids, n_context = encode_pair(self._tokenizer, *request.args)
            results.append(continuation_log_prob(self.model, ids, n_context))
            self.cache_hook.add_partial("loglikelihood", request.args, results[-1])
        return results

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text, every token scored once."""
        results = []
        for request in _shown(requests, disable_tqdm):
            ids = np.array(self._tokenizer.encode(request.args[0]), np.int64)
            # windows overlap by the token that predicts the first one
            most = self.model.spec.max_context
            windows = cut(ids, most + 1, most, "new", self._prefix())
            results.append(-float(score_text(self.model, windows).nll.sum()))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, results[-1])
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return a greedy (or sampled) continuation of each context, cut at a stop string."""
        results = []
        for request in _shown(requests, disable_tqdm):
            context, options = request.args
            results.append(self._generate(context, dict(options)))
            self.cache_hook.add_partial("generate_until", request.args, results[-1])
        return results

    def apply_chat_template(
        self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation with the model's chat template."""
        return format_chat(
            self._tokenizer, chat_history, add_generation_prompt=add_generation_prompt
        )

    def _prefix(self) -> int:
        """Return the token before a text."""
        bos = self._tokenizer.bos_id
        return bos if bos is not None else next(iter(self._tokenizer.eos_ids))

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        until = options.pop("until", [])
        stops = [until] if isinstance(until, str) else [s for s in until if s]
        wanted = int(options.pop("max_gen_toks", self._new_tokens))
        sampling = self._sampling(options)
        ids = self._tokenizer.encode(context, add_special_tokens=True) or [self._prefix()]
        ids = ids[-(self.model.spec.max_context - wanted) :]
        decoder, text = self._tokenizer.decode_stream(), ""
        running = cast("Generator[int, None, None]", self.model.stream(ids, wanted, **sampling))
        with contextlib.closing(running) as tokens:
            for token in tokens:
                text += decoder.push(token)
                if any(stop in text for stop in stops):
                    break
            else:
                text += decoder.finish()
        return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]

    @staticmethod
    def _sampling(options: dict[str, Any]) -> dict[str, Any]:
        """Map a task's generation options to arguments of `LLM.stream`."""
        given = {**GREEDY, **options}
        if not given.pop("do_sample") or not given["temperature"]:
            given.pop("temperature")
            return {}
        known = ("temperature", "top_p", "top_k", "min_p")
        for name in given:
            if name not in known:
                raise UsageError(f"a task asks for {name!r}; known are {', '.join(known)}")
        filters = [name for name in known[1:] if name in given]
        if len(filters) > 1:
            raise UsageError(f"a task asks for {' and '.join(filters)}; only one can be given")
        return {"decoding": filters[0] if filters else "sample", **given}


def _shown(requests: Sequence[Any], disable: bool) -> Iterator[Any]:
    progress = require("tqdm", extra="harness")
    yield from progress.tqdm(requests, disable=disable)


def register() -> None:
    """Register ``nbflow`` as a model of the harness."""
    require("lm_eval.api.registry", extra="harness").register_model("nbflow")(HarnessModel)


def main() -> None:
    """Run the harness' command line with one more model."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    register()
    require("lm_eval.__main__", extra="harness").cli_evaluate()


if __name__ == "__main__":
    main()
