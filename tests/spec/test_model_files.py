"""The model files that come with the package: sizes, programs, templates; and how they are used."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from small_models import write_llama

import nbflow
from nbflow.cli.commands import spec as spec_command
from nbflow.distributed import make_plan
from nbflow.program import build, fuse, partition
from nbflow.spec import find_model_file, known_models, load_tokenizer, published, resolve
from nbflow.spec.model_names import aliases_of, model_name
from nbflow.tokenization import Tokenizer
from nbflow.tokenization.chat import encode_chat, format_chat
from nbflow_kernels.errors import UsageError
from nbflow_specs import CHECKPOINTS

LLAMA2C = next((Path(__file__).parent.parent / "golden" / "llama2c").glob("*.bin"))
TINY = CHECKPOINTS / "tiny_python"

# Parameters of the published checkpoints, a tied head once, buffers and BERT's pooler left out.
PARAMETERS = {
    "aquila_chat2_34b": 33_693_554_688,
    "baichuan2_13b_chat": 13_896_668_160,
    "baichuan2_7b_chat": 7_505_973_248,
    "bert_base_multilingual_cased": 177_974_523,
    "bloomz_3b": 3_002_557_440,
    "chatglm2_6b": 6_243_584_000,
    "deepseek_moe_16b_base": 16_375_728_128,
    "deepseek_v2_chat": 235_741_434_880,
    "deepseek_v2_lite_chat": 15_706_484_224,
    "deepseek_v3": 671_026_419_200,
    "facebook_m2m100_418m": 483_905_536,
    "falcon_40b_instruct": 41_303_293_952,
    "falcon_7b_instruct": 6_921_720_704,
    "fusellm_7b": 6_738_415_616,
    "gemma_2b_it": 2_506_172_416,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "internlm_chat_20b": 20_088_714_240,
    "llama2_13b_chat": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama2_7b": 6_738_415_616,
    "llama3.1_405b": 405_853_388_800,
    "llama3.1_70b": 70_553_706_496,
    "llama2_7b_chat": 6_738_415_616,
    "minicpm_2b_dpo": 2_724_880_896,
    "mistral_7b_instruct": 7_241_732_096,
    "mixtral_8x7b_instruct": 46_702_792_704,
    "open_llama_3b": 3_426_473_600,
    "opt_13b": 12_853_473_280,
    "opt_350m": 331_196_416,
    "opt_iml_max_30b": 29_974_540_288,
    "orion_14b_chat": 14_498_703_360,
    "phi_2": 2_779_683_840,
    "qwen1.5_0.5b_chat": 463_987_712,
    "qwen1.5_7b_chat": 7_721_324_544,
    "yi_34b_chat": 34_388_917_248,
    "yi_6b": 6_061_035_520,
}
NO_NUMBERS = {
    "tiny_python",
    "tiny_python_draft",
    "tiny_python_hybrid",
    "xverse_13b_chat",
    "yi_6b_200k",
}
NO_TEMPLATE = {
    "tiny_python", "tiny_python_draft", "tiny_python_hybrid", "bert_base_multilingual_cased",
    "facebook_m2m100_418m",
    "llama3.1_70b", "llama3.1_405b", "deepseek_v2_chat", "deepseek_v2_lite_chat", "deepseek_v3",
    "gpt_oss_20b", "gpt_oss_120b",
}  # fmt: skip

CHATML = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = {
    "aquila_chat2_34b": "Hi",
    "baichuan2_13b_chat": "<reserved_106>Hi<reserved_107>",
    "baichuan2_7b_chat": "<reserved_106>Hi<reserved_107>",
    "bloomz_3b": "Hi",
    "chatglm2_6b": "[gMASK]sop[Round 1]\n\n问：Hi\n\n答：",  # noqa: RUF001
    "deepseek_moe_16b_base": "<s>Hi",
    "falcon_40b_instruct": "Hi",
    "falcon_7b_instruct": "Hi",
    "fusellm_7b": "<s>Hi",
    "gemma_2b_it": "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "internlm_chat_20b": "<s><|User|>:Hi\n<|Bot|>:",
    "llama2_13b_chat": "<s>[INST] Hi [/INST]",
    "llama2_70b": "<s>Hi",
    "llama2_7b": "<s>Hi",
    "llama2_7b_chat": "<s>[INST] Hi [/INST]",
    "minicpm_2b_dpo": "<s><用户>Hi<AI>",
    "mistral_7b_instruct": "<s>[INST] Hi [/INST]",
    "mixtral_8x7b_instruct": "<s>[INST] Hi [/INST]",
    "open_llama_3b": "<s>Hi",
    "opt_13b": "<s>Hi",
    "opt_350m": "<s>Hi",
    "opt_iml_max_30b": "<s>Hi\nA:\n",
    "orion_14b_chat": "<s>Human: Hi\n\nAssistant: </s>",
    "phi_2": "Instruct: Hi\nOutput:",
    "qwen1.5_0.5b_chat": "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n" + CHATML,
    "qwen1.5_7b_chat": "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n" + CHATML,
    "xverse_13b_chat": "Human: Hi\n\nAssistant: ",
    "yi_34b_chat": CHATML,
    "yi_6b": "<s>Hi",
    "yi_6b_200k": "<s>Hi",
}
INFERFLOW = {
    "aquila_chat2_34b": "BAAI/AquilaChat2-34B",
    "baichuan2_7b_chat": "baichuan-inc/Baichuan2-7B-Chat",
    "baichuan2_13b_chat": "baichuan-inc/Baichuan2-13B-Chat",
    "bert-base-multilingual-cased": "google-bert/bert-base-multilingual-cased",
    "bloomz_3b": "bigscience/bloomz-3b",
    "chatglm2_6b": "THUDM/chatglm2-6b",
    "deepseek_moe_16b_base": "deepseek-ai/deepseek-moe-16b-base",
    "facebook_m2m100_418m": "facebook/m2m100_418M",
    "falcon_7b_instruct": "tiiuae/falcon-7b-instruct",
    "falcon_40b_instruct": "tiiuae/falcon-40b-instruct",
    "fusellm_7b": "Wanfq/FuseLLM-7B",
    "gemma_2b_it": "google/gemma-2b-it",
    "internlm-chat-20b": "internlm/internlm-chat-20b",
    "llama2_7b": "meta-llama/Llama-2-7b-hf",
    "llama2_7b_chat": "meta-llama/Llama-2-7b-chat-hf",
    "llama2_13b_chat": "meta-llama/Llama-2-13b-chat-hf",
    "minicpm_2b_dpo_bf16": "openbmb/MiniCPM-2B-dpo-bf16",
    "mistral_7b_instruct": "mistralai/Mistral-7B-Instruct-v0.2",
    "mixtral_8x7b_instruct_v0.1": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "open_llama_3b": "openlm-research/open_llama_3b",
    "opt_350m": "facebook/opt-350m",
    "opt_13b": "facebook/opt-13b",
    "opt_iml_max_30b": "facebook/opt-iml-max-30b",
    "orion_14b_chat": "OrionStarAI/Orion-14B-Chat",
    "phi_2": "microsoft/phi-2",
    "qwen1.5_7b_chat": "Qwen/Qwen1.5-7B-Chat",
    "xverse_13b_chat": "xverse/XVERSE-13B-Chat",
    "yi_6b": "01-ai/Yi-6B",
    "yi_34b_chat": "01-ai/Yi-34B-Chat",
    # sections of its service file that are called otherwise
    "bert_base_multilingual_cased": "google-bert/bert-base-multilingual-cased",
    "internlm_chat_20b": "internlm/internlm-chat-20b",
    "llama2_7b_hf": "meta-llama/Llama-2-7b-hf",
    "llama2_7b_chat_hf": "meta-llama/Llama-2-7b-chat-hf",
    "llama2_13b_chat_hf": "meta-llama/Llama-2-13b-chat-hf",
    "mixtral_8x7b_instruct": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "qwen1.5_0.5b_chat": "Qwen/Qwen1.5-0.5B-Chat",
    "yi_6b_200k": "01-ai/Yi-6B-200K",
}
"""Names of Inferflow's predefined models, and the weights that they stand for."""
HI = [{"role": "user", "content": "Hi"}]
SPECIAL = {
    "<s>": 1, "</s>": 2, "<reserved_106>": 3, "<reserved_107>": 4, "<start_of_turn>": 5,
    "<end_of_turn>": 6, "<|im_start|>": 7, "<|im_end|>": 8, "[gMASK]": 64790, "sop": 64792,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Characters, and the special tokens of all templates; ids as large as ChatGLM's."""
    folder = tmp_path_factory.mktemp("tokenizer")
    shown = "".join(sorted({c for text in PROMPTS.values() for c in text}))
    vocabulary = {f"unused {i}": i for i in range(64793)} | SPECIAL | {"<unk>": 0}
    vocabulary |= {c: 100 + i for i, c in enumerate(shown)}
    by_id = {i: piece for piece, i in vocabulary.items()}  # the last of an id counts
    tokens = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": piece, "special": True, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}
            for piece, i in SPECIAL.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated",
                          "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "unk_token": "<unk>",
                  "vocab": {piece: i for i, piece in by_id.items()}},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return load_tokenizer(folder)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    parser = argparse.ArgumentParser()
    spec_command.add_arguments(parser)
    assert spec_command.run(parser.parse_args(list(words))) == 0
    return capsys.readouterr().out


