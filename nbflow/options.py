"""Options of models, engines and requests, each a dataclass field.

Python keywords, command-line options (`nbflow.cli.options`), TOML keys (`nbflow.server.config`),
fields of HTTP requests (`nbflow.server.schemas`) and docs/options.md are made from these fields.  A
new option is one field here and the code that uses it.
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
"""Default maximum of running sequences."""
STRUCTURES = ("choice", "regex", "json_schema", "grammar")
"""Fields of `SamplingParams` that constrain the whole output; a request has at most one."""
SERVER_MAX_LOGPROBS = 20
"""Maximum of top log-probabilities in HTTP requests, as OpenAI."""

DECODER_START = ("source_lang", "target_lang", "decoder_prefix", "forced_bos_token_id")
"""Fields of `SamplingParams` for models with an encoder, which all decoding methods take."""

Objective = Literal["latency", "throughput"]
Word = str | Sequence[int]
"""Word as text or token ids."""


@dataclass(frozen=True)
class OffloadConfig(OptionSet):
    """Offload of a device's rank to the host, as in Inferflow.

    KV cache of a rank's last layers, token embedding, and computation of the first layers.  Device
    kernels access offloaded pages and embeddings in pinned memory over the bus.
    """

    kv_host_percent: float = option(
        0.0, "share of a device's layers, from the last, whose KV cache is in host memory",
        low=0, high=100, unit="%", metavar="P",
    )  # fmt: skip
    embeddings_on_host: bool = option(
        False, "keep a device's token embedding in host memory",
        more="Not an embedding that is also the output head.",
    )  # fmt: skip
    cpu_layers: int = option(
        0, "first layers computed on the host, the others on the device", low=0,
        high=MAX_INT, unit="layers",
        more='Partition "0" becomes "0:2;1:6" on "cpu,cuda" for 2 of 8 layers.',
    )  # fmt: skip

    @property
    def offload(self) -> OffloadConfig:
        """Options that put a part of the model into host memory."""
        return OffloadConfig(self.kv_host_percent, self.embeddings_on_host, self.cpu_layers)

    @property
    def unused_note(self) -> str:
        """Note that the given options have no effect without a device; or empty."""
        given = [
            f"{name}={value:g}" if not isinstance(value, bool) else name
            for name, value in asdict(self.offload).items()
            if value
        ]
        if not given:
            return ""
        return (
            f"without a device everything runs on the host: {', '.join(given)} "
            f"{'has' if len(given) == 1 else 'have'} no effect"
        )

    def host_layers(self, n_layers: int) -> int:
        """Return the number of a rank's layers with KV cache in host memory.

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
    weights: str | Path | Mapping[str, Any] | object | None = option(
        None, "weight format, e.g. q4, or a policy file (.toml)", shown="as stored",
        metavar="FMT", file=True, suffix=".toml",
        more="For the matrices of layers: a name of `nbflow_kernels.FORMATS`, or a policy with a "
        "format for each matrix (`nbflow.quantization.policy`), as a file, as a table of its keys, "
        'or as text: "*.ffn.*=q4;*.attn.*=q8".',
    )  # fmt: skip
    quantizer: str = option(
        "auto",
        "quantizer: auto, search, unbiased, reference, gptq, hqq, outliers, awq, hadamard+gptq",
        metavar="E",
        more="awq and hadamard are function-preserving transforms before quantization; + combines "
        "names.  auto is unbiased at 3 bits per weight and below in models that predict the next "
        "token, otherwise search.  Only with `weights`.  See docs/quantization.md.",
    )  # fmt: skip
    importance: str | Path | object | None = option(
        None, "importance matrix of nbflow imatrix or llama.cpp", metavar="FILE", file=True,
        more="In Python also a mapping from matrix names to mean squares (K,) or second moments "
        "(K, K) of the inputs; gptq needs the latter.",
    )  # fmt: skip
    act_order: bool = option(False, "GPTQ: quantize columns with the largest inputs first")
    damping: float = option(
        0.01, "GPTQ: damping of the Hessian's diagonal, relative to its mean",
        low=0, high=1, metavar="D",
    )  # fmt: skip
    outliers: float = option(
        0.0, "share of the weights kept unquantized as outliers", low=0, high=0.05,
        metavar="R", more="Only with `weights` in a block format.",
    )  # fmt: skip
    activations: Literal["f32", "bf16", "int8"] = option(
        "f32", "compute type of matrix products: f32, bf16 or int8", metavar="A",
        more='"f32" multiplies float32 activations with dequantized weights.  "bf16" rounds both '
        'to bfloat16.  "int8" quantizes activations in blocks of 32 columns, as llama.cpp, '
        "for weights in a block format, and queries for keys in a q8_0 cache on processors with "
        "AVX-512 VNNI.  Accumulation is float32 (int32 within a block).",
    )  # fmt: skip
    kv: str = option(
        "f16", "KV cache format: f16, q8_0, ...; or of keys and values apart: q8_0/q4_0",
        metavar="FMT[/FMT]",
        more="Layers with other formats follow semicolons: 'q4_0;0-1:f16;-2:q8_0/f16' (the first "
        "two and the last two layers).",
    )  # fmt: skip
    kv_rotation: Literal["none", "hadamard"] = option(
        "none", "rotation of keys and values before a block format of the cache: none or hadamard",
        metavar="R",
        more="hadamard multiplies blocks of each head by a Hadamard matrix, which spreads outlier "
        "channels; queries and outputs of attention are rotated to match.  Formats of floats in "
        "`kv` are not rotated.  See docs/kvcache.md.",
    )  # fmt: skip
    kv_keys: Literal["post_rope", "pre_rope"] = option(
        "post_rope", "cached keys: post_rope, or pre_rope, before the rotary embedding",
        metavar="K",
        more="pre_rope leaves out the bias of the keys' projection too; attention adds it and "
        "rotates each key as it reads it.  For models with large key biases and block formats.  "
        "See docs/kvcache.md.",
    )  # fmt: skip
    state: Literal["f32", "f16", "bf16", "q8_0"] = option(
        "f32", "storage format of recurrent states: f32, f16, bf16 or q8_0", metavar="FMT",
        more="Only models with recurrent layers have them.  The arithmetic is float32; states are "
        "rounded after each token, in prompts after each chunk of the layer's kernel.  With q8_0 "
        "states of convolutions are bf16.  See docs/state_formats.md.",
    )  # fmt: skip
    partition: str = option(
        "0",
        "pipeline '0;1', tensor parallel '0&1', hybrid '0&1;2&3', uneven '0:3;1', replicas '0/1'; "
        "auto: the planner's best for the ranks of mpirun",
        metavar="P",
        more="Numbers are MPI ranks under mpirun, else threads of this process.",
    )
    optimize: Objective = option(
        "latency", 'objective of partition "auto": latency, or throughput (may use replicas)',
        metavar="AIM",
    )  # fmt: skip
    machine: str | Path | None = option(
        None, 'machine description for partition "auto" (nbflow plan --measure)',
        shown="measured", metavar="NAME|FILE", file=True,
    )  # fmt: skip
    all_reduce: Literal["f32", "q8"] = option(
        "f32", "all-reduce format between ranks: f32 or q8", metavar="E",
        more='"q8" sends 8-bit codes in blocks of 32 with a scale: 3.6 times fewer bytes, each '
        "partial sum rounded to 1/254 of the largest number of its block.",
    )  # fmt: skip
    device: str = option(
        "auto", "auto (cpu), cpu, cuda, or emulator (CUDA kernels on the CPU, checked; very slow)",
        more='One for all ranks, or one for each: "cpu,cuda" with partition "0;1".  Ranks on '
        '"cuda" take the devices of their host in turn; "cuda:1" names one.',
        metavar="DEVICE",
    )  # fmt: skip
    graphs: bool = option(True, "run repeated shapes of steps as CUDA graphs on devices")
    trace: bool = option(
        False, "print each op of every step: time, shape and first values of its output",
        more="To standard error, op by op, so that steps take longer.",
    )  # fmt: skip
    tokenizer: str | Path | None = option(
        None, "tokenizer file, if not in the folder of the weights", metavar="FILE",
        file=True,
    )  # fmt: skip
    max_context: int | None = option(
        None, "shorten the context", shown="the model's", low=1, high=MAX_INT, unit="tokens"
    )
    threads: int | None = option(
        None, "threads of each rank", shown="an even share of the cores", low=1, high=MAX_INT
    )
    pin_threads: bool = option(
        False, "pin each thread to a processor that no other rank of the host uses",
        more="Linux only; NBFLOW_PIN_THREADS=1 does the same.  See docs/partition.md.",
    )  # fmt: skip
    plugins: Sequence[str | Path] = option(
        (), "Python file that registers parts of your own, or name of an installed plugin; it is "
        "imported", metavar="FILE", repeat=True, toml=False,
        more="See docs/bring_your_own.md.  In server configurations and sweep files a key at the "
        "top.",
    )  # fmt: skip
    max_step_tokens: int = option(
        512, "maximum tokens of one step; longer prompts are prefilled in chunks, same result",
        low=1, high=MAX_INT, unit="tokens", cli=False, toml=False,
    )  # fmt: skip


