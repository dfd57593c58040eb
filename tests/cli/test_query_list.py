"""`nbflow run --queries`: lists of prompts, and Inferflow's llm_inference.ini."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from encoder_models import bert, translator
from safetensors.numpy import load_file, save_file

import nbflow
from nbflow import cli
from nbflow.cli.query_list import make_queries, read_queries
from nbflow.compat.inferflow.tool_ini import read_query_ini
from nbflow.tokenization.chat import encode_chat
from nbflow_kernels.errors import UsageError

LLAMA2C = Path(__file__).parents[1] / "golden" / "llama2c"
INI = """\
[main]
inference_engine_config = ${config_dir}/llm_inference.tiny.ini
query_list = query_list
query_random_seed = 1
temperature = 0.7
long_context_test = false
[query_list]
query_count = 2
query1 = {"res_prefix":"Today is a nice"}
;query1 = {"res_prefix":"On a farm"}
query2 = On a farm{\\n}long ago
[transformer_engine]
models = stories_15m.llama2_c
devices = 0
decoder_cpu_layer_count = 0
cpu_threads = 1
max_concurrent_queries = 6
is_study_mode = false
[model.stories_15m.llama2_c]
model_dir = ${data_root_dir}/stories15M.bin
device_weight_data_type = F16
device_kv_cache_data_type = F16
host_kv_cache_percent = 0
decoding_strategy = sample.std
prompt_template = {bos}{query}
[prompt_templates]
prompt_template_count = 0
"""


def run(capsys, *arguments):
    """Run `nbflow run` in this process; return (exit code, stdout, stderr)."""
    with pytest.raises(SystemExit) as end:
        cli.main(["run", *map(str, arguments)])
    out, err = capsys.readouterr()
    return end.value.code or 0, out, err


def test_a_list(capsys, tmp_path, offline):
    path = tmp_path / "queries.jsonl"
    queries = [
        {"id": "a", "prompt": "def read(self", "seed": [1, 2], "decoding": ["top_p", "greedy"]},
        "import ",
        {"prompt": "x = 1", "system": "y", "prefix": "z", "template": "vicuna-1.1", "top_k": 3},
    ]
    path.write_text("".join(json.dumps(query) + "\n" for query in queries))
    code, out, err = run(capsys, "tiny_python", "--queries", path, "-n", 6, "--seed", 5)
    assert code == 0, err
    assert "[6 queries: " in err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["index"], row["seed"], row["decoding"]) for row in rows] == [
        (0, 1, "top_p"), (1, 1, "greedy"), (2, 2, "top_p"), (3, 2, "greedy"), (4, 5, "greedy"),
        (5, 5, "auto"),
    ]  # fmt: skip
    turns = [("system", "y"), ("user", "x = 1"), ("assistant", "z")]
    messages = [{"role": role, "content": text} for role, text in turns]
    chat = encode_chat(offline.tokenizer, messages, "vicuna-1.1", continue_final_message=True)
    prompts = [*["def read(self"] * 4, "import ", chat]
    for row, prompt in zip(rows, prompts, strict=True):
        more = {"top_k": 3} if "top_k" in row else {}
        alone = offline.generate(prompt, 6, row["decoding"], row["seed"], **more)
        assert (row["text"], row["finish_reason"]) == (alone.text, alone.finish_reason)
        assert (row["prompt_tokens"], row["new_tokens"]) == (len(alone.prompt_ids), 6)

    table = tmp_path / "results.csv"
    words = ["tiny_python", "--queries", path, "-n", 6, "--seed", 5, "--output", table]
    assert run(capsys, *words)[1] == ""
    with table.open(newline="") as file:
        again = list(csv.DictReader(file))
    assert [row["text"] for row in again] == [row["text"] for row in rows]
    assert (again[0]["id"], again[4]["id"], again[5]["top_k"]) == ("a", "", "3")


def test_tables_and_lines(tmp_path):
    def read(name, text):
        path = tmp_path / name
        path.write_text(text)
        return [query.fields | query.sampling for query in read_queries(str(path))]

    assert read("q.txt", "a b\n\n c\n") == [{"prompt": "a b"}, {"prompt": " c"}]
    assert read("q.json", '["a", {"messages": []}]') == [{"prompt": "a"}, {"messages": []}]
    text = 'id,prompt,seed,temp,stop,messages\n7,"a\nb",3,,x,\n8,,,0.5,,"[{""role"": ""user""}]"\n'
    with pytest.raises(UsageError, match="query 2: give messages, or prompt"):
        read("q.csv", text)
    (found,) = read("q.csv", text.rpartition("8,")[0])
    assert found == {"id": "7", "prompt": "a\nb", "seed": 3, "stop": "x"}


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"promt": "x"}, "query 1: unknown field 'promt'; did you mean 'prompt'"),
        ({"seed": 1}, "must have prompt"),
        ({"prompt": 1}, "prompt must be a text"),
        ({"prompt": "x", "temp": 1, "temperature": 1}, "given twice"),
        ({"prompt": "x", "seed": []}, "must not be empty"),
        ({"prompt": "x", "logprobs": 1}, "have no column for logprobs"),
        ({"messages": "x"}, "list of objects"),
        (3, "must be a text or a JSON object"),
    ],
)
def test_wrong_queries(query, words):
    with pytest.raises(UsageError, match=words):
        make_queries([query], "q")


def test_wrong_command_lines(capsys, tmp_path):
    path = tmp_path / "q.txt"
    path.write_text("x\n")
    for words, message in (
        (["--queries", path, "-p", "x"], "--prompt does not go with a list"),
        (["--queries", path, "--num-beams", "2"], "takes no searches"),
        (["--queries", path, "--decoding", "greedy", "--top-k", "3"], "q.txt: query 1: .*no param"),
        (["--output", path], "--output needs --queries"),
        (["--queries", tmp_path / "none.txt"], "cannot be read"),
    ):
        code, _, err = run(capsys, "tiny_python", *words)
        assert code == 2
        assert re.search(message, err), err


def test_inferflows_file(capsys, tmp_path):
    """The tiny example: stories.bin, tokenizer.bin, and the ini that names itself."""
    shutil.copy(LLAMA2C / "legacy_shared.bin", tmp_path / "stories15M.bin")
    shutil.copy(LLAMA2C / "tokenizer.bin", tmp_path)
    ini = tmp_path / "llm_inference.tiny.ini"
    ini.write_text(INI)
    code, out, err = run(capsys, ini, "-n", 8)
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    with nbflow.load(tmp_path / "stories15M.bin", weights="f16", kv="f16", threads=1) as model:
        for row, text in zip(rows, ("Today is a nice", "On a farm\nlong ago"), strict=True):
            prompt = [model.tokenizer.bos_id, *model.tokenizer.encode_parts([text])]
            alone = model.generate(prompt, 8, "inferflow.std", 1, temperature=0.7)
            assert (row["text"], row["decoding"]) == (alone.text, "inferflow.std")
    assert read_query_ini(ini).max_tokens == 300
    ini.write_text(INI.replace("[query_list]", "[query_list.other]"))
    with pytest.raises(UsageError, match=r"\[query_list\] is missing"):
        read_query_ini(ini)
    ini.write_text(INI.replace("query_count = 2", "query_count = 3"))
    with pytest.raises(UsageError, match="query3 is missing"):
        read_query_ini(ini)
    ini.write_text(INI.replace('"res_prefix"', '"prefix"'))
    with pytest.raises(UsageError, match="unknown field 'prefix'"):
        read_query_ini(ini)


ENCODER_INI = """\
[main]
query_list = query_list
[query_list]
query_count = 1
query1 = {"text": "%s"%s}
[transformer_engine]
models = m
cpu_threads = 1
[model.m]
model_dir = m
device_weight_data_type =
device_kv_cache_data_type =
encoder_input_template = %s
"""


def test_inferflows_templates_of_an_encoder(capsys, tmp_path):
    """The section's or the query's, with the sinusoidal tables that old checkpoints store."""
    weights = translator(tmp_path / "m") / "model.safetensors"
    table = load_file(weights)["model.shared.weight"][:2]
    for part in ("encoder", "decoder"):
        name = f"model.{part}.embed_positions.weights"
        save_file({**load_file(weights), name: table}, weights, metadata={"format": "pt"})
    ini = tmp_path / "llm_inference.ini"
    own = ', "encoder_input_template": "{__zh__}{ }{query}{</s>}"'
    texts = []
    for more in ("", own):
        of_file = "{__fr__}{ }{query}{</s>}\ndecoder_input_template = {#2}{__zh__}{res_prefix}"
        ini.write_text(ENCODER_INI % ("w10 w11", more, of_file))
        code, out, err = run(capsys, ini, "-n", 4, "--decoding", "greedy")
        assert code == 0, err
        texts.append(json.loads(out)["text"])
    with nbflow.load(tmp_path / "m", kv="f16", threads=1) as model:
        for text, language in zip(texts, (78, 77), strict=True):
            alone = model.generate([language, 10, 11, 2], 4, decoder_ids=[2, 77])
            assert text == alone.text


def test_inferflows_masks(capsys, tmp_path):
    bert(tmp_path / "m")
    ini = tmp_path / "llm_inference.ini"
    ini.write_text(ENCODER_INI % ("w10 [MASK]", "", "{[CLS]}{query}{[SEP]}"))
    code, out, err = run(capsys, ini)
    assert code == 0, err
    (mask,) = json.loads(out)["masks"]
    with nbflow.load(tmp_path / "m", kv="f16", threads=1) as model:
        (expected,) = nbflow.fill_mask(model, [2, 10, 4, 3])
    assert [one["token"] for one in mask] == [one.token for one in expected]
