"""GGUF families: names as in the gguf package, and the golden models from GGUF files."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import families_by_arch, write_gguf, write_t5
from safetensors.numpy import load_file, save_file
from small_models import write_checkpoint

import nbflow
import nbflow_kernels as nk
from nbflow.checkpoint import open_weights
from nbflow.checkpoint.readers.gguf import read_metadata
from nbflow.conversion import quantize_checkpoint
from nbflow.planner.memory_plan import plan_memory
from nbflow.spec import check, resolve
from nbflow_kernels.errors import UsageError

FOLDER = Path(__file__).parents[1] / "golden" / "families"
MODELS = {
    "olmo2": "olmo2", "olmoe": "olmoe", "command-r": "cohere", "cohere2": "cohere2",
    "starcoder2": "starcoder2", "nemotron": "nemotron", "glm4": "glm4", "smollm3": "smollm3",
    "granitemoe": "granitemoe", "mpt": "mpt",
    "baichuan": "baichuan2_7b", "bloom": "bloom", "chatglm": "chatglm2", "deepseek": "deepseek_moe",
    "deepseek2": "deepseek_v3", "falcon": "falcon_40b",
    "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3", "gpt2": "gpt2",
    "gptneox": "gpt_neox", "granite": "granite", "llama": "mixtral", "minicpm": "minicpm",
    "orion": "orion", "phi2": "phi", "phi3": "phi3", "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "stablelm": "stablelm",
    "gpt-oss": "gpt_oss", "internlm2": "internlm2",
    "seed_oss": "seed_oss", "arcee": "arcee", "ernie4_5": "ernie4_5",
    "ernie4_5-moe": "ernie4_5_moe", "hunyuan-dense": "hunyuan", "hunyuan-moe": "hunyuan_moe",
    "dots1": "dots1", "exaone4": "exaone4", "mistral3": "ministral3", "qwen2vl": "qwen2_5_vl",
    "qwen3vl": "qwen3_vl", "qwen3vlmoe": "qwen3_vl_moe", "glm4moe": "glm4_moe",
    "bailingmoe2": "bailing_moe_v2", "mimo2": "mimo_v2_flash", "gemma4": "gemma4",
    "apertus": "apertus", "gemma3n": "gemma3n", "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe", "kimi-linear": "kimi_linear", "afmoe": "afmoe",
    "exaone-moe": "exaone_moe", "mistral4": "mistral4", "glm-dsa": "glm_moe_dsa",
    "exaone": "exaone",
}  # fmt: skip
"""Architecture -> golden model."""
OTHERS = {"bert", "t5"}
"""Architectures with tests of their own, being no decoders alone."""
OF_LLAMA_CPP = FOLDER.parent / "gguf"
"""Files that llama.cpp's converter wrote: test_gguf_of_llama_cpp.py."""
NOT_IN_GGUF = {
    "cohere2": "full_layer_every = 2",
    "afmoe": "full_layer_every = 2",
    "glm-dsa": "latent_norm_eps = 1e-6",
    "smollm3": "unrotated_every = 2",
    "ernie4_5-moe": "dense_last = 1",
    "dots1": 'window = 9\nlayer_types = ["full_attention", "full_attention", "sliding_attention"]',
    "exaone4": "full_layer_every = 3",
    "starcoder2": "window = 9",
    "kimi-linear": "linear_key_heads = 2\nlinear_value_heads = 2",
    "gemma3n": "laurel_rank = 6\nlayer_embed_vocab_size = 90",
    "gemma2": f"sm_scale = {24**-0.5}",
    "gemma3": f"sm_scale = {24**-0.5}\nfull_layer_every = 2",
}
"""Fields of a golden model that GGUF files of its architecture cannot express."""


def test_all_architectures_are_tested():
    written = {
        read_metadata(path)["general.architecture"] for path in OF_LLAMA_CPP.glob("*/model.gguf")
    }
    assert set(MODELS) | OTHERS | written == set(families_by_arch())


OTHER_MODELS = {"command-r": "cohere_plus", "stablelm": "stablelm2_12b", "olmo2": "olmo3",
                "gemma4": "gemma4_moe"}  # fmt: skip
"""Architecture -> golden model whose heads' queries and keys have norms of their own; OLMo 3."""


