"""Train the bundled models: small decoders on the source text of Python's standard library.

    python -m venv /tmp/train && /tmp/train/bin/pip install torch tokenizers safetensors numpy
    alias train="/tmp/train/bin/python tools/checkpoints/train_tiny_python.py"
    train --out specs/nbflow_specs/checkpoints/tiny_python
    train --size draft --teacher specs/nbflow_specs/checkpoints/tiny_python --threads 1 \\
        --steps 2000 --stop 750 --out specs/nbflow_specs/checkpoints/tiny_python_draft
    train --architecture qwen3_5 --teacher specs/nbflow_specs/checkpoints/tiny_python \\
        --threads 1 --compile --out specs/nbflow_specs/checkpoints/tiny_python_hybrid

A draft model proposes tokens to its `--teacher`, a model trained before, and has its tokenizer.
`--continued N` lets half of the windows be the teacher's own greedy continuations of N windows of
the text (sequence-level distillation, Kim and Rush 2016).

`--architecture qwen3_5` trains a hybrid in the layout of Qwen 3.5: the gated delta rule in three
layers of four, gated attention in the fourth; it takes the model of `transformers`.  The recipe is
that of the base model; its `--teacher` gives the tokenizer and is compared with.  A run that was
interrupted continues with `--resume`, from the weights of its last evaluation, without momenta.

Torch is needed here only.  The text is the standard library of the Python that runs this script,
its tests included (PSF licence, see NOTICE), without the generated code tables; it takes a Python
that was installed whole (Debian and container images leave the tests out).  The script prints the
digest of the text and stores it in `training.json` next to the weights.  Seeds are fixed: the same
Python, the same torch build, thread count and kind of processor give the same file; elsewhere the
file differs by float rounding.

The held-out text (`eval.txt`) is made of whole modules that the training never saw.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from delta_rule_training import gated_delta_rule
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Config = dict[str, Any]
BASE: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float16",
}
DRAFT = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}
HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
CONFIGS: dict[tuple[str, str], Config] = {
    ("llama", "base"): BASE,
    ("llama", "draft"): BASE | DRAFT,
    ("qwen3_5", "base"): {k: v for k, v in BASE.items() if k != "rope_theta"} | HYBRID,
}
"""3.7 million parameters, a tenth of them, and 3.9 million."""
END = "<|endoftext|>"
# Whole modules kept out of training; ordinary library code of several kinds.
HELD_OUT = (
    "textwrap.py",
    "heapq.py",
    "shlex.py",
    "json/decoder.py",
    "graphlib.py",
    "netrc.py",
    "tabnanny.py",
    "email/utils.py",
    "bisect.py",
    "sched.py",
)
EXCLUDED_PARTS = ("site-packages", "encodings", "__pycache__", "lib2to3", "config-")
EVAL_BYTES = 160_000
SEED = 20240101


def read_corpus() -> tuple[list[str], str]:
    """Return the training documents and the held-out text."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if any(part.startswith(EXCLUDED_PARTS) for part in relative.parts[:-1]):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if relative.as_posix() in HELD_OUT:
            held_out.append(text)
        else:
            documents.append(text)
    return documents, "\n".join(held_out).encode()[:EVAL_BYTES].decode("utf-8", "ignore")


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Train a byte-level BPE with the usual GPT-2 pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BASE["vocab_size"],
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm with a scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Layer(torch.nn.Module):
    """One decoder layer, parameter names as in Hugging Face checkpoints."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        E, D, eps = (config[k] for k in ("hidden_size", "head_dim", "rms_norm_eps"))
        H, G, FF = (
            config[k] for k in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
        )
        linear = lambda i, o: torch.nn.Linear(i, o, bias=False)  # noqa: E731
        self.head_dim = D
        self.input_layernorm = RMSNorm(E, eps)
        self.post_attention_layernorm = RMSNorm(E, eps)
        self.self_attn = torch.nn.ModuleDict(
            {
                "q_proj": linear(E, H * D),
                "k_proj": linear(E, G * D),
                "v_proj": linear(E, G * D),
                "o_proj": linear(H * D, E),
            }
        )
        self.mlp = torch.nn.ModuleDict(
            {"gate_proj": linear(E, FF), "up_proj": linear(E, FF), "down_proj": linear(FF, E)}
        )

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: list | None = None
    ) -> torch.Tensor:
        B, T, _ = x.shape
        D = self.head_dim
        h = self.input_layernorm(x)
        q, k, v = (
            self.self_attn[n](h).view(B, T, -1, D).transpose(1, 2)
            for n in ("q_proj", "k_proj", "v_proj")
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:  # keys and values of the tokens before
            k, v = cache[:] = [torch.cat(pair, 2) for pair in zip(cache, (k, v), strict=True)]
        a = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1, enable_gqa=True)
        x = x + self.self_attn["o_proj"](a.transpose(1, 2).reshape(B, T, -1))
        h = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate-half position embedding."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Llama(torch.nn.Module):
    """Token embedding, layers, norm and the tied head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        n_layers = config["num_hidden_layers"]
        self.embed_tokens = torch.nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = torch.nn.ModuleList(Layer(config) for _ in range(n_layers))
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        initialize_matrices(self, n_layers)

    def forward(self, ids: torch.Tensor, caches: list[list] | None = None) -> torch.Tensor:
        D, T = self.config["head_dim"], ids.shape[1]
        start = caches[0][0].shape[2] if caches else 0
        frequency = self.config["rope_theta"] ** (-torch.arange(0, D, 2) / D)
        angle = torch.arange(start, start + T)[:, None] * frequency
        x = self.embed_tokens(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, angle.cos(), angle.sin(), caches[i] if caches else None)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def initialize_matrices(model: torch.nn.Module, n_layers: int) -> None:
    """Draw the matrices of a decoder; those that write to the residual stream are smaller."""
    for name, p in model.named_parameters():
        if p.ndim == 2:
            std = 0.02 if "embed" in name else 1 / math.sqrt(p.shape[1])
            torch.nn.init.normal_(p, std=std)
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                p.data.mul_(1 / math.sqrt(2 * n_layers))


