"""Speculative decoding: attaching a draft model or proposer to a request.

By default tokens are sampled as without a draft, so the result is bit-identical for every strategy
(`nbflow.engine.outputs.verify_drafts`).  A draft model samples with the random numbers of the
request: similar distributions give equal tokens.  With "chain" (rejection sampling) only the
distribution is preserved, and more draft tokens of a draft model are accepted.
"""

from __future__ import annotations

from nbflow.engine.interfaces import ModelInfo
from nbflow.engine.request import Proposer, Request
from nbflow.engine.speculative.ngram import NgramProposer
from nbflow.options import SpeculativeConfig
from nbflow_kernels.errors import UsageError, unknown_name

Draft = str | Proposer | ModelInfo
"""Source of draft tokens: "ngram" (prompt lookup), a smaller model, or a function."""


def attach(
    draft: Draft | None, model: ModelInfo, request: Request, n_draft: int, verify: str
) -> None:
    """Add the proposer of draft tokens to a request, if there is one.

    Raises
    ------
    UsageError
        If the draft model does not fit the model, or an option is out of bounds.
    """
    SpeculativeConfig(draft, n_draft, draft_verify=verify)  # type: ignore[arg-type]  # checks them
    if draft is None:
        return
    request.n_proposed = n_draft
    if isinstance(draft, str):
        if draft != "ngram":
            raise unknown_name("draft", draft, ["ngram"])
        request.proposer = NgramProposer()
    elif callable(draft):
        request.proposer = draft
    else:
        check_draft(draft, model, verify)
        request.drafter = draft.drafter
        request.verifies_chain = verify == "chain"


def check_draft(draft: ModelInfo, model: ModelInfo, verify: str = "same") -> None:
    """Raise `UsageError` unless a model can be the draft model of another one."""
    if draft is model:
        raise UsageError("the draft model must differ from the target model")
    if draft.spec.vocab_size != model.spec.vocab_size:
        raise UsageError(
            f"the draft model must have the vocabulary of {model.spec.name}, "
            f"{model.spec.vocab_size} tokens; {draft.spec.name} has {draft.spec.vocab_size}"
        )
    if draft.spec.encoder is not None or not draft.spec.causal or not draft.spec.head:
        raise UsageError(f"the draft model must be decoder-only; {draft.spec.name} is not")
    if len(draft.plan.numbers) > 1 and not draft.ranks_are_threads:
        raise UsageError(
            f"the draft model runs in one process, but has partition {draft.plan.partition!r}; "
            "load it with partition='0'"
        )
    if model.leads and not draft.participates:
        raise UsageError(
            f"the draft model must be on the first rank of {model.spec.name}, "
            f"{model.plan.numbers[0]}; number the ranks so that this is 0"
        )
    if verify == "chain" and len(model.plan.numbers) > 1:
        raise UsageError(
            "draft_verify='chain' needs the model on one rank; use 'same' with several"
        )
