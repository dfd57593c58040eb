r"""Pre-tokenizers of byte-level BPE by their names in GGUF, ``tokenizer.ggml.pre``.

Each name stands for a list of regular expressions that split the text one after the other: a match
is a word, and so is the text between two matches.  The expressions are those of the models'
``tokenizer.json``; the names and their groups are those of llama.cpp (``src/llama-vocab.cpp``).

The syntax is Oniguruma's (through the ``tokenizers`` package): ``\p{L}`` is any letter, ``\p{N}``
any number, ``\s`` any white space, ``?+`` and ``++`` are possessive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS}|{_LINES}"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_CHINESE_OR_JAPANESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CHINESE_OR_KOREAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_SIGN_AND_WORD = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = rf"{_SIGN_AND_WORD}[\r\n]*|{_LINES}"
# digits in threes, counted from the right
_THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_ONE_DIGIT_THEN_GPT2 = (r"\p{N}", _GPT2)
_SPACES_BY_POWERS = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))

# Letters with case, as deepseek-llm lists them
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{_CHINESE_OR_JAPANESE}"
)


def _cased_words(ending: str = "", but: str = "") -> str:
    """Return gpt-4o's pattern of words that begin with capitals or end in small letters."""
    capital = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    small = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{capital}*{small}+{ending}|{before}{capital}+{small}*{ending}"


_O200K_END = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
_GPT4O = rf"{_cased_words(ending=_CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_O200K_END}"


@dataclass(frozen=True)
class PreTokenizer:
    """Pre-tokenizer of one family of vocabularies."""

    patterns: tuple[str, ...]
    """Regular expressions that split one after the other."""
    ignore_merges: bool = False
    """Encode a word of the vocabulary as one token, whatever the merges say."""
    add_bos: bool = False
    """Add BOS where the file does not say."""
    add_sep: bool = False
    """Append the separator where the file does not say."""
    byte_level: bool = True
    """Spell bytes as printable characters; otherwise spaces are U+2581, bytes ``<0x0A>``."""

    def build(self) -> Any:
        """Return the pre-tokenizer of the ``tokenizers`` package."""
        from tokenizers import Regex, pre_tokenizers

        steps: list[Any] = [pre_tokenizers.Split(Regex(p), "isolated") for p in self.patterns]
        if self.byte_level:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)


_FAMILIES: dict[tuple[str, ...], PreTokenizer] = {
    ("default",): PreTokenizer(
        (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    ),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
     "jina-v5-nano"): PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ("dbrx", "smaug-bpe", "chatglm-bpe"): PreTokenizer((_LLAMA3,)),
    ("glm4", "glm5"): PreTokenizer((_LLAMA3,), ignore_merges=True),
    ("jais-2",): PreTokenizer(
        (f"{_CONTRACTION}|{_WORD}" + r"|\p{N}{1,3}|" + _SIGNS
         + rf"|\s*[\r\n]+|{_SPACES_BY_POWERS}" + r"|\s{1,2}(?!\S)|\s{1}",),
    ),
    ("deepseek-llm",): PreTokenizer(
        ("[\r\n]", rf"\s?[{_CASED}]+",
         "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$",
         _CHINESE_OR_KOREAN, r"\p{N}+"),
    ),
    ("deepseek-coder",): PreTokenizer(
        ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE_OR_KOREAN, r"\p{N}"),
    ),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): PreTokenizer(
        (r"\p{N}{1,3}", _CHINESE_OR_JAPANESE, _DEEPSEEK3),
    ),
    ("spark2_5",): PreTokenizer(
        (r"\p{N}{1,3}", _CHINESE_OR_JAPANESE,
         rf"{_SIGN_AND_WORD}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"),
    ),
    ("youtu",): PreTokenizer(
        (_YOUTU_SCRIPTS, rf"{_cased_words(ending=_CONTRACTION + '?')}|\p{{N}}|{_O200K_END}"),
        ignore_merges=True,
    ),
    ("falcon",): PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b",
     "mellum2"): PreTokenizer(_ONE_DIGIT_THEN_GPT2),
    ("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0",
     "mellum", "modern-bert", "mpt", "olmo", "jais", "trillion", "granite-docling",
     "exaone4"): PreTokenizer((_GPT2,)),
    ("jina-v1-en", "jina-v2-code", "roberta-bpe"): PreTokenizer((_GPT2,), add_sep=True),
    ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan",
     "solar-open", "grok-2"): PreTokenizer((_QWEN2,)),
    ("qwen35",): PreTokenizer(
        (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
         + r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _LINES,),
    ),
    ("poro-chat", "bloom", "gpt3-finnish"): PreTokenizer((_BLOOM,)),
    ("viking",): PreTokenizer((_BLOOM, r"\p{N}")),
    ("tekken",): PreTokenizer(
        (rf"{_cased_words()}|\p{{N}}|{_O200K_END}",), ignore_merges=True, add_bos=True
    ),
    ("chameleon",): PreTokenizer(
        ("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", "([\t\n]|    |  )",
         r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
        add_bos=True,
    ),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): PreTokenizer((_GPT4O,)),
    ("granite-embed-multi-97m",): PreTokenizer((_GPT4O,), ignore_merges=True),
    ("tiny_aya", "cohere2moe"): PreTokenizer((_THREES, _GPT4O)),
    ("kimi-k2",): PreTokenizer(
        (r"\p{Han}+|" + _cased_words(ending=_CONTRACTION + "?", but=r"&&[^\p{Han}]")
         + rf"|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}",),
    ),
    ("superbpe",): PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    ("bailingmoe", "bailingmoe2", "llada-moe"): PreTokenizer((_BAILING,)),
    ("seed-coder",): PreTokenizer(
        (rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}",),
    ),
    ("ufakzeka",): PreTokenizer((rf"{_WORD}|\p{{N}}|{_SIGNS}|{_LINES}",)),
    ("afmoe",): PreTokenizer((_THREES, _AFMOE_SCRIPTS, _DEEPSEEK3)),
    ("laguna",): PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    ("exaone-moe",): PreTokenizer(
        (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
         + r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",),
    ),
    ("minicpm5",): PreTokenizer(
        (r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_SIGNS}|{_LINES}"),
        ignore_merges=True,
    ),
    ("gemma4", "granite-embed-multi-311m"): PreTokenizer(
        (r"[^\n]+|[\n]+",), add_bos=True, byte_level=False
    ),
    ("sarvam-moe",): PreTokenizer((r"[^\n]+|[\n]+",), byte_level=False),
}  # fmt: skip

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: pre for names, pre in _FAMILIES.items() for name in names
}
"""Name in ``tokenizer.ggml.pre`` -> pre-tokenizer."""
