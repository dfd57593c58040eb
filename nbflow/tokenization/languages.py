"""Language tokens of translation models, by the names of their languages.

M2M-100 writes ``__en__``, NLLB ``eng_Latn`` and mBART ``en_XX``; these name the language of a text,
and as the decoder's first token that of the translation.  Marian's ``>>fra<<`` and MADLAD's
``<2fr>`` stand in front of the text to translate.
"""

from __future__ import annotations

import re

from nbflow.tokenization.tokenizer import Tokenizer
from nbflow_kernels.errors import UsageError, unknown_name

_CODE = re.compile(r"__([a-z]{2,3})__|([a-z]{2,3}_[A-Z]{2}|[a-z]{3}_[A-Z][a-z]{3})")
_IN_FRONT = (">>%s<<", "<2%s>")


def language_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the language tokens among the special tokens, by the names of the languages."""
    found = ((_CODE.fullmatch(text), i) for text, i in tokenizer.special_tokens.items())
    return {match[1] or match[2]: i for match, i in found if match is not None}


def language_id(tokenizer: Tokenizer, language: str, parameter: str) -> int:
    """Return the token of a language.

    Parameters
    ----------
    tokenizer : Tokenizer
        Tokenizer of a translation model.
    language : str
        Name in the vocabulary (``zh``, ``zho_Hans``, ``zh_CN``), its beginning if that is
        unambiguous (``fra`` for ``fra_Latn``), or the token itself (``__zh__``).
    parameter : str
        Name of the parameter, for messages.

    Raises
    ------
    UsageError
        If the language is unknown.
    """
    known = language_tokens(tokenizer)
    if not known:
        raise UsageError(
            f"{parameter}: the vocabulary has no language tokens; name the language in the text, "
            "as the model was trained",
            parameter,
        )
    if language in tokenizer.special_tokens and _CODE.fullmatch(language):
        return tokenizer.special_tokens[language]
    if language in known:
        return known[language]
    longer = [name for name in known if name.startswith(f"{language}_")]
    if len(longer) == 1:
        return known[longer[0]]
    if longer:
        among = ", ".join(sorted(longer))
        raise UsageError(f"{parameter} {language!r} is ambiguous: {among}", parameter)
    raise unknown_name(parameter, language, known, parameter)


def token_in_front(tokenizer: Tokenizer, language: str) -> int | None:
    """Return the token that stands in front of a text to translate to a language, or None."""
    found = (tokenizer.token_id(form % language) for form in _IN_FRONT)
    return next((i for i in found if i is not None), None)
