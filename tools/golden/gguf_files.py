"""Make tests/golden/gguf: tiny GGUF files written by llama.cpp's converter, with their logits.

    pip install torch transformers
    python tools/golden/gguf_files.py LLAMA_CPP [NAME ...]

LLAMA_CPP is a source tree of llama.cpp.  A folder holds model.gguf, matrices in float16 and
without a vocabulary, and golden.npz: token ids, the logits of transformers, and the greedy
continuation.

The configurations are such that llama.cpp computes what transformers does: it knows neither a least
time step nor another epsilon in the norms of Falcon Mamba.  Factors of Falcon-H1 are powers of two,
because the converter rounds its products with the matrices.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import families
import numpy as np
import recent_models as recent
import torch
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).parents[2] / "tests" / "golden" / "gguf"
LEAST_STEP = {"time_step_min": 1e-12}
"""No time step is below."""
HYBRID = {**recent.NEMOTRON, **LEAST_STEP}
MAMBA = {**families.MAMBA, "use_bias": False}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "jais2": ("Jais2", "Jais2ForCausalLM", recent.EVEN),
    "starcoder": ("GPTBigCode", "GPTBigCodeForCausalLM", recent.BIG_CODE),
    "minimax_m2": ("MiniMaxM2", "MiniMaxM2ForCausalLM", {
        **recent.MODELS["minimax_m2"][1], "scoring_func": "sigmoid"}),
    "nemotron_h": ("NemotronH", "NemotronHForCausalLM", {
        **HYBRID, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}),
    "nemotron_3": ("NemotronH", "NemotronHForCausalLM", {
        **HYBRID, "moe_latent_size": 20, "n_group": 4, "topk_group": 2}),
    "mamba": ("Mamba", "MambaForCausalLM", MAMBA),
    "falcon_mamba": ("FalconMamba", "FalconMambaForCausalLM", {
        **MAMBA, "state_size": 20, "time_step_rank": 3, "mixer_rms_eps": 1e-5}),
    "mamba2": ("Mamba2", "Mamba2ForCausalLM", {
        **families.RECURRENT["mamba2"][1], **LEAST_STEP, "use_bias": False}),
    "lfm2": ("Lfm2", "Lfm2ForCausalLM", {
        **families.RECURRENT["lfm2"][1], "conv_bias": False}),
    "lfm2_moe": ("Lfm2Moe", "Lfm2MoeForCausalLM", {
        **families.RECURRENT["lfm2_moe"][1], "routed_scaling_factor": 1.0}),
    "qwen3_next": ("Qwen3Next", "Qwen3NextForCausalLM", {
        **families.RECURRENT["qwen3_next"][1], "mlp_only_layers": [], "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 16, "linear_value_head_dim": 16}),
    "llama4": ("Llama4", "Llama4ForCausalLM", {
        **recent.EVEN, "num_hidden_layers": 4, "intermediate_size": 12,
        "intermediate_size_mlp": 40, "num_local_experts": 4, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2, "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192, "use_qk_norm": True}),
    "jamba": ("Jamba", "JambaForCausalLM", families.RECURRENT["jamba"][1]),
    "falcon_h1": ("FalconH1", "FalconH1ForCausalLM", {
        **families.FALCON_H1, "embedding_multiplier": 4.0, "mlp_multipliers": [0.5, 2.0],
        "key_multiplier": 0.5, "attention_in_multiplier": 2.0, "attention_out_multiplier": 0.5,
        "ssm_multipliers": [0.5, 2.0, 0.5, 1.0, 0.25], "ssm_in_multiplier": 2.0,
        "ssm_out_multiplier": 0.5}),
    "granite4": (
        "GraniteMoeHybrid", "GraniteMoeHybridForCausalLM", families.RECURRENT["granite4"][1]),
}  # fmt: skip
"""Name -> class of transformers, architecture of config.json, configuration."""
GRANITE_LAYERS = {"linear_attention": "mamba", "full_attention": "attention"}
"""Kinds of layers of transformers -> of released checkpoints of Granite 4."""
OF_EXPERTS = ("expert", "moe_", "topk_group", "n_group", "norm_topk_prob", "routed_scaling")
"""Beginnings and parts of keys of Nemotron-H with experts, which the converter takes for a sign."""


def main() -> None:
    """Write the folders named on the command line, or all."""
    llama_cpp, *names = sys.argv[1:]
    sys.path[:0] = [llama_cpp, f"{llama_cpp}/gguf-py"]
    for name in names or MODELS:
        torch.manual_seed(sum(map(ord, name)))
        kind, architecture, options = MODELS[name]
        made = families.well_conditioned(kind, options)
        folder = FOLDER / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with torch.no_grad():
            golden = families.arrays(made, 0, families.N_NEW)
        np.savez_compressed(folder / "golden.npz", **golden)
        with tempfile.TemporaryDirectory() as given:
            source = Path(given) / name
            _write_checkpoint(made, source, architecture)
            _convert(source, architecture, folder / "model.gguf")
        size = sum(p.stat().st_size for p in folder.iterdir())
        print(f"{name:20} {size / 1024:6.1f} KB, logits up to {np.abs(golden['logits']).max():.2f}")


def _write_checkpoint(made: families.Made, folder: Path, architecture: str) -> None:
    """Write a checkpoint as released; rates and norms, which the converter changes, in float32."""
    made.model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    is_wide = {k: v.ndim == 1 or k.endswith("A_log") for k, v in stored.items()}
    tensors = {k: v if is_wide[k] else v.half() for k, v in stored.items()}
    config = json.loads((folder / "config.json").read_text())
    if made.convert is not None:
        tensors, config = made.convert(tensors, config)
    tensors = {k: v.contiguous().clone() for k, v in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config["architectures"] = [architecture]
    if config["model_type"] == "granitemoehybrid":
        config["layer_types"] = [GRANITE_LAYERS[kind] for kind in config["layer_types"]]
    if config.get("hybrid_override_pattern", "E").count("E") == 0:
        kept = {"n_groups": config["n_groups"]}
        config = {k: v for k, v in config.items() if not any(map(k.__contains__, OF_EXPERTS))}
        config |= kept
    (folder / "config.json").write_text(json.dumps(config))


def _convert(source: Path, architecture: str, path: Path) -> None:
    """Convert a checkpoint with llama.cpp's converter, without a vocabulary."""
    gguf, conversion = importlib.import_module("gguf"), importlib.import_module("conversion")
    converter = conversion.get_model_class(architecture)

    def set_vocab(self: Any) -> None:
        self._set_vocab_none()
        self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])

    converter.set_vocab, converter.no_mtp = set_vocab, True
    options: dict[str, Any] = {"eager": True}
    if architecture == "NemotronHForCausalLM":  # not completed by defaults, which have experts
        options["hparams"] = json.loads((source / "config.json").read_text())
    with torch.inference_mode():
        converter(source, gguf.LlamaFileType.MOSTLY_F16, path, **options).write()


if __name__ == "__main__":
    main()