@dataclass(frozen=True)
class EngineOptions(OptionSet):
    """Options of `nbflow.LLMEngine`."""

    max_step_tokens: int | None = option(
        None, "maximum tokens of one step; longer prompts are prefilled in chunks", shown="512",
        low=1, high=MAX_INT, unit="tokens",
    )  # fmt: skip
    max_sequences: int | None = option(
        None, "maximum running sequences", shown=str(MAX_SEQUENCES), low=1, high=MAX_INT,
        more="At most the tokens of a step.",
    )  # fmt: skip
    max_waiting: int = option(
        1024, "maximum waiting sequences; further ones are refused (status 429)", low=1,
        high=MAX_INT,
    )  # fmt: skip
    kv_bytes: int | None = option(
        None, 'maximum size of the KV cache on each rank, e.g. "2GiB"', low=1, high=2**60,
        unit="bytes", size=True, metavar="SIZE",
        shown="as much as the sequences can use, at most half of the free memory",
    )  # fmt: skip
    prefix_cache: bool = option(True, "share KV pages of common prompt prefixes")
    prefix_states: int = option(
        8, "recurrent states kept at page borders of prompts, for the prefix cache", low=0,
        high=MAX_INT,
        more="Only models with recurrent layers have them; 0 turns their prefix cache off.",
    )  # fmt: skip
    on_failure: Literal["continue", "stop"] = option(
        "continue", "with replicas: continue on the others after one fails, or stop",
        metavar="POLICY",
        more="Requests of the failed replica end with an error either way.",
    )  # fmt: skip

    @property
    def n_prefix_states(self) -> int:
        """Recurrent states that the prefix cache keeps."""
        return self.prefix_states if self.prefix_cache else 0


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
        "same", "same: exactly the tokens generated without a draft; chain: rejection sampling, "
        "which preserves the distribution and accepts more", metavar="HOW",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        unused = [] if self.draft is not None else ["n_draft"]
        if self.draft is None or self.draft == "ngram" or callable(self.draft):
            unused += ["draft_weights", "draft_verify"]
        for name in unused:
            if name in self.given():
                needed = "a smaller model" + " or 'ngram'" * (name == "n_draft")
                raise UsageError(
                    f"{name} needs {needed} as draft, got draft {self.draft!r:.60}", name
                )