def test_tables_are_complete() -> None:
    names = set(known_models())
    assert set(PARAMETERS) | NO_NUMBERS == names
    assert set(PROMPTS) | NO_TEMPLATE == names


@pytest.mark.parametrize("name", INFERFLOW)
def test_names_of_inferflow(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each is a model of the package, whose weights have a name on the Hub."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for written in (name, name.upper(), name.replace("_", "-"), name.replace("-", "_")):
        assert find_model_file(written).hub == INFERFLOW[name]
    message = f"weights of {name} are {INFERFLOW[name]} on the Hub.*'nbflow pull {name}' does it"
    with pytest.raises(UsageError, match=message):
        resolve(name)


def test_names_stand_for_one_model() -> None:
    written = [n for name, file in known_models().items() for n in (name, *aliases_of(file))]
    folded = [name.casefold().replace("-", "_") for name in written]
    assert len(set(folded)) == len(folded)
    assert all(model_name(name) in known_models() for name in written)
    for name in ("", "../models/phi_2", "/phi_2", "llama2_7b.toml"):
        assert model_name(name) is None


@pytest.mark.parametrize("name", PARAMETERS)
def test_size_tensors_and_program(name: str) -> None:
    model_file = find_model_file(name)
    # a GGUF under this name takes nothing but template and settings, so there must be no more
    assert (model_file.override, model_file.tensors, model_file.ignored_tensors) == ({}, {}, ())
    spec = published(model_file)
    assert spec.n_parameters == PARAMETERS[name]
    for part in filter(None, (spec, spec.encoder)):
        assert all(part.checkpoint_name(tensor) for tensor in part.tensor_shapes())
    if spec.encoder is None:
        for rank in make_plan(spec, "0").ranks:
            assert fuse(partition(build(spec), rank)).ops
    else:
        assert build(spec).ops


@pytest.mark.parametrize("name", PROMPTS)
def test_templates(name: str, tokenizer: Tokenizer) -> None:
    stated = find_model_file(name).prompt_template
    assert format_chat(tokenizer, HI, stated) == PROMPTS[name]
    ids = encode_chat(tokenizer, HI, stated)
    assert "".join(tokenizer.piece(i) for i in ids) == PROMPTS[name]
    # control tokens of the template are single ids, the rest is one id per character
    rest = PROMPTS[name]
    for piece in SPECIAL:
        rest = rest.replace(piece, "\0")
    assert len(ids) == len(rest)


def test_several_turns_and_a_system_message(tokenizer: Tokenizer) -> None:
    turns = [
        {"role": "system", "content": "Be kind."},
        *HI,
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "Bye"},
    ]

    def written(name: str) -> str:
        return format_chat(tokenizer, turns, find_model_file(name).prompt_template)

    assert written("llama2_7b_chat") == (
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST] Yes </s><s>[INST] Bye [/INST]"
    )
    assert written("qwen1.5_7b_chat") == written("yi_34b_chat")
    assert written("yi_34b_chat").startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>")
    with pytest.raises(UsageError, match="takes no system messages"):
        written("mistral_7b_instruct")
    # a {query} template has no place for a system message, and is repeated for each turn
    assert written("phi_2") == "Instruct: Hi\nOutput:Yes</s>Instruct: Bye\nOutput:"


