"""GGUF files of the golden checkpoints, as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np

from nbflow.checkpoint import open_weights
from nbflow.program.read_operand import read_operand
from nbflow.program.records import Operand
from nbflow.spec import families, resolve
from nbflow.spec.model_spec import ModelSpec

PERMUTED = (
    "llama",
    "deepseek",
    "granite",
    "granitemoe",
    "minicpm",
    "baichuan",
    "smollm3",
    "internlm2",
    "arcee",
    "mistral3",
)
"""Architectures whose rotary pairs the converter makes neighbours."""


_LIKE_DEEPSEEK = (
    "dots1", "glm4_moe", "bailing", "mimo_v2", "kimi_linear", "afmoe", "exaone_moe", "mistral4",
    "glm_moe_dsa",
)  # fmt: skip
"""Families with the metadata of DeepSeek V3's experts."""


def write_gguf(
    source: Path,
    arch: str,
    path: Path,
    more: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
) -> None:
    """Write the checkpoint in a folder as a GGUF file, with more tensors and without some."""
    spec = resolve(source).spec
    writer = gguf.GGUFWriter(str(path), arch)
    _add_numbers(writer, spec)
    names = families_by_arch()[arch].tensors
    with open_weights(source) as file:
        tensors = {ours: read_operand(spec, file, Operand(ours)) for ours in spec.tensor_shapes()}
    if arch in ("qwen35", "qwen35moe"):
        tensors = _in_turn(spec, tensors)
    if arch == "kimi-linear":
        tensors = {name: _of_kimi(name, array) for name, array in tensors.items()}
    if spec.activation == "xielu":
        _add_xielu(writer, spec, tensors)
    for name, array in {**_gguf_tensors(spec, arch, tensors, names), **(more or {})}.items():
        if not name.endswith(without):
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_t5(source: Path, path: Path) -> None:
    """Write an encoder with a decoder, as the converter does for T5."""
    spec = resolve(source).spec
    encoder = spec.encoder
    writer = gguf.GGUFWriter(str(path), "t5")
    _add_numbers(writer, encoder)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_decoder_block_count(spec.n_layers)
    writer.add_relative_attn_buckets_count(spec.bias_buckets)
    writer.add_decoder_start_token_id(spec.decoder_start_id)
    with open_weights(source) as file:
        for part, side in ((encoder, "enc"), (spec, "dec")):
            for ours in part.tensor_shapes():
                array = read_operand(part, file, Operand(ours)).astype(np.float32)
                name = _t5_name(ours, side)
                if name != "token_embd.weight" or side == "dec":
                    writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _t5_name(ours: str, side: str) -> str:
    outside = {
        "embed.weight": "token_embd.weight",
        "head.weight": "output.weight",
        "final_norm.weight": f"{side}.output_norm.weight",
        "position_bias.weight": f"{side}.blk.0.attn_rel_b.weight",
    }
    if ours in outside:
        return outside[ours]
    _, layer, inner = ours.split(".", 2)
    inner = inner.replace("cross_norm", "cross_attn_norm").replace("cross.", "cross_attn_")
    return f"{side}.blk.{layer}.{inner.replace('attn.', 'attn_').replace('ffn.', 'ffn_')}"


def families_by_arch():
    """Return the GGUF families by llama.cpp's architecture names."""
    return {
        kind.removeprefix("gguf-"): family
        for family in families().values()
        for kind in family.model_types
        if kind.startswith("gguf-")
    }


