"""Specifications: from config.json, headers and TOML files; the check against the tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from nbflow.checkpoint import open_weights
from nbflow.cli.commands import inspect as inspect_command
from nbflow.cli.commands import spec as spec_command
from nbflow.spec import ModelSpec, check, families, known_models, resolve
from nbflow.spec.family import load_family
from nbflow.spec.model_file import load_model_file
from nbflow.spec.tensor_names import TENSOR_NAMES
from nbflow_kernels import LinearRopeScaling
from nbflow_kernels.errors import UsageError

GOLDEN = Path(__file__).parent.parent / "golden" / "llama2c"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
LAYER = {
    "input_layernorm": (16,),
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (16, 16),
    "self_attn.v_proj": (16, 16),
    "self_attn.o_proj": (16, 16),
    "post_attention_layernorm": (16,),
    "mlp.gate_proj": (24, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
}


def tensors(**changes: tuple[int, ...] | None) -> dict[str, np.ndarray]:
    """The tensors of CONFIG; `changes` replace shapes, None removes; ``__`` stands for a dot."""
    shapes: dict[str, tuple[int, ...] | None] = {
        "model.embed_tokens.weight": (20, 16),
        "model.norm.weight": (16,),
        "lm_head.weight": (20, 16),
    }
    for i in range(3):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in LAYER.items()}
    shapes |= {name.replace("__", "."): shape for name, shape in changes.items()}
    return {
        name: np.zeros(shape, np.float16) for name, shape in shapes.items() if shape is not None
    }


def folder(path: Path, held: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    """Write a Hugging Face folder; a config value of ... removes the key."""
    merged = {key: value for key, value in {**CONFIG, **config}.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(merged))
    save_file(tensors() if held is None else held, path / "model.safetensors")
    return path


def spec_of(path: Path, **config: Any) -> ModelSpec:
    return resolve(folder(path, **config)).spec


def toml(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_absent_keys_get_the_defaults(tmp_path: Path) -> None:
    resolved = resolve(folder(tmp_path, rms_norm_eps=..., max_position_embeddings=...))
    spec = resolved.spec
    assert spec.n_kv_heads == 4
    assert spec.head_dim == 4
    assert spec.sm_scale == 0.5
    assert spec.rope.theta == 10000.0
    assert (spec.rope.style, spec.rope.dim) == ("half", 4)
    assert (spec.norm, spec.norm_eps, spec.activation, spec.gated) == ("rms", 1e-6, "silu", True)
    assert (spec.window, spec.logits_soft_cap, spec.biases) == (None, None, frozenset())
    assert (spec.bos_token_id, spec.eos_token_ids) == (None, ())
    assert spec.max_context == 2048
    assert (spec.name, spec.family) == (tmp_path.name, "llama")
    assert (resolved.path, resolved.tokenizer, resolved.defaults) == (tmp_path, None, {})


def test_stated_keys_win(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path,
        num_key_value_heads=2,
        head_dim=8,
        rope_theta=5e5,
        hidden_act="gelu_pytorch_tanh",
        bos_token_id=1,
        eos_token_id=[2, 3],
        rms_norm_eps=1e-6,
    )
    assert (spec.n_kv_heads, spec.head_dim, spec.rope.dim) == (2, 8, 8)
    assert (spec.rope.theta, spec.activation, spec.norm_eps) == (5e5, "gelu_tanh", 1e-6)
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2, 3))
    assert spec.sm_scale == pytest.approx(8**-0.5, rel=1e-15)


def test_null_is_absent_and_an_integer_is_a_float(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path, num_key_value_heads=None, head_dim=None, rope_scaling=None, rope_theta=500000
    )
    assert (spec.n_kv_heads, spec.head_dim, spec.rope.theta) == (4, 4, 500000.0)
    assert isinstance(spec.rope.theta, float)


def test_new_style_rope_parameters(tmp_path: Path) -> None:
    rope = {"rope_theta": 77.0, "rope_type": "default"}
    assert spec_of(tmp_path, rope_parameters=rope).rope.theta == 77.0
    rope |= {"rope_type": "linear", "factor": 2.0}
    assert spec_of(tmp_path, rope_parameters=rope).rope.scaling == LinearRopeScaling(factor=2.0)
    rope["rope_type"] = "yarm"
    with pytest.raises(
        UsageError, match=r"json: rope_scaling: unknown rope_type 'yarm'; .* 'yarn'"
    ):
        spec_of(tmp_path, rope_parameters=rope)


def test_window_is_mistrals_only(tmp_path: Path) -> None:
    assert spec_of(tmp_path, sliding_window=16).window is None
    assert spec_of(tmp_path, model_type="mistral", sliding_window=16).window == 16
    assert spec_of(tmp_path, model_type="mistral", sliding_window=None).window is None


def test_bias_switches(tmp_path: Path) -> None:
    attention = {"attn.q", "attn.k", "attn.v", "attn.o"}
    spec = spec_of(tmp_path, attention_bias=True)
    assert spec.biases == attention
    assert spec.checkpoint_name("layers.2.attn.q.bias") == "model.layers.2.self_attn.q_proj.bias"
    assert spec.tensor_shapes()["layers.2.attn.q.bias"] == (16,)
    both = spec_of(tmp_path, attention_bias=True, mlp_bias=True)
    assert both.biases == attention | {"ffn.gate", "ffn.up", "ffn.down"}
    with open_weights(tmp_path) as weights, pytest.raises(UsageError) as caught:
        check(both, weights)
    assert "21 tensors do not fit" in str(caught.value)
    assert "model.layers.{0..2}.mlp.down_proj.bias (16,)" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partial_rotary_factor", 0.5),
        ("is_encoder_decoder", True),
    ],
)
def test_unsupported_computations_are_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(
        UsageError, match=f"{key} = .* is not supported by family 'llama'"
    ) as caught:
        spec_of(tmp_path, **{key: value})
    assert "config.json" in str(caught.value)


def test_harmless_values_of_such_keys(tmp_path: Path) -> None:
    spec_of(
        tmp_path, rope_scaling={"rope_type": "default"}, pretraining_tp=2, quantization_config=None
    )
    with pytest.raises(UsageError, match="partial_rotary_factor = True"):  # true is not 1
        spec_of(tmp_path, partial_rotary_factor=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": "16"}, "hidden_size: must be a whole number, got '16'"),
        ({"hidden_size": True}, "hidden_size: must be a whole number, got True"),
        ({"hidden_size": 16.0}, "hidden_size: must be a whole number"),
        ({"hidden_act": "tanh"}, "hidden_act: must be one of silu, gelu, .* got 'tanh'"),
        ({"hidden_act": ["silu"]}, "hidden_act: must be one of"),
        ({"attention_bias": 1}, "attention_bias: must be true or false, got 1"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id: must be a whole number, got '2'"),
        (
            {"hidden_size": 18},
            "hidden_size / n_heads is not a whole number with hidden_size = 18, n_heads = 4",
        ),
        (
            {"num_attention_heads": 0},
            "num_attention_heads: must be 1 to 4096, got 0",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: rope_type 'linear' needs factor"),
        ({"rope_scaling": "linear"}, "rope_scaling: must be a table, got 'linear'"),
        ({"num_key_value_heads": 3}, "n_heads must be a multiple of n_kv_heads"),
        ({"vocab_size": -1}, "vocab_size: must be 1 to 2147483647, got -1"),
        (
            {"hidden_size": ..., "vocab_size": ...},
            r"does not say vocab_size \(vocab_size\), hidden_size \(hidden_size\), head_dim",
        ),
        ({"model_type": "lama"}, "unknown model_type 'lama'; did you mean 'llama'"),
        ({"model_type": ...}, "unknown model_type None"),
        ({"model_type": ["llama"]}, "unknown model_type"),
    ],
)
def test_wrong_configurations(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        spec_of(tmp_path, **config)


@pytest.mark.parametrize(
    ("stated", "in_file", "tied"),
    [
        (..., True, False),
        (True, True, False),  # the file's head wins
        (False, True, False),
        (..., False, True),
        (True, False, True),
    ],
)
def test_tied_head(tmp_path: Path, stated: Any, in_file: bool, tied: bool) -> None:
    held = tensors() if in_file else tensors(lm_head__weight=None)
    spec = resolve(folder(tmp_path, held, tie_word_embeddings=stated)).spec
    assert spec.tied_head is tied
    with open_weights(tmp_path) as weights:
        check(spec, weights)


def test_head_that_is_missing_though_not_tied(tmp_path: Path) -> None:
    held = tensors(lm_head__weight=None)
    spec = resolve(folder(tmp_path, held, tie_word_embeddings=False)).spec
    with open_weights(tmp_path) as weights, pytest.raises(UsageError, match="missing:\n  lm_head"):
        check(spec, weights)


def test_check_lists_everything_at_once(tmp_path: Path) -> None:
    held = tensors(
        model__layers__1__mlp__up_proj__weight=(16, 24),
        model__layers__0__self_attn__q_proj__weight=None,
        model__layers__2__self_attn__q_proj__weight=None,
        model__layers__0__extra__weight=(3,),
        model__layers__0__self_attn__rotary_emb__inv_freq=(2,),
        model__layers__3__input_layernorm__weight=(16,),
    )
    spec = resolve(folder(tmp_path, held)).spec
    with open_weights(tmp_path) as weights:
        with pytest.raises(UsageError) as caught:
            check(spec, weights)
        assert weights.bytes_read == 0
    assert str(caught.value) == (
        f"{tmp_path}: 5 tensors do not fit the specification of {tmp_path.name!r} "
        "(family 'llama')\n"
        "missing:\n"
        "  model.layers.{0,2}.self_attn.q_proj.weight (16, 16)\n"
        "wrong shape:\n"
        "  model.layers.1.mlp.up_proj.weight must have shape (24, 16), got (16, 24)\n"
        "unused:\n"
        "  model.layers.0.extra.weight (3,)\n"
        "  model.layers.3.input_layernorm.weight (16,)"
    )


@pytest.mark.parametrize("stem", ["legacy_shared", "legacy_unshared", "v1_unshared", "v2_shared"])
def test_llama2c(stem: str) -> None:
    resolved = resolve(GOLDEN / f"{stem}.bin")
    spec = resolved.spec
    assert (spec.name, spec.family) == (stem, "llama2c")
    assert (spec.rope.style, spec.rope.theta, spec.rope.dim) == ("interleaved", 10000.0, 4)
    assert (spec.vocab_size, spec.n_kv_heads, spec.max_context) == (310, 2, 32)
    assert spec.tied_head is stem.endswith("_shared")
    assert resolved.tokenizer == GOLDEN / "tokenizer.bin"
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (1, 2))
    with open_weights(resolved.path) as weights:
        check(spec, weights)


def test_files_beside_the_weights(tmp_path: Path) -> None:
    folder(tmp_path, bos_token_id=1, eos_token_id=2)
    (tmp_path / "tokenizer.json").write_text("{}")
    generation = {"eos_token_id": [7, 8], "temperature": 1, "top_k": 5, "transformers_version": "4"}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    for path in (tmp_path, tmp_path / "model.safetensors"):
        resolved = resolve(path)
        assert resolved.spec.name == tmp_path.name
        assert resolved.tokenizer == tmp_path / "tokenizer.json"
        assert resolved.defaults == {"temperature": 1.0, "top_k": 5}
        assert (resolved.spec.bos_token_id, resolved.spec.eos_token_ids) == (1, (7, 8))
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(UsageError, match=r"generation_config\.json: temperature: must be a number"):
        resolve(tmp_path)


def test_weights_without_configuration(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match="the weights alone do not say what model they are"):
        resolve(tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match="a model must be a name or a path, got ''"):
        resolve("")
    adapter = tmp_path / "lora"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    save_file(tensors(), adapter / "adapter_model.safetensors")
    for path in (adapter, adapter / "adapter_model.safetensors"):
        with pytest.raises(UsageError, match=r"holds an adapter .* merge it into its base model"):
            resolve(path)
    whole = folder(adapter, tensors())
    with pytest.raises(UsageError, match=r"a model and an adapter .* give the path .*/lora/model"):
        resolve(whole)
    assert resolve(whole / "model.safetensors").spec.n_layers == 3  # the base model is meant
    (whole / "adapter_model.safetensors").unlink()  # what merging leaves behind
    assert resolve(whole).spec.n_layers == 3
    spec_file = toml(
        tmp_path / "mine.toml",
        """family = "llama"