@dataclass(frozen=True)
class SearchParams(OptionSet):
    """Parameters of beam and contrastive search."""

    num_beams: int | None = option(
        None, "beam search: beams", shown="4", low=1, high=4096, http="beam_width"
    )
    length_penalty: float | None = option(
        None, "beam search: the score is divided by length ** this", shown="1", low=-100,
        high=100,
    )  # fmt: skip
    early_stopping: bool | Literal["never"] | None = option(
        None, "beam search: stopping rule of transformers: true, false or never", shown="false",
        metavar="WHEN",
    )  # fmt: skip
    penalty_alpha: float | None = option(
        None, "contrastive search: degeneration penalty, over top_k (4) tokens", low=0,
        high=1, shown="0.6", metavar="A",
    )  # fmt: skip


@dataclass(frozen=True)
class SamplingParams(OptionSet):
    """Parameters of a request.  None leaves the default of the model, or else of the strategy."""

    decoding: str | None = option(
        None,
        "decoding strategy: NAME, or with parameters NAME:P=1,Q=2",
        shown="implied by the other parameters",
        metavar="NAME",
    )
    max_tokens: int = option(
        128, "maximum new tokens; 0 evaluates the prompt only", low=0, high=MAX_INT,
        unit="tokens", aliases=("max_completion_tokens", "n_predict", "max_new_tokens"), cli=False,
        flags=("-n", "--max-tokens"),
        http_default="the rest of the context; 16 for completions",
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
        None, "tail-free sampling: share of the second derivatives to keep", low=0, high=1,
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
        None, "XTC: minimum probability of a top choice", low=0, high=1
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
        None, "minimum number of tokens that a sampler keeps", low=0, high=MAX_INT
    )
    repeat_last_n: int | None = option(
        None, "window of the penalties; -1: all", low=-1, high=MAX_INT, unit="tokens"
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
    max_k: int | None = option(None, "inferflow: maximum tokens to keep", low=1, high=MAX_INT)
    pool_size: int | None = option(None, "inferflow: candidate tokens", low=1, high=MAX_INT)
    eos_bypassing_max: int | None = option(
        None, "inferflow.std: sampled end tokens to replace", low=0, high=MAX_INT
    )
    k: int | None = option(None, "inferflow.fsd: candidate tokens", low=1, high=MAX_INT)
    alpha: float | None = option(None, "inferflow.fsd: weight of the penalty", low=0, high=1)
    order: int | None = option(None, "inferflow.fsd: order of the n-gram model", low=1, high=64)
    beta: float | None = option(None, "inferflow.fsd: weight of the longest context", low=0, high=1)
    z: float | None = option(None, "inferflow.tfs: share to keep", low=0, high=1)
    p: float | None = option(
        None, "inferflow.typical: total probability after the first token", low=0, high=1
    )
    tau: float | None = option(
        None, "inferflow.mirostat: target surprise", low=0, high=100, unit="bits"
    )
    eta: float | None = option(None, "inferflow.mirostat: learning rate", low=0, high=100)
    logit_bias: Mapping[str, float] | Sequence[Sequence[float | bool]] | None = option(
        None, "added to the logit of a token id", metavar="ID=BIAS", repeat=True,
        more='In JSON token ids are text: {"15": -2.5}; or a list of pairs.  false bans a token.',
    )  # fmt: skip
    allowed_token_ids: Sequence[int] | None = option(None, "sample from these tokens only")
    banned_token_ids: Sequence[int] | None = option(None, "never sample these tokens")
    bad_words: Sequence[Word] | None = option(
        None, "text that must not occur", flags=("--bad-word",), repeat=True
    )
    choice: Sequence[str] | None = option(
        None, "text that the output may be; several are alternatives", http="guided_choice",
        repeat=True,
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
    source_lang: str | None = option(
        None, "translation models: language of the text, as the vocabulary names it: en, eng_Latn, "
        "en_XX", shown="the tokenizer's", metavar="LANG", aliases=("src_lang", "source_language"),
        flags=("--source-lang", "--source-language", "--src-lang"),
    )  # fmt: skip
    target_lang: str | None = option(
        None, "translation models: language to translate to: zh, zho_Hans, zh_CN", metavar="LANG",
        shown="the checkpoint's", aliases=("tgt_lang", "target_language"),
        flags=("--target-lang", "--target-language", "--tgt-lang"),
    )  # fmt: skip
    decoder_prefix: str | None = option(
        None, "models with an encoder: beginning of the answer, which the decoder continues",
        more="Special tokens in it are recognized, e.g. __zh__.",
    )  # fmt: skip
    forced_bos_token_id: int | None = option(
        None, "models with an encoder: first token of the answer, e.g. that of a language", low=0,
        high=MAX_INT, shown="the checkpoint's",
    )  # fmt: skip
    seed: int = option(
        0, "seed of the sampling, modulo 2**64; choice i uses seed + i",
        low=-(2**63), high=2**64 - 1, http_default="a new one each time",
    )  # fmt: skip
    n: int = option(1, "choices for each prompt", low=1, high=2**16, cli=False)
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
        None, "report this many top log-probabilities per token (--json)", low=0, high=2**20,
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
                    f"{text!r:.40}",
                    "stop",
                )
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise UsageError(
                "allowed_token_ids must hold at least one token id; leave it out to allow all",
                "allowed_token_ids",
            )
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(given) > 1:
            message = f"give one of {', '.join(STRUCTURES)}; got {' and '.join(given)}"
            raise UsageError(message, given[1])

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts that end the output."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def structure(self) -> str | None:
        """Name of the given constraint of `STRUCTURES`, or None."""
        return next((name for name in STRUCTURES if getattr(self, name) is not None), None)
