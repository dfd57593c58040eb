"""`fill_mask`: the most probable tokens in place of ``[MASK]``, from a masked language model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nbflow.engine.interfaces import ModelInfo
from nbflow.engine.llm import BATCH_MULTI_STEP_S, LLM
from nbflow.engine.request import Request
from nbflow.engine.request_validation import check_ids
from nbflow.sampling import Greedy
from nbflow.tokenization import Tokenizer
from nbflow.tokenization.chat import encode_chat
from nbflow_kernels.errors import UsageError

MAX_TOP_K = 1000
"""Most tokens for a mask."""


@dataclass(frozen=True)
class MaskFilling:
    """A token in place of a mask, with the names of transformers' fill-mask pipeline."""

    score: float
    """Probability."""
    token: int
    token_str: str
    sequence: str
    """The text with this token; other masks stay."""


def fill_mask(model: LLM, text: str | Sequence[int], top_k: int = 5) -> list[list[MaskFilling]]:
    """Return the most probable tokens for each mask of a text.

    Parameters
    ----------
    model : LLM
        An encoder with the head of its masked language model, e.g. BERT.
    text : str or sequence of int
        Text with mask tokens (``[MASK]``, RoBERTa: ``<mask>``), to which the special tokens around
        it are added; or token ids with all special tokens.
    top_k : int
        Tokens for each mask.

    Returns
    -------
    list of list of MaskFilling
        For each mask its tokens, the most probable first.

    Raises
    ------
    UsageError
        If the model is not of this kind, the text has no mask, or it is too long.
    """
    request = mask_request(model, text, top_k)
    for _ in LLM.run_requests(model, [request], BATCH_MULTI_STEP_S):  # each replica runs it
        pass
    return fillings(model, request)


def mask_token(model: ModelInfo) -> tuple[int, str]:
    """Return id and text of the mask token."""
    tokenizer = model.tokenizer
    for text in (tokenizer.named_tokens.get("mask_token"), "[MASK]", "<mask>"):
        if text is not None and text in tokenizer.special_tokens:
            return tokenizer.special_tokens[text], text
    raise UsageError(f"the tokenizer of {model.spec.name} has no mask token")


def masked_ids(tokenizer: Tokenizer, text: str, template: str | None = None) -> list[int]:
    """Return the token ids of a text with masks.

    The special tokens around it are the tokenizer's, or those of a query template:
    ``{[CLS]}{query}{[SEP]}``.
    """
    if template is None:
        return tokenizer.encode(text, add_special_tokens=True, parse_special=True)
    message = {"role": "user", "content": text}
    return encode_chat(tokenizer, [message], template, parse_special=True)


def check_fills(model: ModelInfo) -> None:
    """Raise `UsageError` unless a model is a masked language model."""
    spec = model.spec
    if spec.causal or spec.encoder is not None or not spec.head:
        kind = "continues text" if spec.causal else "is an encoder without a head"
        raise UsageError(
            f"{spec.name} {kind} and fills no masks; load a masked language model, e.g. BERT, with "
            "its head"
        )


def mask_request(model: ModelInfo, text: str | Sequence[int], top_k: int) -> Request:
    """Return the request for a text; parameters as in `fill_mask`."""
    check_fills(model)
    most = min(MAX_TOP_K, model.spec.vocab_size)
    if not 1 <= top_k <= most:
        raise UsageError(f"top_k must be 1..{most}, got {top_k}", "top_k")
    mask, name = mask_token(model)
    if isinstance(text, str):
        text = masked_ids(model.tokenizer, text)
    ids = check_ids(model.spec, text, room=0)
    masked = tuple(i for i, token in enumerate(ids) if token == mask)
    if not masked:
        raise UsageError(f"the text has no mask; write {name} where a token is wanted")
    return Request(ids, 0, Greedy(), masked=masked, prompt_logprobs=top_k)


def fillings(model: ModelInfo, request: Request) -> list[list[MaskFilling]]:
    """Return the result of a finished request of `mask_request`."""
    if request.error is not None:
        raise request.error
    if len(request.prompt_results) < len(request.masked):
        raise UsageError(f"the text was not processed completely: {request.finish_reason}")
    tokenizer, found = model.tokenizer, list[list[MaskFilling]]()
    for at, (_, top) in zip(request.masked, request.prompt_results, strict=True):
        found.append([])
        for token, logprob in top:
            ids = [*request.prompt[:at], token, *request.prompt[at + 1 :]]
            text = tokenizer.decode([token]) or tokenizer.piece(token)
            sequence = _sequence(tokenizer, ids, mask_token(model))
            found[-1].append(MaskFilling(math.exp(logprob), token, text.strip(), sequence))
    return found


def _sequence(tokenizer: Tokenizer, ids: list[int], mask: tuple[int, str]) -> str:
    """Return the text of ids, in which masks are written out."""
    parts, start = [], 0
    for i, token in enumerate([*ids, mask[0]]):
        if token == mask[0]:
            parts.append(tokenizer.decode(ids[start:i]).strip())
            start = i + 1
    return f" {mask[1]} ".join(parts).strip()
