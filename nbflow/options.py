"""Options of models, engines and requests: one dataclass field each, for every interface.

Python keywords, options of the command line (`nbflow.cli.options`), keys of TOML files
(`nbflow.server.config`), fields of HTTP requests (`nbflow.server.schemas`) and docs/options.md are
made from these fields.  A new option is one field here and the code that uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from nbflow.option_fields import MAX_INT, OptionSet, option
from nbflow_kernels.errors import UsageError

MAX_STOP_BYTES = 4096
"""Longest stop text."""
MAX_SEQUENCES = 256
"""Most requests that run at once, unless given."""
STRUCTURES = ("choice", "regex", "json_schema", "grammar")
"""Fields of `SamplingParams` that constrain the whole output; a request has one of them."""
SERVER_MAX_LOGPROBS = 20
"""Most alternatives of a token in an answer of the server, as OpenAI."""

Objective = Literal["latency", "throughput"]
Word = str | Sequence[int]
"""A word as text, or as tokens."""


@dataclass(frozen=True)
class OffloadConfig(OptionSet):
    """Parts of a model that the host holds or computes for a rank with a device.

    As in Inferflow: keys and values of the last layers of a rank, the token embedding, and the
    first layers.  Kernels of the device access pages and embedding in pinned memory over the bus.
    """

    kv_host_percent: float = option(
        0.0, "share of a device's layers, the last ones, whose keys and values lie in host memory",
        low=0, high=100, unit="%", metavar="P",
    )  # fmt: skip
    embeddings_on_host: bool = option(
        False, "keep the token embedding of a device in host memory",
        more="Only tables that are looked up; not those of a tied output head.",
    )  # fmt: skip
    cpu_layers: int = option(
        0, "first layers that the host computes, with a device for the others", low=0,
        high=MAX_INT, unit="layers",
        more='Partition "0" becomes "0:2;1:6" on "cpu,cuda" for 2 of 8 layers.',
    )  # fmt: skip

    @property
    def offload(self) -> OffloadConfig:
        """These fields alone."""
        return OffloadConfig(self.kv_host_percent, self.embeddings_on_host, self.cpu_layers)

    @property
    def unused_note(self) -> str:
        """Note for a run without devices, where the given options have no effect; or empty."""
        given = [
            f"{name}={value:g}" if not isinstance(value, bool) else name
            for name, value in asdict(self.offload).items()
            if value
        ]
        if not given:
            return ""
        return (
            f"without a device the host holds and computes everything: {', '.join(given)} "
            f"{'has' if len(given) == 1 else 'have'} no effect"
        )

    def host_layers(self, n_layers: int) -> int:
        """Return the number of a rank's layers whose keys and values lie in host memory.

        Examples
        --------
        >>> OffloadConfig(kv_host_percent=50).host_layers(5)
        2
        """
        return int(n_layers * self.kv_host_percent / 100)


@dataclass(frozen=True)
class LoadOptions(OffloadConfig):
    """Options of `nbflow.load`."""

    spec: str | Path | None = option(
        None, "spec file, or name of a model (llama2_7b_chat), instead of the checkpoint's own",
        metavar="FILE", file=True,
    )  # fmt: skip
    weights: str | Path | object | None = option(
        None, "weight format, e.g. q4, or a policy file (.toml)", shown="as stored",
        metavar="FMT", file=True, suffix=".toml",
        more="Of the attention and feed-forward matrices: a name of `nbflow_kernels.FORMATS`, or a "
        "policy that names one matrix by matrix (`nbflow.quantization.policy`).",
    )  # fmt: skip
    encoder: str = option(
        "best", "quantizer, e.g. best, plain, gptq, hqq, outliers, awq, hadamard+gptq",
        metavar="E",
        more="awq and hadamard first transform the model in a way that preserves its results; "
        "parts are joined by +.  Only with `weights`.  docs/quantization.md explains them.",
    )  # fmt: skip
    importance: str | Path | object | None = option(
        None, "file of nbflow imatrix or llama.cpp for the quantizer", metavar="FILE", file=True,
        more="In Python also name -> mean squares (K,) or second moments (K, K) of the inputs of a "
        "matrix; gptq needs the latter.",
    )  # fmt: skip
    act_order: bool = option(False, "GPTQ: columns with the largest inputs first")
    damping: float = option(
        0.01, "GPTQ: added to the diagonal of the second moments, in units of its mean",
        low=0, high=1, metavar="D",
    )  # fmt: skip
    outliers: float = option(
        0.0, "share of the weights kept exactly as outliers of the format", low=0, high=0.05,
        metavar="R", more="Only with `weights` in a block format.",
    )  # fmt: skip
    activations: Literal["f32", "bf16", "int8"] = option(
        "f32", "arithmetic of products with weights: f32, bf16 or int8", metavar="A",
        more='"f32" multiplies float32 activations with the decoded weights.  "bf16" rounds both '
        'to bfloat16.  "int8" rounds activations to 8 bits in blocks of 32 columns, as llama.cpp, '
        "for weights in a block format.  Sums are float32 (int32 within a block).",
    )  # fmt: skip
    kv: str = option(
        "f16", "KV cache format: f16, q8_0, ...; two (q8_0/q4_0) are those of keys and of values",
        metavar="FMT[/FMT]",
    )  # fmt: skip
    partition: str = option(
        "0",
        "'0;1' by layer, '0&1' by tensor, '0&1;2&3' hybrid, '0:3;1' uneven, '0/1' replicas; auto: "
        "the best by the planner for the ranks of mpirun",
        metavar="P",
        more="Numbers are MPI ranks under mpirun, else threads of this process.",
    )
    optimize: Objective = option(
        "latency", 'aim of partition "auto": latency, or throughput, perhaps with replicas',
        metavar="AIM",
    )  # fmt: skip
    machine: str | Path | None = option(
        None, 'machine description for partition "auto" (nbflow plan --measure)',
        shown="measured", metavar="NAME|FILE", file=True,
    )  # fmt: skip
    exchange: Literal["f32", "q8"] = option(
        "f32", "format of partial sums between ranks: f32 or q8", metavar="E",
        more='"q8" sends bytes with a scale for 32 of them: 3.6 times fewer bytes, each part '
        "rounded to 1/254 of the largest number of its block.",
    )  # fmt: skip
    device: str = option(
        "auto", "auto (cpu), cpu, cuda, or emulator (CUDA kernels on the CPU, checked; very slow)",
        more='One for all ranks, or one for each: "cpu,cuda" with partition "0;1".  Ranks on '
        '"cuda" take the devices of the machine in turn; "cuda:1" names one.',
    )  # fmt: skip
    graphs: bool = option(True, "run steps of generation as CUDA graphs on devices")
    tokenizer: str | Path | None = option(
        None, "tokenizer file, if it is not in the folder of the weights", metavar="FILE",
        file=True,
    )  # fmt: skip
    max_context: int | None = option(
        None, "shorten the context", shown="the model's", low=1, high=MAX_INT, unit="tokens"
    )
    threads: int | None = option(
        None, "threads of each rank", shown="an even share of the cores", low=1, high=MAX_INT
    )
    max_step_tokens: int = option(
        512, "most tokens in one step; longer prompts run in chunks, with the same result",
        low=1, high=MAX_INT, unit="tokens", cli=False, toml=False,
    )  # fmt: skip


@dataclass(frozen=True)
class EngineOptions(OptionSet):
    """Options of `nbflow.LLMEngine`."""

    max_step_tokens: int | None = option(
        None, "most tokens in one step; longer prompts run in chunks", shown="512", low=1,
        high=MAX_INT, unit="tokens",
    )  # fmt: skip
    max_sequences: int | None = option(
        None, "most sequences that run at once", shown=str(MAX_SEQUENCES), low=1, high=MAX_INT,
        more="At most as many as a step has tokens.",
    )  # fmt: skip
    max_waiting: int = option(
        1024, "most sequences that wait; one more is refused (status 429)", low=1, high=MAX_INT
    )
    kv_bytes: int | None = option(
        None, 'most memory of the KV cache on each rank, e.g. "2GiB"', low=1, high=2**60,
        unit="bytes", size=True, metavar="SIZE",
        shown="what the sequences can use, at most half of the free memory",
    )  # fmt: skip
    prefix_cache: bool = option(True, "share pages of prompts that begin alike")
    on_failure: Literal["continue", "stop"] = option(
        "continue", "with replicas: continue with the others when one has failed, or stop",
        metavar="POLICY",
        more="Requests of the failed one end with an error either way.",
    )  # fmt: skip


@dataclass(frozen=True)
class SpeculativeConfig(OptionSet):
    """Options of speculative decoding."""

    draft: str | object | None = option(
        None, 'draft model: a smaller MODEL with the same vocabulary, or "ngram"', metavar="MODEL",
        flags=("--draft", "--draft-model"), file=True,
    )  # fmt: skip
    n_draft: int = option(
        5,
        "draft tokens per step",
        low=1,
        high=64,
        unit="tokens",
        flags=("--n-draft", "--draft-max"),
    )
    draft_weights: str | None = option(
        None, "weight format of the draft model", shown="as stored", metavar="FMT", file=True,
        suffix=".toml",
    )  # fmt: skip
    draft_verify: Literal["same", "chain"] = option(
        "same", "same: exactly the tokens without a draft; chain: rejection sampling, which "
        "preserves the distribution and accepts more", metavar="HOW",
    )  # fmt: skip


@dataclass(frozen=True)
class SearchParams(OptionSet):
    """Parameters of beam and contrastive search."""

    num_beams: int | None = option(
        None, "beam search: beams", shown="4", low=1, high=4096, http="beam_width"
    )
    length_penalty: float | None = option(
        None, "beam search: exponent of the length that divides the score", shown="1", low=-100,
        high=100,
    )  # fmt: skip
    early_stopping: bool | Literal["never"] | None = option(
        None, "beam search: when it ends, as in transformers: true, false or never", shown="false",
        metavar="WHEN",
    )  # fmt: skip
    penalty_alpha: float | None = option(
        None, "contrastive search with this degeneration penalty, over top_k (4) tokens", low=0,
        high=1, shown="0.6", metavar="A",
    )  # fmt: skip


@dataclass(frozen=True)
class SamplingParams(OptionSet):
    """Parameters of a request.  None leaves the default of the model, or else of the strategy."""

    decoding: str | None = option(
        None, "strategy", shown="what the other parameters mean", metavar="NAME"
    )
    max_tokens: int = option(
        128, "most new tokens; 0 reads the prompt alone", low=0, high=MAX_INT, unit="tokens",
        aliases=("max_completion_tokens", "n_predict", "max_new_tokens"), cli=False,
        flags=("-n", "--max-tokens"),
        http_default="what the context has room for; 16 for completions",
    )  # fmt: skip
    temperature: float | None = option(
        None, "divide the logits by this; 0 is greedy", low=0, high=100, aliases=("temp",),
        flags=("--temperature", "--temp"),
    )  # fmt: skip
    top_k: int | None = option(
        None, "keep this many of the most probable tokens; 0 or -1: all", low=-1, high=MAX_INT
    )
    top_p: float | None = option(
        None, "keep the most probable tokens with this total probability", low=0, high=1,
        above=True,
    )  # fmt: skip
    min_p: float | None = option(
        None, "keep tokens with this probability, relative to the most probable one", low=0, high=1
    )
    typical_p: float | None = option(
        None, "keep locally typical tokens with this total probability", low=0, high=1,
        aliases=("typ_p", "typical"), flags=("--typical-p", "--typical"),
    )  # fmt: skip
    tfs_z: float | None = option(
        None, "tail-free sampling: share of the second derivative that is kept", low=0, high=1,
        aliases=("tail_free",),
    )  # fmt: skip
    top_n_sigma: float | None = option(
        None,
        "keep logits within this many standard deviations of the largest",
        low=-1e6,
        high=1e6,
        more="0 or less: all.",
    )
    xtc_probability: float | None = option(
        None, "probability that XTC excludes the top choices", low=0, high=1
    )
    xtc_threshold: float | None = option(
        None, "XTC: least probability of a top choice", low=0, high=1
    )
    dynatemp_range: float | None = option(
        None, "dynamic temperature: range around the temperature", low=0, high=100
    )
    dynatemp_exponent: float | None = option(
        None, "dynamic temperature: exponent of the normalized entropy", low=0, high=100
    )
    samplers: str | Sequence[str] | None = option(
        None, 'samplers of the chain in order: "top_k;top_p;temperature", or letters: "kpt"',
        flags=("--sampler-order", "--samplers"), metavar="ORDER",
    )  # fmt: skip
    min_keep: int | None = option(
        None, "least number of tokens that a sampler keeps", low=0, high=MAX_INT
    )
    repeat_last_n: int | None = option(
        None, "window of the chain's penalties; -1: all", low=-1, high=MAX_INT, unit="tokens"
    )
    repetition_penalty: float | None = option(
        None, "divide positive logits of tokens that occurred by this, multiply negative ones",
        low=1e-6, high=1e6, aliases=("repeat_penalty",),
        flags=("--repetition-penalty", "--repeat-penalty"),
    )  # fmt: skip
    frequency_penalty: float | None = option(
        None, "subtract this from a logit for each occurrence of the token", low=-2, high=2
    )
    presence_penalty: float | None = option(
        None, "subtract this from the logits of tokens that occurred", low=-2, high=2
    )
    no_repeat_ngram_size: int | None = option(
        None, "n-grams of this size occur once", low=0, high=MAX_INT, unit="tokens"
    )
    dry_multiplier: float | None = option(None, "DRY: penalty of a repetition", low=0, high=1e6)
    dry_base: float | None = option(
        None, "DRY: growth of the penalty with each token", low=0, high=1e6
    )
    dry_allowed_length: int | None = option(
        None, "DRY: longest repetition without a penalty", low=1, high=MAX_INT, unit="tokens"
    )
    dry_penalty_last_n: int | None = option(
        None, "DRY: window; -1: all", low=-1, high=MAX_INT, unit="tokens"
    )
    dry_sequence_breakers: Sequence[str] | None = option(
        None, "DRY: text that ends a repetition", flags=("--dry-sequence-breaker",), repeat=True
    )
    mirostat: int | None = option(None, "version of mirostat, 1 or 2; 0: off", low=0, high=2)
    mirostat_tau: float | None = option(
        None, "mirostat: target surprise", low=0, high=100, unit="bits"
    )
    mirostat_eta: float | None = option(None, "mirostat: learning rate", low=0, high=100)
    mirostat_m: int | None = option(
        None, "mirostat 1: tokens that estimate the distribution", low=2, high=MAX_INT,
    )  # fmt: skip
    max_k: int | None = option(None, "inferflow: most tokens kept", low=1, high=MAX_INT)
    pool_size: int | None = option(None, "inferflow: candidate tokens", low=1, high=MAX_INT)
    eos_bypassing_max: int | None = option(
        None, "inferflow.std: end tokens that are passed over", low=0, high=MAX_INT
    )
    k: int | None = option(None, "inferflow.fsd: candidate tokens", low=1, high=MAX_INT)
    alpha: float | None = option(None, "inferflow.fsd: weight of the penalty", low=0, high=1)
    order: int | None = option(None, "inferflow.fsd: order of the n-gram model", low=1, high=64)
    beta: float | None = option(None, "inferflow.fsd: share of the longest context", low=0, high=1)
    z: float | None = option(None, "inferflow.tfs: share that is kept", low=0, high=1)
    p: float | None = option(
        None, "inferflow.typical: total probability after the first token", low=0, high=1
    )
    tau: float | None = option(
        None, "inferflow.mirostat: target surprise", low=0, high=100, unit="bits"
    )
    eta: float | None = option(None, "inferflow.mirostat: learning rate", low=0, high=100)
    logit_bias: Mapping[str, float] | Sequence[Sequence[float | bool]] | None = option(
        None, "added to the logit of a token id", metavar="ID=BIAS", repeat=True,
        more='JSON spells token ids as texts: {"15": -2.5}; pairs work, and false forbids.',
    )  # fmt: skip
    allowed_token_ids: Sequence[int] | None = option(None, "draw from these tokens only")
    banned_token_ids: Sequence[int] | None = option(None, "never draw these tokens")
    bad_words: Sequence[Word] | None = option(
        None, "text that must not occur", flags=("--bad-word",), repeat=True
    )
    choice: Sequence[str] | None = option(
        None, "one of the texts that the output must be", http="guided_choice", repeat=True,
        aliases=("guided_choice",),
    )  # fmt: skip
    regex: str | None = option(
        None, "regular expression that the output must match", http="guided_regex",
        aliases=("guided_regex",),
    )  # fmt: skip
    json_schema: Mapping[str, Any] | str | None = option(
        None, "JSON schema of the output", http="guided_json", aliases=("guided_json",),
        metavar="FILE",
    )  # fmt: skip
    grammar: str | None = option(
        None, "grammar (GBNF or Lark) of the output", http="guided_grammar",
        aliases=("guided_grammar",), metavar="FILE",
    )  # fmt: skip
    seed: int = option(
        0, "seed of the draws, modulo 2**64; continuation i draws with seed + i",
        low=-(2**63), high=2**64 - 1, http_default="a new one each time",
    )  # fmt: skip
    n: int = option(1, "continuations of each prompt", low=1, high=2**16, cli=False)
    stop: str | Sequence[str] | None = option(
        None, "text that ends the output", aliases=("stop_strings",), repeat=True
    )
    stop_token_ids: Sequence[int] | None = option(
        None, "tokens that end the output, in addition to the model's"
    )
    include_stop_str_in_output: bool = option(False, "keep the stop text in the output")
    ignore_eos: bool = option(False, "continue after an end token")
    min_tokens: int | None = option(
        None, "no end token before this many", low=0, high=MAX_INT, unit="tokens",
        aliases=("min_new_tokens",),
    )  # fmt: skip
    logprobs: int | None = option(
        None, "report this many of the most probable tokens (--json)", low=0, high=2**20,
        http_high=SERVER_MAX_LOGPROBS, aliases=("n_probs",), http="",
    )  # fmt: skip
    prompt_logprobs: int | None = option(
        None, "the same for the tokens of the prompt", low=0, high=2**20,
        http_high=SERVER_MAX_LOGPROBS, cli=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        for text in self.stop_texts:
            if not 0 < len(text.encode(errors="surrogatepass")) <= MAX_STOP_BYTES:
                raise UsageError(
                    f"stop must hold texts of 1..{MAX_STOP_BYTES} bytes, none empty, got "
                    f"{text!r:.40}"
                )
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise UsageError(
                "allowed_token_ids must hold at least one token id; leave it out to allow all"
            )
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError(f"give one of {', '.join(STRUCTURES)}; got {' and '.join(given)}")

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts that end the output."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def structure(self) -> str | None:
        """Name of the structure that the output must have."""
        return next((name for name in STRUCTURES if getattr(self, name) is not None), None)