@pytest.mark.parametrize(("arch", "name"), [*MODELS.items(), *OTHER_MODELS.items()])
def test_model_from_a_gguf_file(arch, name, tmp_path):
    source, path, spec_file = FOLDER / name, tmp_path / "model.gguf", None
    more = {"rope_freqs.weight": np.repeat([1.0, 1e30], [2, 6])} if arch == "gemma4" else None
    if arch == "apertus":
        rope = resolve(source).spec.rope
        plain = rope.theta ** (-np.arange(0, rope.dim, 2) / rope.dim)
        more = {"rope_freqs.weight": plain / rope.scaling.frequencies(rope.dim, rope.theta, 64)[0]}
    write_gguf(source, arch, path, more)
    if arch in NOT_IN_GGUF:
        spec_file = tmp_path / "model.toml"
        family = families_by_arch()[arch].name
        spec_file.write_text(f'family = "{family}"\n[override]\n{NOT_IN_GGUF[arch]}\n')
    spec = resolve(path, spec=spec_file).spec
    assert spec.family == families_by_arch()[arch].name
    assert {spec.checkpoint_name(ours) for ours in spec.tensor_shapes()} <= known_names(arch, spec)
    with np.load(source / "golden.npz") as file:
        ids, logits = file["ids"], file["logits"]
    with nbflow.load(path, spec=spec_file, kv="f32", threads=1) as model:
        assert np.abs(model.logits(ids) - logits).max() < 2e-6 * np.abs(logits).max()


def known_names(arch, spec):
    """Return the names that llama.cpp knows for an architecture, layers written out."""
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    bases = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[kind]}
    written = {base.replace("{bid}", str(i)) for base in bases for i in range(spec.n_layers)}
    numbers = {"xielu.alpha_p", "xielu.alpha_n", "xielu.beta", "xielu.eps"}  # metadata
    numbers |= {name for name in written if name.endswith(".ssm_a")}
    return numbers | {f"{name}.{end}" for name in written for end in ("weight", "bias", "scale")}


def test_bert(tmp_path):
    """Hidden states of an encoder, whose files have no head."""
    source, path = FOLDER / "bert", tmp_path / "model.gguf"
    write_gguf(source, "bert", path)
    spec = resolve(path).spec
    assert {spec.checkpoint_name(ours) for ours in spec.tensor_shapes()} <= known_names(
        "bert", spec
    )
    with np.load(source / "golden.npz") as file:
        ids, types, hidden = (file[name] for name in ("ids", "types", "hidden"))
    with nbflow.load(path, kv="f32", threads=1) as model:
        states = model.hidden(ids, token_types=types)
        assert np.abs(states - hidden).max() < 2e-6 * np.abs(hidden).max()


T5 = {
    "model_type": "t5", "vocab_size": 97, "d_model": 24, "d_kv": 12, "d_ff": 40, "num_layers": 2,
    "num_heads": 3, "n_positions": 64, "decoder_start_token_id": 0,
}  # fmt: skip
"""Uses the maximum distance of published models, which files lack."""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 3, "tie_word_embeddings": False},
    ],
)
def test_t5(changes, tmp_path):
    """As from the checkpoint, which test_encoder_decoders.py compares with transformers."""
    source, path = tmp_path / "t5", tmp_path / "model.gguf"
    write_checkpoint(source, T5 | changes)
    write_t5(source, path)
    ids, read = np.arange(5, 45), np.arange(90, 60, -1)
    with nbflow.load(source, kv="f32", threads=1) as model:
        logits = model.logits(ids, read)
    with nbflow.load(path, kv="f32", threads=1) as model:
        np.testing.assert_array_equal(model.logits(ids, read), logits)


def test_divisors_of_llama31(tmp_path):
    """The converter writes the scaling of Llama 3.1 as a tensor."""
    source, path = FOLDER / "llama31", tmp_path / "model.gguf"
    scaling = resolve(source).spec.rope.scaling
    plain = 5e5 ** (-np.arange(0, 12, 2) / 12)
    write_gguf(
        source, "llama", path, {"rope_freqs.weight": plain / scaling.frequencies(12, 5e5, 64)[0]}
    )
    with np.load(source / "golden.npz") as file:
        ids, logits = file["ids"], file["logits"]
    with nbflow.load(path, kv="f32", threads=1) as model:
        # the divisors are stored as float32: 6e-8 of an angle of at most 40
        assert np.abs(model.logits(ids) - logits).max() < 1e-5 * np.abs(logits).max()


