"""Inferflow's model specifications: each as the family of the same architecture, on its checkpoint.

The specifications are those of small models: numbers of experts and dimensions are theirs.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_models import write_llama

import nbflow
from nbflow.checkpoint import open_weights
from nbflow.cli.commands import spec as spec_command
from nbflow.compat.inferflow.model_spec_json import load, to_toml
from nbflow.spec import check, resolve
from nbflow.spec.model_file import load_model_file
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError

GOLDEN = Path(__file__).parents[1] / "golden"
LLAMA2C = next((GOLDEN / "llama2c").glob("*.bin"))
DECODER = {"type": "transformer.decoder_only", "tensor_name_prefix": "model.", "qk_column_order": 2}
RMS = {"normalization_function": "rms", "activation_function": "silu", "position_embedding": "rope"}
STD = {"normalization_function": "std", "activation_function": "gelu", "position_embedding": "rope"}
NORM = {"norm.weight": "dec.output_norm.weight"}


def both(names: dict[str, str]) -> dict[str, str]:
    """Return names of weights and of the biases with them."""
    return {f"{a}.{k}": f"{b}.{k}" for a, b in names.items() for k in ("weight", "bias")}


def attention(theirs: str, ours: str, names: tuple[str, ...]) -> dict[str, str]:
    pairs = zip(names, ("wq", "wk", "wv", "wo"), strict=True)
    return {f"{theirs}.{name}": f"{ours}.{standard}" for name, standard in pairs}


def opt(place: str) -> dict[str, Any]:
    of_layer = {
        "self_attn_layer_norm": f"self_attn.{place}_norm",
        "final_layer_norm": f"feed_forward.{place}_norm",
        "fc1": "feed_forward.w1",
        "fc2": "feed_forward.w2",
    }
    mapping = {
        "embed_tokens.weight": "dec.token_embeddings.weight",
        "embed_positions.weight": "dec.pos_embeddings.weight",
        **both({f"layers.{{i}}.{a}": f"dec.{{i}}.{b}" for a, b in of_layer.items()}),
        **both({name: "dec.output_norm" for name in ("layer_norm", "final_layer_norm")}),
        "project_in.weight": "input_transform.weight",
        "project_out.weight": "output_transform.weight",
    }
    return {
        "type": "transformer.decoder_only", "normalization_function": "std",
        "activation_function": "relu", "position_embedding": "empty", "pos_embedding_offset": 2,
        "qkv_format": 1, "tensor_name_prefix": "model.decoder.", "tensor_name_mapping": mapping,
    }  # fmt: skip


def falcon(**more: Any) -> dict[str, Any]:
    names = {
        "h.{i}.ln_attn": "dec.{i}.self_attn.pre_norm",
        "h.{i}.ln_mlp": "dec.{i}.feed_forward.pre_norm",
        "h.{i}.input_layernorm": "dec.{i}.self_attn.pre_norm",
        "h.{i}.self_attention.query_key_value": "dec.{i}.self_attn.qkv",
        "h.{i}.self_attention.dense": "dec.{i}.self_attn.wo",
        "h.{i}.mlp.dense_h_to_4h": "dec.{i}.feed_forward.w1",
        "h.{i}.mlp.dense_4h_to_h": "dec.{i}.feed_forward.w2",
        "ln_f": "dec.output_norm",
        "word_embeddings": "dec.token_embeddings",
    }
    names = {k: v for k, v in both(names).items() if k != "word_embeddings.bias"}
    prefix = {"tensor_name_prefix": "transformer.", "tensor_name_mapping": names}
    return DECODER | STD | prefix | {"qkv_format": 0} | more


def experts(n: int, mapping: dict[str, str], **more: Any) -> dict[str, Any]:
    sparse = {
        "type": "transformer.decoder_only.sparse_moe",
        "is_attn_post_as_residual": False,
        "expert_count": n,
        "using_expert_count": n,
    }
    norm = {"layers.{i}.post_attention_layernorm.weight": "dec.{i}.self_attn.post_norm.weight"}
    return DECODER | RMS | sparse | {"tensor_name_mapping": norm | NORM | mapping} | more


BERT = {
    "embeddings.word_embeddings.weight": "enc.token_embeddings.weight",
    "embeddings.position_embeddings.weight": "enc.pos_embeddings.weight",
    "embeddings.token_type_embeddings.weight": "enc.token_type_embeddings.weight",
    "cls.predictions.transform.dense.weight": "output_transform.weight",
    "cls.predictions.transform.dense.bias": "output_transform.bias",
    "cls.predictions.bias": "enc.output.bias",
    **both(
        attention("encoder.layer.{i}.attention.self", "enc.{i}.self_attn",
                  ("query", "key", "value", "unused"))
        | {
            "encoder.layer.{i}.attention.output.dense": "enc.{i}.self_attn.wo",
            "encoder.layer.{i}.intermediate.dense": "enc.{i}.feed_forward.w1",
            "encoder.layer.{i}.output.dense": "enc.{i}.feed_forward.w2",
        }
    ),
    **{
        f"{theirs}.LayerNorm.{word}": f"{ours}.{kind}"
        for theirs, ours in (
            ("embeddings", "enc.input_norm"),
            ("encoder.layer.{i}.attention.output", "enc.{i}.self_attn.post_norm"),
            ("encoder.layer.{i}.output", "enc.{i}.feed_forward.post_norm"),
            ("cls.predictions.transform", "output_transform.post_norm"),
        )
        for word, kind in (("gamma", "weight"), ("beta", "bias"))
    },
}  # fmt: skip
CHATGLM = {
    "embedding.word_embeddings.weight": "dec.token_embeddings.weight",
    "encoder.layers.{i}.input_layernorm.weight": "dec.{i}.self_attn.pre_norm.weight",
    **both({"encoder.layers.{i}.self_attention.query_key_value": "dec.{i}.self_attn.qkv"}),
    "encoder.layers.{i}.self_attention.dense.weight": "dec.{i}.self_attn.wo.weight",
    "encoder.layers.{i}.post_attention_layernorm.weight": "dec.{i}.feed_forward.pre_norm.weight",
    "encoder.layers.{i}.mlp.dense_h_to_4h.weight": "dec.{i}.feed_forward.w1.weight",
    "encoder.layers.{i}.mlp.dense_4h_to_h.weight": "dec.{i}.feed_forward.w2.weight",
    "encoder.final_layernorm.weight": "dec.output_norm.weight",
    "output_layer.weight": "output.weight",
}
M2M = {
    f"{long}.{theirs}": f"{short}.{ours}"
    for long, short in (("encoder", "enc"), ("decoder", "dec"))
    for theirs, ours in both(
        {
            "layers.{i}.final_layer_norm": "{i}.feed_forward.pre_norm",
            "layers.{i}.fc1": "{i}.feed_forward.w1",
            "layers.{i}.fc2": "{i}.feed_forward.w2",
            "layer_norm": "output_norm",
        }
    ).items()
}
LLAMA = {"type": "transformer.llama", "tensor_name_prefix": "model.", "qk_column_order": 2}
MLP = "layers.{i}.mlp"
NETWORKS: dict[str, dict[str, Any]] = {
    "llama31": LLAMA,
    "baichuan2_7b": LLAMA | {"qkv_format": 1, "normalize_lm_head": True},
    "baichuan2_13b": LLAMA
    | {"qkv_format": 1, "normalize_lm_head": True, "position_embedding": "alibi"},
    "bert": {
        "type": "transformer.encoder_only", "normalization_function": "std",
        "activation_function": "gelu", "position_embedding": "empty", "qkv_format": 1,
        "tensor_name_prefix": "bert.", "tensor_name_mapping": BERT,
    },
    "bloom": {"type": "transformer.bloom", "tensor_name_prefix": "transformer."},
    "chatglm2": DECODER | RMS | {
        "activation_function": "glu_silu", "rope_dim": 4, "qk_column_order": 1, "kq_scale": 1,
        "qkv_format": 1, "tensor_name_prefix": "transformer.", "tensor_name_mapping": CHATGLM,
    },
    "deepseek_moe": experts(
        5,
        {
            f"{MLP}.gate.weight": "dec.{i}.moe.gate.weight",
            **{
                f"{MLP}.{theirs}.{word}_proj.weight": f"dec.{{i}}.moe.{ours}.{w}.weight"
                for theirs, ours in (
                    ("shared_experts", "shared_expert"), ("experts.{j}", "expert.{j}")
                )
                for word, w in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
            },
        },
        moe_top_k=3, moe_norm_top_k_prob=False, moe_layer_start=1, has_shared_expert=True,
    ),
    "mixtral": experts(
        4,
        {
            "layers.{i}.block_sparse_moe.gate.weight": "dec.{i}.moe.gate.weight",
            **{
                f"layers.{{i}}.block_sparse_moe.experts.{{j}}.{w}.weight":
                f"dec.{{i}}.moe.expert.{{j}}.{w}.weight"
                for w in ("w1", "w2", "w3")
            },
        },
        moe_top_k=2,
    ),
    "falcon_7b": falcon(is_parallel_attn=True),
    "falcon_40b": falcon(mlp_attn_share_input=True),
    "gemma": DECODER | RMS | {
        "activation_function": "gelu", "has_embedding_linear_norm": True, "attn_pre_norm_base": 1,
        "ffn_pre_norm_base": 1, "output_norm_base": 1, "tensor_name_mapping": NORM,
    },
    "minicpm": DECODER | RMS | {
        "has_embedding_linear_norm": True, "embedding_linear_scale": 12,
        "attn_out_scale": 1.4 / 2**0.5, "ffn_out_scale": 1.4 / 2**0.5, "out_scale": 16 / 36,
        "tensor_name_mapping": NORM,
    },
    "mistral": DECODER | RMS | {"tensor_name_mapping": NORM},
    "internlm": DECODER | RMS | {"tensor_name_mapping": NORM},
    "qwen2": DECODER | RMS | {"tensor_name_mapping": NORM},
    "opt": opt("pre"),
    "opt_350m": opt("post"),
    "orion": DECODER | RMS | {
        "normalization_function": "std", "tensor_name_mapping": both({"norm": "dec.output_norm"}),
    },
    "phi": DECODER | STD | {
        "kq_scale": 10, "is_parallel_attn": True,
        "tensor_name_mapping": both({
            "layers.{i}.self_attn.dense": "dec.{i}.self_attn.wo",
            f"{MLP}.fc1": "dec.{i}.feed_forward.w1",
            f"{MLP}.fc2": "dec.{i}.feed_forward.w2",
            "final_layernorm": "dec.output_norm",
        }),
    },
    "m2m_100": {
        "type": "transformer.encoder_decoder", "normalization_function": "std",
        "activation_function": "relu", "position_embedding": "sinusoidal2",
        "tensor_name_prefix": "model.", "tensor_name_mapping": M2M,
    },
}  # fmt: skip


def write(path: Path, network: dict[str, Any], **top: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {"model_file_format": "safetensors", "network_structure": network, **top}
    path.write_text("# A comment\n\n" + json.dumps(table))
    return path


def facts(spec: ModelSpec) -> dict[str, Any]:
    """Return everything that matters about a specification."""
    found = spec.as_dict()
    for key in ("name", "family", "tensors", "ignored_tensors", "encoder"):
        del found[key]
    if spec.position != "alibi":
        del found["alibi_scaled"]
    if "layers.{i}.attn.qkv.weight" not in spec.tensors:
        del found["qkv_layout"]
    found["layouts"] = {name: spec.tensor_layout(name) for name in spec.tensor_shapes()}
    return found | {"encoder": spec.encoder and facts(spec.encoder)}


@pytest.mark.parametrize("name", NETWORKS)
def test_as_the_family(name: str, tmp_path: Path) -> None:
    folder = GOLDEN / "families" / name
    if name == "bert":  # Inferflow's names are those of old checkpoints
        words = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}
        tensors = load_file(folder / "model.safetensors")
        for new, old in words.items():
            tensors = {key.replace(new, old): value for key, value in tensors.items()}
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
        save_file(tensors, tmp_path / "model.safetensors")
        folder = tmp_path
    path = write(tmp_path / "model_spec.json", NETWORKS[name])
    with warnings.catch_warnings(record=True) as noted:
        found = resolve(folder, spec=path).spec
    assert [str(w.message).rpartition(": ")[2] for w in noted] == (
        ["scores are float32"] if name == "phi" else []
    )
    assert facts(found) == facts(resolve(folder).spec)
    with open_weights(folder) as weights:
        check(found, weights)
    text, _ = to_toml(path)
    toml = tmp_path / "converted.toml"
    toml.write_text(text)
    assert facts(resolve(folder, spec=toml).spec) == facts(found)


def test_logits_are_the_same(tmp_path: Path) -> None:
    """A checkpoint with tensors called otherwise: as JSON, as its TOML, and as what it was."""
    write_llama(tmp_path / "usual")
    tensors = load_file(tmp_path / "usual" / "model.safetensors")
    words = {"self_attn.q_proj": "query", "model.embed_tokens": "net.words", "model.": "net."}
    for old, new in words.items():
        tensors = {key.replace(old, new): value for key, value in tensors.items()}
    folder = tmp_path / "own"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((tmp_path / "usual" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own"}))
    mapping = {
        "words.weight": "dec.token_embeddings.weight",
        "net.layers.{i}.query.weight": "dec.{i}.self_attn.wq.weight",
        "norm.weight": "dec.output_norm.weight",
        "scale": "dec.output_norm.scale",
    }
    network = DECODER | RMS | {
        "tensor_name_prefix": "net.",
        "tensor_name_mapping": mapping | {"head": "output.weight"},
        "tensor_name_pre_mapping": {"lm_head.weight": "head"},
        "new_key": 3,
    }  # fmt: skip
    path = write(
        folder / "model_spec.json", network, model_files=["model.safetensors"], bos_token="<s>",
        net=1, COMMENTS="none",
    )  # fmt: skip
    text, notes = to_toml(path)
    assert notes == (
        "unknown keys have no effect: 'net'",
        "unknown keys have no effect: 'network_structure.new_key'",
        "bos_token has no effect: the tokenizer and config.json state the special tokens",
        (
            "tensor_name_mapping: 'scale' -> 'dec.output_norm.scale' has no effect: not a standard "
            "name of such a network"
        ),
    )
    (tmp_path / "own.toml").write_text(text)
    ids = np.arange(12)
    found = []
    for model, spec in (
        (tmp_path / "usual", None),
        (folder, path),
        (folder, tmp_path / "own.toml"),
        (path, None),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with nbflow.load(model, spec=spec, tokenizer=None, kv="f32", threads=1) as loaded:
                found.append(loaded.logits(ids))
    for logits in found[1:]:
        np.testing.assert_array_equal(logits, found[0])
    assert load(path).name == "own"
    assert load(path).path == folder
    with pytest.raises(UsageError, match=r"unknown model_type 'own'"):
        resolve(folder)


def test_the_tokenizer_that_it_names(tmp_path: Path) -> None:
    for name in ("vocab.json", "tokenizer.json", "tokenizer.model"):
        path = write(tmp_path / f"{name}.json", LLAMA, tokenizer_files=[name, "other.json"])
        found = resolve("tiny_python", spec=path).tokenizer
        assert found is not None
        assert found.name == "tokenizer.json"
    write_llama(tmp_path / "two")
    for name in ("tokenizer.json", "tokenizer.model"):
        (tmp_path / "two" / name).write_bytes(b"")
    path = write(tmp_path / "x.json", LLAMA, tokenizer_file="tokenizer.model")
    assert resolve(tmp_path / "two", spec=path).tokenizer == tmp_path / "two" / "tokenizer.model"


def test_files_that_describe_themselves(tmp_path: Path) -> None:
    path = write(tmp_path / "stories.json", LLAMA, model_file_format="llama2.c")
    with pytest.warns(UserWarning, match=r"the header of the llama2.c file is used instead"):
        assert resolve(LLAMA2C, spec=path).spec == resolve(LLAMA2C).spec
    with pytest.raises(UsageError, match=r"llama2.c: such a file describes itself"):
        to_toml(path)


@pytest.mark.parametrize(
    ("network", "top", "message"),
    [
        ({"type": "rnn"}, {}, "network_structure.type must be one of transformer.llama, "),
        ({"type": 3}, {}, "network_structure.type: must be text"),
        ({}, {"model_file_format": "std"}, "model_file_format must be one of pickle, safet"),
        ({"normalization_function": "linear"}, {}, "normalization_function must be one of std, r"),
        ({"activation_function": "elu"}, {}, "activation_function must be one of relu, gelu, "),
        ({"position_embedding": "x"}, {}, "position_embedding must be one of rope, alibi, sinus"),
        ({"qk_column_order": 5}, {}, "qk_column_order must be 0, 1 or 2, got 5"),
        ({"rope_theta": -1.0}, {}, "rope_theta: must be a number from 1"),
        ({"rope_dim": 2**31}, {}, "rope_dim: must be 0 to"),
        ({"attn_pre_norm_base": 1}, {}, "attn_pre_norm_base must be equal to ffn_pre_norm_base"),
        ({"attn_out_scale": 0.5}, {}, "attn_out_scale must be equal to ffn_out_scale"),
        ({"use_self_attn_pre_norm": False}, {}, "use_self_attn_pre_norm must be true"),
        (
            {"is_parallel_attn": True, "mlp_attn_share_input": True},
            {},
            "mlp_attn_share_input must be false with is_parallel_attn",
        ),
        ({"expert_count": 8, "using_expert_count": 4}, {}, "using_expert_count must be expert_c"),
        ({"expert_count": 8, "moe_layer_end": 3}, {}, "moe_layer_end must be -1"),
        ({"expert_count": 2**40}, {}, "n_experts: must be 0 to 4096"),
        ({}, {"token_remap_file": "x"}, "token_remap_file must be absent"),
        ({}, {"output_vocab_size": 9}, "output_vocab_size must be 0: there is one vocabulary"),
        ({}, {"padded_vocab_size": 2**40}, "vocab_size: must be 1 to 2147483647"),
        ({"tensor_name_mapping": {"a": 3}}, {}, "tensor_name_mapping a: must be text"),
        ({"tensor_name_mapping": {"a": "dec.{i}.self_attn.wq.weight"}}, {}, r"{i} 1 times, got"),
        (
            {"tensor_name_mapping": {f"a{i}": "x" for i in range(5000)}},
            {},
            "may have at most 4096 entries, got 5000",
        ),
        (
            {"tensor_name_mapping": {"a.{i}": "dec.{i}.self_attn.post_norm.weight"}},
            {},
            "has self_attn.post_norm, with is_attn_post_as_residual true; supported are",
        ),
        (NETWORKS["m2m_100"] | {"position_embedding": "rope"}, {}, "must be as M2M-100"),
        (
            NETWORKS["m2m_100"] | {"tensor_name_mapping": {"x.{i}": "enc.{i}.self_attn.wq.weight"}},
            {},
            r"'x.{i}' is not called so",
        ),
    ],
)
def test_what_is_refused(
    network: dict[str, Any], top: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "model_spec.json", DECODER | network, **top)
    with pytest.raises(UsageError, match=message) as caught:
        load_model_file(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "is not a model specification of Inferflow: network_structure is missing"),
        ("# only\n", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"network_structure": []}', "network_structure: must be a table"),
    ],
)
def test_other_files(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        resolve("tiny_python", spec=tmp_path / "x.json")
    with pytest.raises(UsageError, match="cannot be opened"):
        resolve("tiny_python", spec=tmp_path / "none.json")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "phi" / "model_spec.json", NETWORKS["phi"])
    parser = argparse.ArgumentParser()
    spec_command.add_arguments(parser)

    def run(*words: str) -> tuple[str, str]:
        assert spec_command.run(parser.parse_args([str(path), *words])) == 0
        found = capsys.readouterr()
        return found.out, found.err

    text, _ = run()
    assert f"{path}: valid; from Inferflow's model_spec.json\n" in text
    assert "note: kq_scale has no effect" in text
    assert json.loads(run("--json")[0])["notes"] == [*load(path).notes]
    text, notes = run("--toml")
    assert (text, notes) == (to_toml(path)[0], f"note: {load(path).notes[0]}\n")
    with pytest.raises(UsageError, match=r"--toml converts a model_spec.json of Inferflow, got 'p"):
        spec_command.run(parser.parse_args(["phi_2", "--toml"]))
