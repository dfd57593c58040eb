"""Configuration files of the server: TOML, and Inferflow's ini."""

import argparse
import inspect
import json
import re
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import run_command

import nbflow
from nbflow.cli import main
from nbflow.cli.options import add_model_arguments
from nbflow.compat.inferflow.ini_config import read_ini
from nbflow.compat.inferflow.ini_file import read_sections
from nbflow.option_fields import size_bytes, toml_names
from nbflow.options import LoadOptions
from nbflow.quantization.policy import weight_formats
from nbflow.server.config import (
    Auth,
    Cors,
    EngineSection,
    Limits,
    Logging,
    ModelOptions,
    ServerConfig,
    read_config,
)
from nbflow.server.errors import ApiError
from nbflow.server.served_model import Models
from nbflow.spec import resolve
from nbflow_kernels.errors import UsageError

DOCS = Path(__file__).parents[2] / "docs" / "server.md"


def write(folder, text, name="server.toml"):
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port = 1", r"no \[models.NAME\]"),
        ("[models.a]", "models.a.path: Field required"),
        ("[models.a]\npath = 'x'\nwieghts = 'q4'", "did you mean 'weights'"),
        ("[models.auth]\npath = 'x'\nkey = 'q4'", "unknown key 'key'.*outliers"),
        ("[models.a]\npath = 'x'\n[models.a.engine]\nmax_seqs = 1", "max_sequences"),
        ("[models.a]\npath = 'x'\n[limit]", "did you mean 'limits'"),
        ("port = 70000\n[models.a]\npath = 'x'", "less than or equal to 65535"),
        ("port = '80'\n[models.a]\npath = 'x'", "valid integer"),
        ("[models.a]\npath = 'x'\n[limits]\nbody_bytes = '1 pound'", "2GiB"),
        ("[models.a]\npath = 'x'\naliases = ['a']", "two models"),
        ("[models.a]\npath = 'x'\n[log]\nformat = 'xml'", "'text' or 'json'"),
        ("[models.a]\npath = 'x'\ndraft_weights = 'q4'", "needs a smaller model"),
        ("[models.a]\npath = 'x'\ndraft = 'ngram'\ndraft_verify = 'chain'", "got draft 'ngram'"),
        ("[models.a]\npath = 'x'\nn_draft = 3", "n_draft needs a smaller model or 'ngram'"),
        ("models = 1", "valid dictionary"),
        ("[models]", "at least one"),
        ("= 1", "not valid TOML"),
    ],
)
def test_wrong_files(tmp_path, text, words):
    with pytest.raises(UsageError, match=words):
        read_config(write(tmp_path, text))


def test_files_are_beside_the_configuration(tmp_path):
    (tmp_path / "keys").write_text("# mine\none\n\n two \n")
    (tmp_path / "m.gguf").write_text("")
    text = "[models.a]\npath = 'm.gguf'\n[models.b]\npath = 'tiny_python'\n[auth]\nkeys_file='keys'"
    config = read_config(write(tmp_path, text))
    assert config.models["a"].path == str(tmp_path / "m.gguf")
    assert config.models["b"].path == "tiny_python"
    assert len(config.auth.digests()) == 2


def test_every_file_of_a_model_is_beside_the_configuration(tmp_path):
    """A format is a name even if a folder is called so; a policy file ends in .toml."""
    names = {
        "path": "m.gguf", "spec": "s.toml", "tokenizer": "t.json", "weights": "p.toml",
        "importance": "i.dat", "machine": "box.toml", "chat_template": "chat.jinja",
        "draft": "d.gguf", "draft_weights": "p.toml",
    }  # fmt: skip
    for name in (*names.values(), "mine.py", "q4"):
        (tmp_path / name).write_text("")
    lines = [f"{key} = '{name}'" for key, name in names.items()]
    text = "plugins = ['mine.py']\n[models.a]\n" + "\n".join(lines)
    config = read_config(write(tmp_path, text + "\n[models.b]\npath = 'x'\nweights = 'q4'"))
    for key, name in names.items():
        assert getattr(config.models["a"], key) == str(tmp_path / name), key
    assert config.plugins == [str(tmp_path / "mine.py")]
    assert config.models["b"].weights == "q4"


def test_keys_from_the_environment(monkeypatch):
    monkeypatch.setenv("KEYS", "a, b")
    assert len(Auth(keys_env="KEYS").digests()) == 2
    with pytest.raises(UsageError, match="NO_KEYS"):
        Auth(keys_env="NO_KEYS").digests()


