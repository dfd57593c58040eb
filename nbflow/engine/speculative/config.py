"""Proposals of the next tokens, which the model then verifies several at a time.

By default the tokens are drawn as without proposals, so the result is the same bit for bit,
whatever the strategy (`nbflow.engine.outputs.verify`); good proposals only make it come sooner.  A
draft model draws with the request's own random numbers: where the two distributions are alike, so
are the tokens.  With "chain" the distribution is the same, but not the tokens, and more of a draft
model's proposals are taken (`nbflow.engine.speculative.rejection_sampler`).
"""

from __future__ import annotations

from nbflow.engine.interfaces import ModelInfo
from nbflow.engine.request import Proposer, Request
from nbflow.engine.speculative.ngram import NgramProposer
from nbflow.options import SpeculativeConfig
from nbflow_kernels.errors import UsageError, unknown_name

Draft = str | Proposer | ModelInfo
"""Who proposes: "ngram" (the text itself), a smaller model, or a function of one's own."""


def attach(draft: Draft, model: ModelInfo, request: Request, n_draft: int, verify: str) -> None:
    """Add a proposer of draft tokens to a request.

    Raises
    ------
    UsageError
        If the draft model does not fit the model, or an option is out of bounds.
    """
    SpeculativeConfig().replaced({"n_draft": n_draft, "draft_verify": verify})  # checks them
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
    """Raise `UsageError` unless a model can propose tokens to another one."""
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
            f"the draft model must be where {model.spec.name} begins, on rank "
            f"{model.plan.numbers[0]}; number the ranks so that this is 0"
        )
    if verify == "chain" and len(model.plan.numbers) > 1:
        raise UsageError(
            "draft_verify='chain' needs the model on one rank; with more of them take 'same'"
        )