class Hybrid(torch.nn.Module):
    """Qwen 3.5 of `transformers` with the recurrence in float32 under autocast."""

    def __init__(self, config: Config) -> None:
        from transformers.models.qwen3_5 import configuration_qwen3_5, modeling_qwen3_5

        super().__init__()
        self.config = config
        modeling_qwen3_5.torch_chunk_gated_delta_rule = gated_delta_rule
        settings = configuration_qwen3_5.Qwen3_5TextConfig(**config)
        self.model = modeling_qwen3_5.Qwen3_5ForCausalLM(settings)
        initialize_matrices(self.model, config["num_hidden_layers"])
        for layer in self.model.model.layers:
            if hasattr(layer, "linear_attn"):
                # A step of 0.001 to 0.1 at the start, as in Mamba-2 (Dao and Gu, 2024): with the
                # constructor's 1.3 most heads would forget everything within two tokens.
                delta = layer.linear_attn
                step = torch.exp(
                    torch.empty_like(delta.dt_bias).uniform_(*map(math.log, (1e-3, 0.1)))
                )
                delta.dt_bias.data.copy_(step + torch.log(-torch.expm1(-step)))
                torch.nn.init.uniform_(delta.conv1d.weight, -0.5, 0.5)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Name the parameters as the checkpoint does, without the leading `model.`."""
        return self.model.model.named_parameters(*args, **kwargs)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits


def learning_rate(step: int, done: float, peak: float) -> float:
    """Warm up over 100 steps, then fall on a half cosine to a twentieth of the peak."""
    if step < 100:
        return peak * (step + 1) / 100
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix updates are orthogonalised (K. Jordan et al., 2024).

    Each update is replaced by the nearest semi-orthogonal matrix, found by five steps of a quintic
    Newton-Schulz iteration.
    """

    def __init__(self, params: list, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.05)
                x = p.grad.lerp(momentum, 0.95).bfloat16()
                tall = x.shape[0] > x.shape[1]
                x = (x.T if tall else x) / (x.norm() + 1e-7)
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
                x = (x.T if tall else x).float()
                p.mul_(1 - group["lr"] * 0.05)
                p.sub_(x, alpha=group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def evaluate(model: torch.nn.Module, ids: np.ndarray, teacher: Llama | None) -> dict[str, float]:
    """Return the perplexity on `ids` in windows of 512 and how often the teacher agrees."""
    context = 512
    n = (len(ids) - 1) // context
    x = torch.from_numpy(ids[: n * context].astype(np.int64)).view(n, context)
    y = torch.from_numpy(ids[1 : n * context + 1].astype(np.int64)).view(n, context)
    loss, same = 0.0, 0
    with torch.no_grad():
        for i in range(0, n, 8):
            logits = model(x[i : i + 8]).float()
            loss += F.cross_entropy(
                logits.flatten(0, 1), y[i : i + 8].flatten(), reduction="sum"
            ).item()
            if teacher is not None:
                same += int((logits.argmax(-1) == teacher(x[i : i + 8]).argmax(-1)).sum())
    found = {"held_out_perplexity_float32": round(math.exp(loss / y.numel()), 3)}
    if teacher is not None:
        found["held_out_same_top_token_share"] = round(same / y.numel(), 4)
    return found


def load_trained(folder: Path) -> Llama:
    """Return a model that this script has trained before."""
    model = Llama(json.loads((folder / "config.json").read_text()))
    state = load_file(folder / "model.safetensors")
    model.load_state_dict({k.removeprefix("model."): v.float() for k, v in state.items()})
    return model


@torch.no_grad()
def resume(model: Llama | Hybrid, folder: Path) -> int:
    """Take over the tensors of an interrupted run; return the number of its steps."""
    state = load_file(folder / "model.safetensors")
    for name, p in model.named_parameters():
        p.copy_(state[f"model.{name}"].float())
    return int(json.loads((folder / "training.json").read_text())["steps"])


@torch.no_grad()
def continue_greedily(teacher: Llama, prompts: torch.Tensor, length: int) -> torch.Tensor:
    """Return prompts (B, T) with the tokens that the teacher finds likeliest behind them."""
    G, D = (teacher.config[k] for k in ("num_key_value_heads", "head_dim"))
    caches = [[torch.zeros(len(prompts), G, 0, D)] * 2 for _ in teacher.layers]
    ids, new = prompts, prompts
    while ids.shape[1] < length:
        new = teacher(new, caches)[:, -1:].argmax(-1)
        ids = torch.cat([ids, new], 1)
    return ids


def export(
    model: Llama | Hybrid, tokenizer: Tokenizer, held_out: str, record: dict, out: Path
) -> None:
    """Write an ordinary Hugging Face folder; the tokenizer is the teacher's, if there is one."""
    out.mkdir(parents=True, exist_ok=True)
    state = {f"model.{k}": v.detach().half().contiguous() for k, v in model.named_parameters()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
    if "teacher" not in record:
        tokenizer.save(str(out / "tokenizer.json"))
    if not record.get("windows_continued_by_teacher"):
        (out / "eval.txt").write_text(held_out, encoding="utf-8")
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


class Windows:
    """Windows of the training text, half of them continued by the teacher, if any.

    A draft model must predict the teacher's likeliest tokens after the teacher's own output.
    """

    def __init__(self, tokens: np.ndarray, rng: np.random.Generator) -> None:
        self.tokens, self.rng = tokens, rng
        self.continued = torch.zeros(0, 0, dtype=torch.int64)

    def draw(self, n: int, length: int) -> torch.Tensor:
        """Return windows of the text, int64 (n, length)."""
        at = self.rng.integers(0, len(self.tokens) - length, n)
        return torch.from_numpy(
            np.stack([self.tokens[i : i + length] for i in at]).astype(np.int64)
        )

    def add_continued(self, teacher: Llama, n: int) -> None:
        """Let the teacher continue `n` windows from their middle."""
        parts = []
        for i in range(0, n, 128):
            parts.append(continue_greedily(teacher, self.draw(min(128, n - i), 128), 257))
            print(f"continued {i + len(parts[-1])} windows", flush=True)
        self.continued = torch.cat(parts)

    def step(self, n: int, length: int) -> torch.Tensor:
        """Return the windows of a step."""
        if not len(self.continued):
            return self.draw(n, length)
        rows = torch.from_numpy(self.rng.integers(0, len(self.continued), n // 2))
        return torch.cat([self.draw(n - n // 2, 257), self.continued[rows]])


def train(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED + arguments.resume)  # other windows after an interruption

    documents, held_out = read_corpus()
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    teacher = None
    if arguments.teacher:
        teacher = load_trained(arguments.teacher).requires_grad_(False)
        tokenizer = Tokenizer.from_file(str(arguments.teacher / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(documents)
    end = tokenizer.token_to_id(END)
    encoded = tokenizer.encode_batch(documents)
    tokens = np.concatenate([np.array([end, *e.ids], np.uint16) for e in encoded])
    eval_ids = np.array(tokenizer.encode(held_out).ids, np.uint16)
    print(
        f"{len(documents)} modules, {sum(map(len, documents)):,} characters, "
        f"{len(tokens):,} tokens, held out {len(eval_ids):,} tokens, sha256 {digest[:16]}"
    )

    config = CONFIGS[arguments.architecture, arguments.size]
    kind = Hybrid if arguments.architecture == "qwen3_5" else Llama
    model = kind(config)
    print(f"{sum(p.numel() for _, p in model.named_parameters()):,} parameters")
    first = resume(model, arguments.out) if arguments.resume else 0
    forward = torch.compile(model, dynamic=False) if arguments.compile else model
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in named if p.ndim != 2 or "embed" in n]
    optimizers = [
        (Muon(matrices, 0.0), 0.02 * arguments.rate),
        (
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
            3e-3 * arguments.rate,
        ),
    ]
    started, seen = time.time(), 0
    windows = Windows(tokens, rng)
    if arguments.continued:
        windows.add_continued(teacher, arguments.continued)
    last = arguments.stop or arguments.steps
    for step in range(first, last):
        done = (step - 100) / max(1, arguments.steps - 100)
        for optimizer, peak in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, done, peak)
        # Short windows are cheaper; the last quarter sees the full context.
        short = done < 0.75 or arguments.continued
        T = BASE["max_position_embeddings"] // (2 if short else 1)
        window = windows.step(arguments.tokens_per_step // T, T + 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = forward(window[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        for optimizer, _ in optimizers:
            optimizer.step()
        seen += window.numel() - len(window)
        if step % 50 == 0:
            rate = seen / (time.time() - started)
            print(f"step {step:5d}  loss {loss.item():.3f}  {rate:,.0f} tokens/s", flush=True)
        if step % 250 == 249 or step == last - 1:
            found = evaluate(model, eval_ids, teacher)
            print(f"step {step:5d}  {found}", flush=True)
            record = {
                "text": f"standard library of CPython {platform.python_version()}",
                "text_sha256": digest,
                "training_tokens": len(tokens),
                "held_out_modules": list(HELD_OUT),
                "steps": step + 1,
                "planned_steps": arguments.steps,
                **({"resumed_at_step": first} if first else {}),
                "tokens_per_step": arguments.tokens_per_step,
                **({"learning_rate_factor": arguments.rate} if arguments.rate != 1 else {}),
                "parameters": sum(p.numel() for _, p in model.named_parameters()),
                "last_loss": round(loss.item(), 3),
                **found,
                **({"teacher": arguments.teacher.name} if arguments.teacher else {}),
                **({"windows_continued_by_teacher": arguments.continued} if teacher else {}),
                "torch": torch.__version__,
                "threads": arguments.threads,
                "machine": platform.machine(),
                "seed": SEED,
            }
            export(model, tokenizer, held_out, record, arguments.out)
    print("wrote", *(f"{p.name} {os.path.getsize(p):,}" for p in sorted(arguments.out.iterdir())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--architecture", choices=["llama", "qwen3_5"], default="llama")
    parser.add_argument("--size", choices=["base", "draft"], default="base")
    parser.add_argument("--teacher", type=Path, help="folder of the model that it is a draft of")
    parser.add_argument("--continued", type=int, default=0, help="windows the teacher continues")
    parser.add_argument("--resume", action="store_true", help="go on with the run of --out")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--stop", type=int, help="end after N steps")
    parser.add_argument("--tokens-per-step", type=int, default=6144)
    parser.add_argument("--rate", type=float, default=1.0, help="factor of the learning rates")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="a quarter faster; needs a compiler")
    arguments = parser.parse_args()
    if (arguments.architecture, arguments.size) not in CONFIGS:
        parser.error(f"no configuration of size {arguments.size} for {arguments.architecture}")
    train(arguments)


if __name__ == "__main__":
    main()