def test_sizes():
    sizes = [size_bytes(s) for s in (5, "5", "2KiB", "2kB", "1.5 MiB", "2G")]
    assert sizes == [5, 5, 2048, 2000, 1572864, 2 * 10**9]
    for wrong in ("", "-1", "x", "1e3", "0", True):
        with pytest.raises(ValueError, match="must be"):
            size_bytes(wrong)


def test_every_option_of_load_is_a_key():
    options = set(inspect.signature(nbflow.load).parameters)
    options -= {"model", "max_step_tokens", "comm"}  # path, the engine's, and none of a file's
    assert options - {"options", "plugins"} == set(toml_names(LoadOptions))
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    arguments = set(vars(parser.parse_args(["x"]))) - {"model"}
    assert arguments == options - {"options"}


def test_documentation_has_every_key():
    text = DOCS.read_text() + (DOCS.parent / "options.md").read_text()
    for section in (ServerConfig, ModelOptions, EngineSection, Auth, Limits, Cors, Logging):
        for name, field in section.model_fields.items():
            if name == "models":
                continue  # its part is [models.NAME]
            if isinstance(field.annotation, type) and field.annotation.__name__ in (
                "Auth", "Limits", "Cors", "Logging", "EngineSection",
            ):  # fmt: skip
                continue
            begins = (f"| `{name}` |", f"| `{name}`;")
            line = next((x for x in text.splitlines() if x.startswith(begins)), None)
            assert line is not None, name
            default = field.default
            if isinstance(default, (int, float)) and not isinstance(default, bool) and default > 1:
                assert f" {int(default)} " in line, line


INI = """
; a service
[main]
http_port = 8123
worker_count = 32
is_study_mode = false
global_model_dir = ${data_root_dir}../models/
request_templates = 1
[transformer_engine]
models = tiny_one
devices = 3&1
cpu_threads = 3
cpu_layer_count = 2
max_concurrent_queries = 6
return_output_tensors = true
show_tensors = false
[model.tiny_one]
model_dir = $(global_model_dir)/${model_name}
model_specification_file = model_spec.json
device_weight_data_type = Q3H
device_weight_data_type.attn_wq = auto
device_kv_cache_data_type = Q8
delta_tensor_ratio = 0.01
host_kv_cache_percent = 100
max_context_len = 0
decoding_strategy = {"name": "sample.top_p", "top_p": 0.8, "eos_bypassing_max": 2}
decoder_input_template = mine
aliases = first; default
quantizer = reference
[prompt_templates]
prompt_template_count = 1
prompt_template1 = mine
[prompt_template.mine]
line_count = 2
line1 = Q: {query}
line2 = A:{res_prefix}
[app_env.logging]
enable_logging = 1
log_dir = ${data_root_dir}logs
log_name = ${app_name}
max_size_per_file = 2MB
max_file_count = 4
[app_env.status_manager]
enable_monitoring = 1
[app_env.base]
data_root_dir = ${config_dir}../data/
"""
THRESHOLD = 4_000_000


def test_inferflow_file(tmp_path, capsys):
    """The folders of macros are those of the published file, which end in a slash."""
    folder = tmp_path / "bin"
    folder.mkdir()
    config = read_ini(write(folder, INI, "s.ini"), "cpu")
    model = config.models["tiny_one"]
    assert (config.host, config.port, config.request_templates) == ("0.0.0.0", 8123, True)
    assert (config.limits.requests, config.limits.queue) == (32, 2048)
    assert model.path == f"{tmp_path}/models/tiny_one"
    assert model.weights == {"formats": {"*": "q3h"}, "min_elements": THRESHOLD}
    assert (model.kv, model.outliers, model.threads) == ("q8", 0.01, 3)
    assert (model.quantizer, model.aliases) == ("reference", ["first", "default"])
    assert (model.partition, model.device) == ("0&1", "cpu")
    assert (model.max_context, model.engine.max_sequences) == (None, 6)
    assert model.defaults == {"decoding": "inferflow.top_p", "top_p": 0.8}
    assert model.chat_template == "Q: {query}\nA:{res_prefix}"
    assert (model.kv_host_percent, model.embeddings_on_host, model.cpu_layers) == (100, False, 2)
    assert config.log.file == f"{tmp_path}/data/logs/nbflow.log"
    assert (config.log.max_bytes, config.log.backups) == (2_000_000, 3)
    notes = capsys.readouterr().err
    assert "eos_bypassing_max has no effect with sample.top_p, as in Inferflow" in notes
    assert "model_spec.json does not exist" in notes
    assert "[app_env.status_manager] has no effect" in notes
    assert "on the CPU" not in notes  # as was asked for