def _add_numbers(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    """Write the metadata."""
    writer.add_vocab_size(spec.vocab_size)
    writer.add_context_length(spec.max_context)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.n_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.n_heads)
    writer.add_head_count_kv(spec.n_kv_heads)
    if spec.latent is not None:
        _add_latent(writer, spec)
    elif spec.head_dim * spec.n_heads != spec.hidden_size:
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.head_dim)
    (writer.add_layer_norm_rms_eps if spec.norm == "rms" else writer.add_layer_norm_eps)(
        spec.norm_eps
    )
    if spec.rope.dim:
        writer.add_rope_dimension_count(spec.rope.dim)
        writer.add_rope_freq_base(spec.rope.theta)
    if spec.local_heads is not None:
        kinds = [spec.is_local(i) for i in range(spec.n_layers)]
        heads = spec.n_kv_heads, spec.local_heads.n_kv_heads
        writer.kv_data[-1].pop(f"{writer.arch}.attention.head_count_kv")
        if len(set(heads)) > 1:
            writer.add_head_count_kv([heads[is_local] for is_local in kinds])
        else:
            writer.add_head_count_kv(heads[0])
        writer.add_sliding_window_pattern(kinds)
        if spec.attn_output_scale != 1.0:
            scale = f"{writer.arch}.attention.value_scale"
            writer.add_float32(scale, spec.attn_output_scale)
        for length in ("key_length", "value_length"):
            writer.kv_data[-1].pop(f"{writer.arch}.attention.{length}", None)
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.value_dim)
        if spec.local_heads.key_dim != spec.head_dim:
            writer.add_key_length_swa(spec.local_heads.key_dim)
            writer.add_value_length_swa(spec.local_heads.value_dim)
        writer.add_rope_freq_base_swa(spec.local_rope.theta)
    if spec.delta is not None:
        _add_delta_rule(writer, spec)
    if spec.family == "gemma4":
        _add_of_gemma4(writer, spec)
    if spec.family == "gemma3n":
        _add_of_gemma3n(writer, spec)
    if spec.window is not None:
        writer.add_sliding_window(spec.window)
    if spec.logits_soft_cap is not None:
        writer.add_attn_logit_softcapping(spec.logits_soft_cap)
    if spec.qkv_clip:
        writer.add_clamp_kqv(spec.qkv_clip)
    if spec.head_soft_cap is not None:
        writer.add_final_logit_softcapping(spec.head_soft_cap)
    if spec.family.startswith("cohere"):
        writer.add_logit_scale(spec.logits_scale)
    if spec.family in ("granite", "granitemoe", "minicpm"):
        writer.add_embedding_scale(spec.embed_scale)
        writer.add_residual_scale(spec.residual_scale)
        writer.add_logit_scale(1 / spec.logits_scale)
        writer.add_attention_scale(spec.sm_scale)
    if spec.family in ("gpt_neox", "stablelm"):
        writer.add_parallel_residual(spec.residual != "sequential")
    if not spec.causal:
        writer.add_causal_attention(False)
        writer.add_token_type_count(spec.type_vocab_size)
    if spec.family in ("gpt_oss", "ministral3", "olmo3"):
        _add_yarn(writer, spec)
    if spec.temperature is not None:
        if spec.latent is None:
            writer.add_rope_scaling_yarn_log_mul(spec.rope.scaling.mscale_all_dim)
        else:
            writer.add_attn_temperature_length(spec.temperature.floor)
        writer.add_attn_temperature_scale(spec.temperature.scale)
    if spec.family == "exaone_moe":
        kinds = [i not in spec.full_layers for i in range(spec.n_layers)]
        writer.add_sliding_window_pattern(kinds)
    if spec.moe is not None:
        writer.add_expert_count(spec.moe.n_experts)
        writer.add_expert_used_count(spec.moe.top_k)
        if spec.moe.expert_size != spec.intermediate_size:
            writer.add_expert_feed_forward_length(spec.moe.expert_size)
        if spec.family in ("qwen2_moe", "qwen3_5_moe", "qwen3_next"):
            writer.add_expert_shared_feed_forward_length(spec.moe.shared_size)
        if spec.family.startswith(("deepseek", "ernie4_5", *_LIKE_DEEPSEEK)):
            writer.add_expert_shared_count(spec.moe.shared_size // spec.moe.expert_size)
            writer.add_leading_dense_block_count(1)
        if spec.family.startswith(("deepseek", *_LIKE_DEEPSEEK)):
            writer.add_expert_weights_scale(spec.moe.scale)
            writer.add_expert_weights_norm(spec.moe.renormalize)
            gating = gguf.ExpertGatingFuncType[spec.moe.scoring.upper()]
            writer.add_expert_gating_func(gating)
            writer.add_expert_group_count(spec.moe.groups)
            writer.add_expert_group_used_count(spec.moe.groups_used)


def _add_xielu(writer: gguf.GGUFWriter, spec: ModelSpec, tensors: dict[str, np.ndarray]) -> None:
    """Write the numbers of xIELU, which are metadata."""
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        parts = [tensors.pop(f"layers.{i}.ffn.{name}.weight") for i in range(spec.n_layers)]
        getattr(writer, f"add_xielu_{name}")([float(part.item()) for part in parts])


def _add_delta_rule(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    delta = spec.delta
    writer.add_ssm_conv_kernel(spec.conv_kernel)
    if delta.decay == "channel":
        writer.add_kda_head_dim(delta.key_dim)
        kinds = [spec.kind_of(i).mixer for i in range(spec.n_layers)]
        writer.kv_data[-1].pop("kimi-linear.attention.head_count_kv")
        writer.add_head_count_kv([int("attention" in kind) for kind in kinds])
        return
    writer.add_ssm_state_size(delta.key_dim)
    writer.add_ssm_group_count(delta.key_heads)
    writer.add_ssm_time_step_rank(delta.value_heads)
    writer.add_ssm_inner_size(delta.value_heads * delta.value_dim)
    writer.add_full_attention_interval(_first_attention(spec) + 1)
    pairs = spec.rope.dim // 2  # in turn of three sections
    writer.add_rope_dimension_sections([*(len(range(j, pairs, 3)) for j in range(3)), 0])


def _of_kimi(name: str, array: np.ndarray) -> np.ndarray:
    """Return negative rates, and the four dimensions of convolutions."""
    if name.endswith("a_log.weight"):
        return -np.exp(array.astype(np.float64)).astype(np.float32)
    return array.reshape(1, len(array), 1, -1) if "_conv." in name else array


def _first_attention(spec: ModelSpec) -> int:
    return next(i for i in range(spec.n_layers) if "attention" in spec.kind_of(i).mixer)


def _in_turn(spec: ModelSpec, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with value heads 0 of all key heads first, then the heads 1, ...

    The rates are negative, norms whole, and queries and gates by head as they were.
    """
    delta, done = spec.delta, {}
    for ours, array in tensors.items():
        role = ours.split(".", 2)[-1].removesuffix(".weight")
        if role in ("delta.v", "delta.z", "delta.v_conv", "delta.b", "delta.a") or (
            role in ("delta.a_log", "delta.dt_bias")
        ):
            array = _turned(array, delta.key_heads, delta.group)
        if role == "delta.out":
            array = _turned(array.T, delta.key_heads, delta.group).T
        if role == "delta.a_log":
            array = -np.exp(array.astype(np.float64)).astype(np.float32)
        if ours.endswith("norm.weight") and role != "delta.norm":
            array = array + np.float32(1)
        done[ours] = array
    for i in range(spec.n_layers):
        for whole, members in (("qkv", ("q", "k", "v")), ("conv", ("q_conv", "k_conv", "v_conv"))):
            parts = [done.pop(f"layers.{i}.delta.{m}.weight", None) for m in members]
            if parts[0] is not None:
                done[f"layers.{i}.delta.{whole}.weight"] = np.concatenate(parts)
        if f"layers.{i}.attn.gate.weight" in done:
            q, gate = (done.pop(f"layers.{i}.attn.{m}.weight") for m in ("q", "gate"))
            by_head = (a.reshape(spec.n_heads, -1, a.shape[1]) for a in (q, gate))
            both = np.concatenate(list(by_head), axis=1).reshape(-1, q.shape[1])
            done[f"layers.{i}.attn.q_gate.weight"] = both
    return done


def _turned(array: np.ndarray, n_keys: int, group: int) -> np.ndarray:
    by_head = array.reshape(n_keys, group, -1, *array.shape[1:])
    return by_head.swapaxes(0, 1).reshape(array.shape)


def _add_of_gemma3n(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    """Write the metadata of streams, sparse layers and shared caches."""
    writer.add_altup_active_idx(spec.active_stream)
    writer.add_altup_num_inputs(spec.streams)
    writer.add_shared_kv_layers(spec.kv_shared_layers)
    writer.add_embedding_length_per_layer_input(spec.layer_embed_size)
    writer.add_activation_sparsity_scale([spec.cut_of(i) for i in range(spec.n_layers)])
    writer.add_sliding_window_pattern([i not in spec.full_layers for i in range(spec.n_layers)])
    writer.add_rope_freq_base_swa(spec.local_rope.theta)


def _add_of_gemma4(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    """Write the metadata of shared caches, per-layer embeddings and widths by layer."""
    writer.add_shared_kv_layers(spec.kv_shared_layers)
    writer.add_embedding_length_per_layer_input(spec.layer_embed_size)
    writer.add_rope_dimension_count_swa(spec.local_rope.dim)
    if spec.kv_shared_ffn_factor > 1:
        writer.kv_data[-1].pop("gemma4.feed_forward_length")
        writer.add_feed_forward_length([spec.ffn_size(i) for i in range(spec.n_layers)])


def _add_latent(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    """Write the metadata of latent attention, as in files with one matrix per head."""
    writer.add_key_length(spec.cached_dim)
    writer.add_value_length(spec.latent.kv_rank)
    writer.add_key_length_mla(spec.head_dim)
    writer.add_value_length_mla(spec.value_dim)
    writer.add_kv_lora_rank(spec.latent.kv_rank)
    if spec.latent.q_rank:
        writer.add_q_lora_rank(spec.latent.q_rank)
    if spec.indexer is not None:
        writer.add_indexer_head_count(spec.indexer.heads)
        writer.add_indexer_key_length(spec.indexer.dim)
        writer.add_indexer_top_k(spec.indexer.top_k)
        kinds = [i in spec.indexer.layers for i in range(spec.n_layers)]
        writer.add_array(f"{writer.arch}.attention.indexer.types", kinds)
    if spec.rope.scaling is not None:
        _add_yarn(writer, spec)
        writer.add_rope_scaling_yarn_log_mul(0.1 * spec.rope.scaling.mscale_all_dim)


def _add_yarn(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    scaling = spec.rope.scaling
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling.factor)
    writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position)


def _gguf_tensors(spec, arch, tensors, names):
    """Return the file's tensors: renamed, reordered, fused and stacked."""
    done = {}
    for ours, array in tensors.items():
        if ours.startswith("layers."):
            _, layer, inner = ours.split(".", 2)
            of_head = re.sub(r"_norm\.\d+\.", "_norm.{j}.", inner)
            if of_head != inner:
                name = names[f"layers.{{i}}.{of_head}"][0].replace("{i}", layer)
                done.setdefault(name, []).append(array)
                continue
            if ".moe." in ours and not ours.endswith(".bias"):
                j, inner = inner.removeprefix("moe.").split(".", 1)
                pattern = f"layers.{{i}}.moe.{{j}}.{inner}"
                if pattern not in names:  # gate and up as one
                    whole = names["layers.{i}.moe.{j}.gate_up.weight"][0].replace("{i}", layer)
                    done.setdefault((whole, inner), []).append(array)
                    continue
                name = names[pattern][0].replace("{i}", layer)
                done.setdefault(name, []).append(array)
                assert len(done[name]) == int(j) + 1
                continue
        else:
            layer, inner = "", ours
            of_stream = re.sub(r"^(streams\.\w+)\.\d+\.", r"\1.{j}.", ours)
            if of_stream != ours:
                done.setdefault(names[of_stream][0], []).append(array)
                continue
        if arch in PERMUTED and inner.startswith(("attn.q.", "attn.k.")):
            array = _neighbours(array, spec.head_dim)
        if spec.normalize_head and ours == "head.weight":
            array = array / np.sqrt(np.square(array.astype(np.float64)).sum(1))[:, None]
        if arch == "bert" and ours.split(".")[0] in ("transform", "transform_norm", "head"):
            continue  # files of encoders have no head
        has_offset = arch.startswith(("gemma", "nemotron")) and spec.norm_offset
        if has_offset and inner.endswith("norm.weight"):
            array = array + np.float32(1)
        if inner.startswith("shared_gate"):
            array = array.reshape(-1)
        if inner in ("attn.k_b.weight", "attn.v_b.weight"):
            array = array.reshape(spec.n_heads, -1, array.shape[1])
        has_short = spec.latent is not None and spec.latent.q_rank > 0
        done[_name(ours, layer, names, has_short)] = array
    done = {k: np.stack(v) if isinstance(v, list) else v for k, v in done.items()}
    for whole in {key[0] for key in done if isinstance(key, tuple)}:
        parts = [done.pop((whole, f"{part}.weight")) for part in ("gate", "up")]
        done[whole] = np.concatenate(parts, axis=1)
    return _fuse(done, arch)


def _name(ours, layer, names, has_short):
    kind = ours.rsplit(".", 1)[1]
    pattern = ours.replace(f"layers.{layer}.", "layers.{i}.") if layer else ours
    last = ".attn.q." in ours and has_short  # of a compressed vector
    weight = pattern.removesuffix(kind) + "weight"
    if pattern in names:  # a separately named bias
        return names[pattern][-1 if last else 0].replace("{i}", layer)
    if weight not in names:
        fused_part = {"ffn.gate": "ffn_gate", "ffn.up": "ffn_up"}
        name = f"blk.{{i}}.{fused_part[pattern.split('.', 2)[2].rsplit('.', 1)[0]]}.weight"
    else:
        name = names[weight][0]
    return name.replace("{i}", layer).removesuffix("weight") + kind


def _neighbours(array, head_dim):
    """Bring the rows of rotary pairs (j, j + D/2) next to each other."""
    shape = array.shape
    return array.reshape(-1, 2, head_dim // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _fuse(tensors, arch):
    """Fuse the tensors that the architecture's files store as one."""
    joins = {}
    if arch in ("gptneox", "bloom", "gpt2", "phi3", "chatglm", "falcon", "mpt", "bailingmoe2"):
        joins["attn_qkv"] = ("attn_q", "attn_k", "attn_v")
    if arch in ("phi3", "chatglm", "glm4"):
        joins["ffn_up"] = ("ffn_gate", "ffn_up")
    for layer in range(8):
        for whole, parts in joins.items():
            for kind in ("weight", "bias"):
                found = [tensors.pop(f"blk.{layer}.{p}.{kind}", None) for p in parts]
                if found[0] is not None:
                    tensors[f"blk.{layer}.{whole}.{kind}"] = np.concatenate(found)
    return tensors