def test_a_checkpoint_with_the_name_of_a_spec() -> None:
    with nbflow.load(TINY, spec="llama2_7b_chat") as model:
        assert model.spec.hidden_size == resolve("tiny_python").spec.hidden_size
        assert dict(model.defaults) == {"temperature": 0.6, "top_p": 0.9}
        assert format_chat(model.tokenizer, HI) == "<s>[INST] Hi [/INST]"
        assert encode_chat(model.tokenizer, HI) == encode_chat(
            model.tokenizer, HI, find_model_file("llama2_7b_chat").prompt_template
        )
        # precedence: explicit template, tokenizer template, family template
        model.tokenizer.chat_templates = {"default": "own {{ messages[0].content }}"}
        assert format_chat(model.tokenizer, HI) == "own Hi"
        assert format_chat(model.tokenizer, HI, "simple") == "Hi\n"


def test_what_describes_itself_takes_template_and_settings_only() -> None:
    alone, named = resolve(LLAMA2C), resolve(LLAMA2C, spec="mixtral_8x7b_instruct")
    assert named.spec == alone.spec
    assert (alone.prompt_template, named.prompt_template) == (
        None,
        find_model_file("mixtral_8x7b_instruct").prompt_template,
    )


FILE = """family = "llama"
path = "a.safetensors"
prompt_template = "vicuna-1.1"
[config]
vocab_size = 101
hidden_size = 64
intermediate_size = 192
num_hidden_layers = 3
num_attention_heads = 8
num_key_value_heads = 4
head_dim = 32
tie_word_embeddings = false
"""