def test_inferflow_devices(tmp_path, monkeypatch, capsys):
    """`devices` are GPUs where there are some; embeddings are then in host memory by default."""
    path = write(tmp_path, INI, "s.ini")
    found = types.SimpleNamespace(usable=True, reason="")
    monkeypatch.setattr("nbflow_kernels.cuda.detect", lambda: found)
    model = read_ini(path).models["tiny_one"]
    assert (model.partition, model.device) == ("0&1", "cuda:3,cuda:1")
    assert model.embeddings_on_host
    assert read_ini(path, "emulator").models["tiny_one"].device == "emulator"
    other = write(tmp_path, INI.replace("3&1", "2;2") + "be_host_embeddings = 0\n", "t.ini")
    text = other.read_text().replace("be_host_embeddings = 0\n", "")
    other.write_text(text.replace("max_context_len = 0", "be_host_embeddings = 0"))
    model = read_ini(other, "cuda").models["tiny_one"]
    assert (model.partition, model.device) == ("0;1", "cuda:2,cuda:2")
    assert not model.embeddings_on_host
    assert "on the CPU" not in capsys.readouterr().err
    found.usable, found.reason = False, "no driver"
    assert read_ini(path).models["tiny_one"].device == "cpu"
    assert "the models run on the CPU, and the numbers of devices are ranks" in (
        capsys.readouterr().err
    )


FAMILIES = Path(__file__).parents[1] / "golden" / "families"


def test_inferflow_formats_of_kinds(tmp_path):
    """Formats of kinds of matrices become patterns; those without a matrix are left out."""
    lines = "device_weight_data_type.attn_wk = f16\ndevice_weight_data_type.ffn_w1 = Q6\n"
    lines += "tensor_quant_threshold = 100\n"
    text = INI.replace("max_context_len", f"{lines}max_context_len")
    for family, w1 in (("llama31", "*.ffn.gate.weight"), ("opt", "*.ffn.up.weight")):
        folder = f"\nmodel_dir = {FAMILIES / family}"
        file = write(tmp_path, re.sub("\nmodel_dir = .*", folder, text), "s.ini")
        weights = read_ini(file, "cpu").models["tiny_one"].weights
        formats = {"*.attn.k.weight": "f16", w1: "q6", "*": "q3h"}
        assert weights == {"formats": formats, "min_elements": 100}
    formats = weight_formats(weights)
    assert formats.of("layers.0.attn.q.weight", (10, 10)) == "q3h_b64t1"
    assert formats.of("layers.0.attn.q.weight", (9, 11)) == "f16"


def test_inferflow_specification(tmp_path, capsys):
    """A specification is used where the checkpoint does not describe itself."""
    (tmp_path / "model_spec.json").write_text(
        '# published\n\n{"model_file_format": "llama2.c", "model_files": ["stories.bin"]}'
    )
    text = re.sub("\nmodel_dir = .*", f"\nmodel_dir = {tmp_path}", INI)
    model = read_ini(write(tmp_path, text, "s.ini"), "cpu").models["tiny_one"]
    assert (model.path, model.spec) == (str(tmp_path / "stories.bin"), None)  # one of several
    (tmp_path / "model_spec.json").write_text('{"model_file_format": "std", "model_files": ["a"]}')
    model = read_ini(tmp_path / "s.ini", "cpu").models["tiny_one"]
    assert (model.path, model.spec) == (str(tmp_path), str(tmp_path / "model_spec.json"))
    named = str(FAMILIES / "llama31")
    text = text.replace(f"model_dir = {tmp_path}", f"model_dir = {named}")
    text = text.replace("model_spec.json", str(tmp_path / "model_spec.json"))
    model = read_ini(write(tmp_path, text, "s.ini"), "cpu").models["tiny_one"]
    assert (model.path, model.spec) == (named, None)
    assert "not needed" in capsys.readouterr().err
    own = write(tmp_path, 'family = "llama"\n', "own.toml")
    text = text.replace(str(tmp_path / "model_spec.json"), str(own))
    assert read_ini(write(tmp_path, text, "s.ini"), "cpu").models["tiny_one"].spec == str(own)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("worker_count", "worker_cuont", "did you mean 'worker_count'"),
        ("[app_env.base]", "[app_env.bsae]", "did you mean"),
        ("attn_wq = auto", "attn_wq = Q7", "unknown format 'Q7'"),
        ("model_spec.json", "none.toml", "file: .*none.toml does not exist"),
        ("${data_root_dir}", "${data_dir}", "unknown macro"),
        ("${data_root_dir}", "${app_env.logging/log_dir}", "refer to each other"),
        ("line_count = 2", "line_count = 3", "line3 is missing"),
        ("[model.tiny_one]", "[model.other]", "is missing"),
        ("http_port = 8123", "http_port = eighty", "must be a number"),
        ("http_port = 8123", "http_port = inf", "must be a whole number"),
        ("; a service", "a service", "key = value"),
        ("worker_count = 32", "http_port = 1", r"s\.ini:5: 'http_port' is stated twice"),
        ("[app_env.base]", "[Main]", r"s\.ini:[0-9]+: 'main' is stated twice"),
        ('{"name": "sample.top_p", ', "{", "JSON object with a name"),
        (
            '"sample.top_p"',
            '"sample.topp"',
            "unknown decoding strategy.*available: std, .*top_p",
        ),
        ('"top_p": 0.8', '"topp": 0.8', "unknown parameter 'topp'; did you mean 'top_p'"),
        ("_template = mine", "_template = mien", "did you mean 'mine'.*vicuna-1.1"),
        ("data_root_dir = ${", "is_daemon = 1\ndata_root_dir = ${", "not offered; let systemd"),
        ("2MB", "2 parsecs", "max_size_per_file must be"),
    ],
)
def test_wrong_inferflow_files(tmp_path, old, new, words):
    assert old in INI
    with pytest.raises(UsageError, match=words):
        read_ini(write(tmp_path, INI.replace(old, new), "s.ini"), "cpu")


