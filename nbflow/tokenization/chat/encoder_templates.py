"""Templates of encoder-decoder models: one for each side."""

from __future__ import annotations

from collections.abc import Sequence

from nbflow.tokenization.chat.messages import Message, check_messages
from nbflow.tokenization.chat.template import encode_chat, find_template, template_language
from nbflow.tokenization.tokenizer import Tokenizer
from nbflow_kernels.errors import UsageError


def encode_pair(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    encoder_template: str | None,
    decoder_template: str | None = None,
    *,
    start: int | None = None,
    max_bytes: int | None = None,
) -> tuple[list[int], list[int] | None]:
    r"""Return the ids that the encoder and the decoder read.

    Parameters
    ----------
    tokenizer : Tokenizer
        Its tokens may be named in the templates.
    messages : sequence of mapping
        One turn, as for `encode_chat`; an assistant's message begins the answer.
    encoder_template : str, optional
        As `template` of `encode_chat`, e.g. ``{__zh__}{ }{query}{</s>}``; by default the user's
        text with the special tokens of the tokenizer.
    decoder_template : str, optional
        Template in Inferflow's language, which needs no query: ``{#2}{__en__}{res_prefix}``.
    start : int, optional
        First token of the decoder where `decoder_template` is missing.
    max_bytes : int, optional
        Bound on the UTF-8 text, checked before it is tokenized.

    Returns
    -------
    encoder_ids : list of int
    decoder_ids : list of int or None
        None where nothing but the model's own beginning is wanted.

    Raises
    ------
    UsageError
        As `encode_chat`; if there are several turns.
    """
    given = check_messages(messages)
    read = [message for message in given if message["role"] != "assistant"]
    if encoder_template is not None:
        find_template(encoder_template, "encoder_template")
    else:
        encoder_template = "{query}"
        if [message["role"] for message in read] != ["user"]:
            raise UsageError(
                "a model with an encoder reads one user message; an encoder_template can take a "
                "system message, too"
            )
    ids = encode_chat(tokenizer, read, encoder_template, max_bytes=max_bytes)
    if encoder_template == "{query}":
        ids = tokenizer.encode(str(read[0]["content"]), add_special_tokens=True)
    answer = given[-1]["content"] if given[-1]["role"] == "assistant" else ""
    if decoder_template is not None:
        filled = template_language(decoder_template).fill(
            decoder_template, given, tokenizer, "decoder_template", needs_query=False
        )
        return ids, tokenizer.encode_parts(filled.items)
    if answer and start is not None:
        return ids, [start, *tokenizer.encode(str(answer))]
    return ids, None