@pytest.mark.parametrize("partition", ["0", "0&1", "0;1"])
def test_value_heads_in_turn(partition, tmp_path):
    """Two value heads to a key head: Qwen 3 Next computes what Qwen 3.5 with experts does."""
    source, path = FOLDER / "qwen3_next", tmp_path / "model.gguf"
    write_gguf(source, "qwen35moe", path)
    (tmp_path / "own.toml").write_text(
        'family = "qwen35moe_gguf"\n[override]\ndense_layers = [1]\n'
    )
    options = {"kv": "f32", "partition": partition, "spec": tmp_path / "own.toml"}
    with np.load(source / "golden.npz") as file:
        ids, logits = file["ids"], file["logits"]
    plan = plan_memory(path, max_sequences=2, max_step_tokens=64, **options)
    with nbflow.load(path, threads=1, max_step_tokens=64, **options) as model:
        assert model.spec.delta.key_heads == model.spec.delta.value_heads == 4
        assert np.abs(model.logits(ids) - logits).max() < 2e-6 * np.abs(logits).max()
        for found, planned in zip(model.memory(), plan.ranks, strict=True):
            assert found["weight_bytes"] == planned.weight_bytes


def test_copies_of_key_heads_must_fit(tmp_path):
    write_gguf(FOLDER / "qwen3_5", "qwen35", tmp_path / "model.gguf")
    (tmp_path / "own.toml").write_text(
        'family = "qwen35_gguf"\n[override]\nlinear_key_copies = 3\n'
    )
    with pytest.raises(UsageError, match="linear_key_copies must divide linear_key_heads"):
        resolve(tmp_path / "model.gguf", spec=tmp_path / "own.toml")


@pytest.mark.parametrize("arch", ["gemma3n", "gemma4"])
def test_matrices_of_keys_that_shared_layers_do_not_use(arch, tmp_path):
    """Released checkpoints have them, and so have their GGUF files."""
    source = FOLDER / arch
    layer = resolve(source).spec.n_layers - 1
    unused = {
        f"blk.{layer}.attn_{part}.weight": np.ones((16, 32))[: 8 if "norm" in part else None]
        for part in ("k", "v", "k_norm")
    }
    write_gguf(source, arch, tmp_path / "model.gguf", unused)
    (tmp_path / "own.toml").write_text(
        f'family = "{arch}_gguf"\n[override]\n{NOT_IN_GGUF.get(arch, "")}\n'
    )
    with open_weights(tmp_path / "model.gguf") as file:
        check(resolve(tmp_path / "model.gguf", spec=tmp_path / "own.toml").spec, file)
    tensors = load_file(source / "model.safetensors")
    for part in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.{layer}.self_attn.{part}.weight"] = np.ones((16, 32), np.float32)
    shutil.copy(source / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with open_weights(tmp_path / "model.safetensors") as file:
        check(resolve(tmp_path / "model.safetensors").spec, file)


def test_numbers_in_the_metadata_stay_there(tmp_path):
    """A converted file has those of xIELU once, as llama.cpp expects it."""
    write_gguf(FOLDER / "apertus", "apertus", tmp_path / "a.gguf")
    quantize_checkpoint(tmp_path / "a.gguf", tmp_path / "b.gguf", "f16")
    found = [gguf.GGUFReader(tmp_path / name) for name in ("a.gguf", "b.gguf")]
    names = [[tensor.name for tensor in reader.tensors] for reader in found]
    assert names[0] == names[1]
    assert [reader.fields["xielu.beta"].contents() for reader in found] == [[0.5] * 2] * 2
    with open_weights(tmp_path / "b.gguf") as file:
        assert file.array("xielu.beta").tolist() == [0.5] * 2
        assert file.dtype("xielu.eps") == "f32"


def test_latent_attention_with_one_matrix_for_keys_and_values(tmp_path):
    """Older files hold attn_kv_b as the checkpoint does; it may lie in blocks."""
    source, path = FOLDER / "deepseek_v2_lite", tmp_path / "model.gguf"
    with open_weights(source) as file:
        name = "model.layers.{}.self_attn.kv_b_proj.weight"
        more = {f"blk.{i}.attn_kv_b.weight": file.array(name.format(i)) for i in range(3)}
    write_gguf(source, "deepseek2", path, more, without=("attn_k_b.weight", "attn_v_b.weight"))
    with np.load(source / "golden.npz") as file:
        ids, logits = file["ids"], file["logits"]
    with nbflow.load(path, kv="f32", threads=1) as model:
        assert np.abs(model.logits(ids) - logits).max() < 2e-6 * np.abs(logits).max()


def test_quantized_experts_are_read_in_whole_rows(tmp_path):
    """Experts of one tensor in a block format are the rows of each, block for block."""
    rng = np.random.default_rng(0)
    array = rng.standard_normal((3, 4, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    blocks = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("x", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_weights(tmp_path / "a.gguf") as file:
        whole = file.array("x")
        expert = nk.dequantize(file.quantized("x", rows=(4, 8), flat=True))
        np.testing.assert_array_equal(expert, whole[1])
        cut = file.array("x", rows=(9, 10), columns=(32, 64), flat=True)
        np.testing.assert_array_equal(cut, whole[2, 1:2, 32:])