def test_ini_syntax(tmp_path):
    """Indented lines are keys, ``;`` in a value is literal, no section holds defaults."""
    text = '\ufeff[ A ] ; 1\n  k = v ; x # y\n\n   K2 = {"a": [1], "b": "x = y"}\n # c\nEmpty =\n'
    text += "[default]\n%(x)s = [1] 100%\n"
    assert read_sections(write(tmp_path, text, "s.ini")) == {
        "a": {"k": "v ; x # y", "k2": '{"a": [1], "b": "x = y"}', "empty": ""},
        "default": {"%(x)s": "[1] 100%"},
    }
    for wrong in ("k = 1", "[a]\n= 5", "[a]\nk: 3", "[]\nk = 1", "[a\nk = 1"):
        with pytest.raises(UsageError, match=r"s\.ini: lines must be \[section\] or key = value"):
            read_sections(write(tmp_path, wrong, "s.ini"))


def serve(*words):
    return run_command("serve", *words)


def test_names_of_models():
    """A single model answers to every name, unless names are strict or there are several."""
    one, two = (SimpleNamespace(name=n, options=SimpleNamespace(aliases=[n * 2])) for n in "ab")
    for models, refuses in ((Models([one]), False), (Models([one], strict=True), True),
                            (Models([one, two]), True)):  # fmt: skip
        assert models.find(None) is models.find("aa") is one
        for find in (models.find, models.named):
            if refuses or find == models.named:
                with pytest.raises(ApiError, match="unknown model 'gpt-5'"):
                    find("gpt-5")
            else:
                assert find("gpt-5") is one
        assert [models.shown(name, one) for name in (None, "aa", "gpt-5")] == ["a", "aa", "a"]


def test_command(tmp_path):
    path = write(tmp_path, "port = 9\n[models.a]\npath = 'tiny_python'\n[auth]\nkeys = ['secret']")
    checked = serve(str(path), "--port", "10", "--check")
    assert '"port": 10' in checked.stdout
    assert "secret" not in checked.stdout
    wrong = serve(str(path), "--weights", "q4")
    assert (wrong.returncode, "write it into" in wrong.stderr) == (2, True)
    options = serve("tiny_python", "--weights", "q4", "--kv-bytes", "2GiB", "--check",
                    "--strict-model-names")  # fmt: skip
    assert '"strict_model_names": true' in options.stdout
    assert '"weights": "q4"' in options.stdout
    assert '"kv_bytes": 2147483648' in options.stdout