[override]
vocab_size = 20
hidden_size = 16
intermediate_size = 24
n_layers = 3
n_heads = 4
""",
    )
    spec = resolve(tmp_path / "a.safetensors", spec=spec_file).spec
    assert (spec.name, spec.n_kv_heads, spec.norm_eps) == ("mine", 4, 1e-6)


def test_model_file_with_everything(tmp_path: Path) -> None:
    held = tensors(model__norm__weight=None, final__scale=(16,), junk__x=(2,))
    (tmp_path / "weights").mkdir()
    folder(tmp_path / "weights", held, model_type="unheard-of")
    (tmp_path / "tok.json").write_text("{}")
    path = toml(
        tmp_path / "file.toml",
        """name = "Mine"
description = "one line"
family = "llama"
path = "weights"
tokenizer = "tok.json"
[override]
rope_theta = 20000
window = 8
max_context = 32
[tensors]
"final_norm.weight" = "final.scale"
[ignored]
tensors = ["junk.*"]
[defaults]
temperature = 0.7
""",
    )
    for resolved in (resolve(path), resolve(tmp_path / "weights", spec=path)):
        spec = resolved.spec
        assert (spec.name, spec.window, spec.max_context) == ("Mine", 8, 32)
        assert spec.rope.theta == 20000.0
        assert resolved.tokenizer == tmp_path / "tok.json"
        assert resolved.defaults == {"temperature": 0.7}
        with open_weights(resolved.path) as weights:
            check(spec, weights)


def test_override_of_a_field_moves_what_follows_from_it(tmp_path: Path) -> None:
    folder(tmp_path)
    path = toml(tmp_path / "s.toml", 'family = "llama"\n[override]\nn_heads = 2\n')
    spec = resolve(tmp_path, spec=path).spec
    assert (spec.n_heads, spec.n_kv_heads, spec.head_dim) == (2, 2, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('famly = "llama"', "unknown key 'famly'; did you mean 'family'"),
        ('name = "x"', "family is missing"),
        ('family = "lama"', "unknown family 'lama'; did you mean 'llama'"),
        (f'family = "{"a" * 5000}"', "must be the name of a family, got 'aaa"),
        ("family = 3", "family: must be text in quotes, got 3"),
        (
            'family = "llama"\n[override]\nn_layer = 3',
            "unknown key 'n_layer'; did you mean 'n_layers'",
        ),
        (
            'family = "llama"\n[override]\nn_layers = "3"',
            "n_layers: must be a whole number, got '3'",
        ),
        ('family = "llama"\n[override]\nnorm = "batch"', "norm: must be one of rms, layer, got 'b"),
        ('family = "llama"\noverride = 3', r"\[override\]: must be a table, got 3"),
        (
            'family = "llama"\n[tensors]\n"head.wieght" = "x"',
            "unknown key 'head.wieght'; did you mean 'head.weight'",
        ),
        ('family = "llama"\n[tensors]\n"head.weight" = "x{i}"', "must contain {i} 0 times"),
        (
            'family = "llama"\n[tensors]\n"layers.{i}.attn.q.weight" = "q"',
            "must contain {i} 1 times",
        ),
        (
            'family = "llama"\n[ignored]\ntensors = "x"',
            r"\[ignored\] tensors: must be a list of strings",
        ),
        (
            'family = "llama"\n[defaults]\ntemprature = 1.0',
            "unknown key 'temprature'; did you mean 'temperature'",
        ),
        ('family = "llama"\nfamily = "llama"', "not valid TOML"),
        ('family = "llama"', "has no path to weights"),
        ('family = "llama"\npath = "nowhere"', "path does not exist"),
    ],
)
def test_wrong_model_files(tmp_path: Path, text: str, message: str) -> None:
    path = toml(tmp_path / "wrong.toml", text)
    with pytest.raises(UsageError, match=message) as caught:
        resolve(path)
    assert "wrong.toml" in str(caught.value)


def test_tokenizer_that_the_model_file_promises(tmp_path: Path) -> None:
    folder(tmp_path)
    path = toml(tmp_path / "s.toml", 'family = "llama"\ntokenizer = "no.json"\n')
    with pytest.raises(UsageError, match=r"no\.json: the model file names this tokenizer"):
        resolve(tmp_path, spec=path)
    with pytest.raises(UsageError, match=r"none\.toml: cannot be opened: No such file"):
        resolve(tmp_path, spec=tmp_path / "none.toml")


BUNDLED = ("tiny_python", "tiny_python_draft", "tiny_python_hybrid")


def test_neither_a_path_nor_a_name() -> None:
    with pytest.raises(UsageError) as caught:
        resolve("tiny_pyhton")
    assert str(caught.value) == (
        "unknown model 'tiny_pyhton'; did you mean 'tiny_python' or 'tiny_python_draft' or "
        "'tiny_python_hybrid'? 'nbflow spec --list' lists all names; or give the path of a folder "
        "or a weight file that exists"
    )
    for path in ("no.gguf", "a/b/no"):
        with pytest.raises(UsageError, match=f"^{path}: no such file or folder"):
            resolve(path)


def test_files_that_come_with_the_package() -> None:
    assert {"llama", "llama2c"} <= set(families())
    for family in families().values():
        assert set(TENSOR_NAMES) >= set(family.tensors)
    for name, path in known_models().items():
        model = load_model_file(path)
        assert (model.name, model.family.name in families()) == (name, True)
        assert model.description
        assert (model.path is None) == (name not in BUNDLED)


def test_bundled_models_fit_their_specifications() -> None:
    model, draft, hybrid = map(resolve, BUNDLED)
    for resolved in (model, draft, hybrid):
        with open_weights(resolved.path) as weights:
            check(resolved.spec, weights)
    assert model.tokenizer is not None
    assert draft.tokenizer is not None
    assert hybrid.tokenizer is not None
    assert model.tokenizer.samefile(draft.tokenizer)
    assert model.tokenizer.samefile(hybrid.tokenizer)
    assert hybrid.spec.is_recurrent
    assert draft.spec.n_parameters < 0.11 * model.spec.n_parameters


FAMILY = """description = "d"
model_types = ["m"]
[config]
n_heads = {{ keys = ["h"] }}
{}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = { keys = [] }", "unknown key 'x'"),
        ("head_dim = { key = [] }", "unknown key 'key'; did you mean 'keys'"),
        ('n_kv_heads = { same_as = "n_layers" }', "'n_layers' must be a field listed above it"),
        ("n_kv_heads = { same_as = {} }", "{} must be a field listed above it"),
        ("head_dim = { formula = 3 }", "formula: must be text in quotes, got 3"),
        ("head_dim = [{ formula = 3 }]", "formula: must be text in quotes, got 3"),
        ('head_dim = { values = { a = "b" } }', "values: must be a whole number, got 'b'"),
        ('head_dim = { default = "4" }', "head_dim: must be a whole number, got '4'"),
        ("head_dim = 4", r"head_dim: must be a table, e\.g\. \{ keys = \[.*\] \}, got 4"),
        ('head_dim = "x"', r'must be a table, e\.g\. \{ keys = \["x"\] \}, got'),
        ('head_dim = { keys = "x" }', r'must be a list of strings, e\.g\. \["x"\], got'),
        ('head_dim = { formula = "a //" }', "not a formula: 'a //'; it may have numbers"),
        ('head_dim = { formula = "round(a, b)" }', "not a formula"),
        ("[structure]\nhead_dim = 4\n[config]", "Cannot declare|Cannot overwrite"),
        ('[biases]\nalways = ["attn.qkv"]', "name the parts of attn.qkv: attn.q, attn.k, attn.v"),
        ("[structure]\nnorm = layer", "Invalid value .*: norm = layer; words are written in q"),
        ("[structure]\nnorm_eps = 'x'", r"norm_eps: must be a number, got 'x'"),
        ("[only]\na = 3", r"\[only\] a must be a list of values"),
        ("[only]\na = { value = [3] }", r"\[only\] a: unknown key 'value'; did you mean 'values'"),
        ('[biases]\na = ["attn.x"]', r"\[biases\] a: must be one of attn.q"),
        ('[structure]\nnorm = "x"', r"\[structure\] norm: must be one of rms, layer"),
        (
            '[tensors]\n"embed.wight" = "e"',
            "unknown key 'embed.wight'; did you mean 'embed.weight'",
        ),
        ("[other]", "unknown key 'other'"),
    ],
)
def test_wrong_family_files(tmp_path: Path, text: str, message: str) -> None:
    path = toml(tmp_path / "f.toml", FAMILY.format(text))
    with pytest.raises(UsageError, match=message) as caught:
        load_family(path)
    assert "f.toml" in str(caught.value)


