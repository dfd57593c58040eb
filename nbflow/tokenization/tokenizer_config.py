"""Settings, tokens and chat templates in the folder of a Hugging Face tokenizer.

``tokenizer_config.json``, ``special_tokens_map.json``, ``added_tokens.json``,
``chat_template.jinja`` or ``.json``, and ``additional_chat_templates/*.jinja``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbflow.tokenization.special_tokens import MAX_VOCABULARY
from nbflow.tokenization.tokenizer import is_valid
from nbflow.utils.binary_file import read_text
from nbflow.utils.json_file import read_object
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError

MAX_TEMPLATE_BYTES = 1 << 20  # the longest published ones have some 30 kB
_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True)
class AddedToken:
    """A token that is recognized before the text is split."""

    content: str
    token_id: int
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class TokenizerConfig:
    """Contents of the tokenizer's files, checked."""

    folder: Path
    values: dict[str, Any]
    """Content of tokenizer_config.json."""
    named_tokens: dict[str, str]
    """"bos_token" and the like -> its spelling."""
    added: tuple[AddedToken, ...]
    chat_templates: dict[str, str]

    @property
    def tokenizer_class(self) -> str | None:
        """Name of the class in ``transformers``, without its ``Fast``."""
        name = self.values.get("tokenizer_class")
        return name.removesuffix("Fast") if isinstance(name, str) else None

    def flag(self, key: str, default: bool) -> bool:
        """Return a switch of tokenizer_config.json; null is the default."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UsageError(
                f"{self.folder / 'tokenizer_config.json'}: {key} must be true or false, "
                f"got {value!r:.80}"
            )
        return value


def read_tokenizer_config(folder: Path) -> TokenizerConfig:
    """Read the files in the folder of a tokenizer; each may be missing."""
    values = read_object(folder / "tokenizer_config.json", missing_ok=True) or {}
    special = read_object(folder / "special_tokens_map.json", missing_ok=True) or {}
    files = (("tokenizer_config.json", values), ("special_tokens_map.json", special))
    named: dict[str, str] = {}
    for name in _NAMES:
        for file, table in files:
            text = _content(table.get(name), f"{folder / file}: {name}")
            if text is not None:
                named.setdefault(name, text)
    return TokenizerConfig(
        folder, values, named, tuple(_added(folder, values, named)), _templates(folder, values)
    )


def _content(token: Any, where: str) -> str | None:
    """Return the spelling of a token, which files write as text or as an object."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str) or not content:
        return None
    if not is_valid(content):
        raise UsageError(
            f"{where}: must be valid Unicode, got the lone surrogate in {content!a:.80}"
        )
    return content


def _token_id(value: Any, where: str) -> int:
    """Return the id of an added token, checked."""
    if type(value) is not int or not 0 <= value < MAX_VOCABULARY:
        raise UsageError(
            f"{where}: must have an id, 0 to {MAX_VOCABULARY - 1}, got {shown(value):.80}"
        )
    return value


def _added(folder: Path, values: dict[str, Any], named: dict[str, str]) -> list[AddedToken]:
    """Return the added tokens of tokenizer_config.json and added_tokens.json, by id."""
    tokens: dict[int, AddedToken] = {}
    where = folder / "tokenizer_config.json"
    decoder = values.get("added_tokens_decoder")
    for key, token in (decoder if isinstance(decoder, dict) else {}).items():
        at = f"{where}: added_tokens_decoder"
        content = _content(token, f"{at}: {key!r:.40}")
        # int() refuses thousands of digits with another error
        number = int(key) if key.isascii() and key.isdecimal() and len(key) < 20 else key
        if number is key or content is None or not isinstance(token, dict):
            raise UsageError(f"{at}: {key!r:.40} is not an id and a token")
        token_id = _token_id(number, f"{at}: {content!r:.40}")
        switches = {name: bool(token.get(name)) for name in ("lstrip", "rstrip", "normalized")}
        tokens[token_id] = AddedToken(content, token_id, bool(token.get("special")), **switches)
    plain = read_object(folder / "added_tokens.json", missing_ok=True) or {}
    for key, value in plain.items():
        at = f"{folder / 'added_tokens.json'}: {key!a:.40}"
        token_id, content = _token_id(value, at), _content(key, at)
        if content is None:
            raise UsageError(f"{at}: a token must not be empty")
        special = content in named.values()
        tokens.setdefault(token_id, AddedToken(content, token_id, special))
    return [tokens[i] for i in sorted(tokens)]


def _templates(folder: Path, values: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; a file wins over an entry of a configuration."""
    templates: dict[str, str] = {}
    processor = read_object(folder / "chat_template.json", missing_ok=True) or {}
    for stated in (processor.get("chat_template"), values.get("chat_template")):
        entries = stated if isinstance(stated, list) else [{"name": "default", "template": stated}]
        for entry in entries:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name", "default"))] = entry["template"]
    files = {p.stem: p for p in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    return templates | {name: read_template(path) for name, path in files.items()}


def read_template(path: Path) -> str:
    """Read a template file."""
    return read_text(path, MAX_TEMPLATE_BYTES, "a chat template")