def code_of(*words):
    """Run a command in this process and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return ended.value.code


def test_the_file_of_the_current_folder(tmp_path, monkeypatch, capsys):
    """Without MODEL; --check also builds the strategy and fills the template."""
    monkeypatch.chdir(tmp_path)
    assert code_of("serve", "--check") == 2
    assert "the current folder has no inferflow_service.ini" in capsys.readouterr().err
    folder = f"\nmodel_dir = {resolve('tiny_python').path}"
    text = re.sub("\nmodel_dir = .*", folder, INI).replace("model_specification_file", ";")
    write(tmp_path, text, "inferflow_service.ini")
    words = ("serve", "--check", "--device", "emulator", "--trace")
    assert code_of(*words) == 0
    shown = capsys.readouterr()
    assert "reading inferflow_service.ini of the current folder" in shown.err
    (model,) = json.loads(shown.out)["models"].values()
    assert (model["device"], model["trace"], model["embeddings_on_host"]) == (
        "emulator",
        True,
        True,
    )
    write(tmp_path, text.replace("{query}", "{query}{nosuch}"), "inferflow_service.ini")
    assert code_of(*words) == 2
    assert "chat_template: the template: {nosuch} is neither" in capsys.readouterr().err
    wrong = "[models.a]\npath = 'tiny_python'\n[models.a.defaults]\ndecoding = 'topp'"
    assert code_of("serve", str(write(tmp_path, wrong)), "--check") == 2
    assert "model a: default parameters: unknown decoding strategy" in capsys.readouterr().err
    greedy = wrong.replace("topp", "greedy")  # which has no parameters
    assert code_of("serve", str(write(tmp_path, greedy)), "--check") == 0
    keys = "[models.a]\npath = 'tiny_python'\n[auth]\nkeys_file = 'none.txt'"
    assert code_of("serve", str(write(tmp_path, keys)), "--check") == 2
    assert "auth.keys_file: none.txt cannot be read" in capsys.readouterr().err
    wrong = "[models.a]\npath = 'tiny_python'\nencoder_template = '{query}'"
    assert code_of("serve", str(write(tmp_path, wrong)), "--check") == 2
    assert "model a: encoder_template: tiny_python has no encoder" in capsys.readouterr().err


def test_the_plan(tmp_path):
    text = "[models.a]\npath = 'tiny_python'\npartition = '0/1&2'\nmachine = 'h200x8'\n"
    text += "draft = 'tiny_python'\n[models.a.engine]\nmax_sequences = 16\nkv_bytes = '1MiB'\n"
    planned = serve(str(write(tmp_path, text)), "--plan")
    assert planned.returncode == 0, planned.stderr
    lines = planned.stdout.splitlines()
    first = lines.index("rank  weights   KV  workspace  total")
    ranks = [line.split() for line in lines[first + 1 : first + 4]]
    assert [row[0] for row in ranks] == ["0", "1", "2"]
    assert float(ranks[1][1]) < float(ranks[0][1])  # two ranks share a replica's weights
    assert all(float(row[2]) <= 1.1 for row in ranks)  # a MiB in MB, rounded
    assert "partition '0/1&2'" in planned.stdout
    assert "a, draft: tiny_python" in planned.stdout
    speeds = lines[lines.index(next(line for line in lines if line.startswith("requests"))) + 1 :]
    assert [line.split()[0] for line in speeds[:3]] == ["1", "8", "16"]
    unnamed = serve("tiny_python", "--plan", "--partition", "auto")
    assert "to predict speed, name a --machine" in unnamed.stdout
    assert "partition '0'" in unnamed.stdout
    missing = serve("no_such_model", "--plan")
    assert missing.returncode == 2


def test_the_plan_of_a_server_is_of_the_spec_and_the_quantizer(tmp_path):
    from nbflow.cli.serve_plan import model_plan, steps
    from nbflow.planner.memory_plan import plan_memory
    from nbflow.server.config import ModelOptions

    (tmp_path / "own.toml").write_text('family = "gemma"\n[override]\nmax_context = 32\n')
    path = Path(__file__).parents[1] / "golden" / "families" / "gemma"
    own = {"spec": str(tmp_path / "own.toml"), "quantizer": "hadamard", "weights": "q8"}
    options = ModelOptions(path=str(path), machine="h200x8", engine={"max_sequences": 2}, **own)
    plan = model_plan(options)
    assert plan.kv_tokens == 2 * 64  # a page each
    assert plan.ranks == plan_memory(path, max_sequences=2, **own).ranks
    assert plan.ranks != plan_memory(path, max_sequences=2, weights="q8").ranks
    assert "prompts of 16 tokens, 16 generated" in steps(options, plan)[0]


def test_the_plan_of_a_server_counts_what_lies_on_the_host():
    from nbflow.cli.serve_plan import model_plan
    from nbflow.server.config import ModelOptions

    on_device = {"path": "tiny_python", "device": "cuda", "outliers": 0.0}
    limits = {"max_sequences": 2, "kv_bytes": 1 << 20}
    (here,) = model_plan(ModelOptions(**on_device, engine=limits)).ranks
    (there,) = model_plan(ModelOptions(**on_device, engine=limits, kv_host_percent=100)).ranks
    assert here.host_bytes == 0
    assert there.host_bytes == there.kv_bytes == here.kv_bytes > 0
    both = model_plan(ModelOptions(**on_device, engine=limits, cpu_layers=1))
    assert both.devices == ("cpu", "cuda")