def run(module: Any, *words: str) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(list(words))))


def test_spec_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder(tmp_path)
    assert run(spec_command, str(tmp_path), "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["spec"]["n_layers"] == 3
    assert facts["n_parameters"] == sum(array.size for array in tensors().values())
    assert facts["tensors"][0] == {
        "name": "embed.weight",
        "checkpoint_name": "model.embed_tokens.weight",
        "shape": [20, 16],
        "dtype": "f16",
    }
    assert run(spec_command, str(tmp_path), "--tensors") == 0
    text = capsys.readouterr().out
    assert "fits: 30 tensors" in text
    assert "model.layers.2.mlp.down_proj.weight" in text


def test_inspect_command(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(GOLDEN / "v2_shared.bin")
    assert run(inspect_command, path, "--json", "--tensor", "*.1.*") == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(facts["tensors"]) == 9
    assert facts["format"] == "llama2c"
    assert facts["tensors"][2] == {
        "name": "layers.1.attention.wq.weight",
        "dtype": "i8",
        "shape": [16, 16],
        "bytes": 320,
        "file": path,
        "offset": 7096,
    }
    assert run(inspect_command, path) == 0
    assert "20 tensors" in capsys.readouterr().out
    with pytest.raises(UsageError, match="no tensor matches 'zzz'"):
        run(inspect_command, path, "--tensor", "zzz")