def test_config_stands_in_for_config_json(tmp_path: Path) -> None:
    write_llama(tmp_path / "whole")
    shutil.copy(tmp_path / "whole" / "model.safetensors", tmp_path / "a.safetensors")
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    file = tmp_path / "mine.toml"
    file.write_text(FILE)
    spec = resolve(file).spec
    assert (spec.n_kv_heads, spec.head_dim, spec.vocab_size) == (4, 32, 101)
    assert spec == published(find_model_file(file))
    assert format_chat(load_tokenizer(file), HI) == "USER: Hi\nASSISTANT: "
    # a config.json is read alone: this one has no num_key_value_heads
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    del config["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert resolve(file).spec.n_kv_heads == 8


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[config]\nnum_layers = 3", r"\[config\]: unknown key 'num_layers'"),
        ('prompt_template = "chatmll"', "unknown chat template 'chatmll'; did you mean 'chatml'"),
        ('prompt_template = "{x}"', r"prompt_template must contain \{query\}"),
    ],
)
def test_wrong_files(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'family = "llama"\n{line}\n')
    with pytest.raises(UsageError, match=message):
        find_model_file(file)


def test_names_that_cannot_be_used(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('family = "llama"\n')
    with pytest.raises(UsageError, match=r"no path to weights; name the weights .*own.toml as --"):
        resolve(own)
    own.write_text('family = "llama"\nhub = "llama"\n')
    with pytest.raises(UsageError, match=r"own.toml: hub: must be ORG/NAME, got 'llama'"):
        resolve(own)
    close = "did you mean 'llama2_7b' or .*; or give the path of a f"
    for model, spec, kind in ((TINY, "llama2_7", "spec"), ("llama2_7", None, "model")):
        with pytest.raises(UsageError, match=f"unknown {kind} 'llama2_7'; {close}"):
            resolve(model, spec=spec)
    with pytest.raises(UsageError, match="unknown model 'zzz'; 'nbflow spec --list' lists all"):
        resolve("zzz")
    with pytest.raises(UsageError, match="cannot be opened"):
        resolve(TINY, spec=tmp_path / "none.toml")
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "x.safetensors")
    with pytest.raises(UsageError, match="does not say vocab_size"):
        resolve(tmp_path / "x.safetensors", spec="xverse_13b_chat")


def test_spec_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "llama2_7b")
    assert "parameters         6,738,415,616\nbytes as f16       13,476,831,232\n" in text
    assert "prompt template    '{bos}{query}'\n" in text
    assert "layers.31.ffn.down.weight   (4096, 11008)\n" in run(capsys, "llama2_7b", "--tensors")
    facts = json.loads(run(capsys, "qwen1.5_0.5b_chat", "--json"))
    assert (facts["n_parameters"], facts["f16_bytes"]) == (463_987_712, 927_975_424)
    assert (facts["defaults"], facts["spec"]["tied_head"]) == ({}, True)
    assert json.loads(run(capsys, "minicpm_2b_dpo", "--json"))["defaults"] == {"top_p": 0.9}
    assert "rank 1: " in run(capsys, "llama2_7b", "--program", "--partition", "0&1")
    encoder = "encoder            m2m_100_encoder, 12 layers of width 1024, 16 heads\n"
    assert encoder in run(capsys, "facebook_m2m100_418m")
    text = run(capsys, "xverse_13b_chat")  # no numbers: where they come from
    assert "key vocab_size\n" in text
    assert "defaults: {'top_p': 0.9}\n" in text
    assert "weights: xverse/XVERSE-13B-Chat on the Hub: nbflow pull xverse_13b_chat" in text
    listed = run(capsys, "--list")
    assert "\nphi_2 " in listed
    assert "minicpm_2b_dpo_bf16\n" in listed
    rows = {row["name"]: row for row in json.loads(run(capsys, "--list", "--json"))}
    assert rows["phi_2"]["weights"] == "microsoft/phi-2"
    with pytest.raises(UsageError, match="MODEL is missing"):
        run(capsys)
