"""Recurrent states of sequences: forks, truncation, preemption, draft tokens, beams, memory."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path

import numpy as np
import pytest

import nbflow
from nbflow.engine.request import Request
from nbflow.engine.scheduler import Scheduler
from nbflow.executor import overlap
from nbflow.kv_cache import BlockTable, StateTable
from nbflow.kv_cache.state_table import ZEROS
from nbflow.planner.memory_plan import plan_memory
from nbflow.sampling import Greedy
from nbflow.spec import families
from nbflow.spec.from_config import build_spec
from nbflow_kernels.errors import UsageError

FOLDER = Path(__file__).parents[1] / "golden" / "families"
MODELS = ["lfm2", "olmo_hybrid", "mamba2"]
IDS = np.load(FOLDER / "lfm2" / "golden.npz")["ids"].tolist()
N_NEW = 8
TOLERANCE = 2e-6
"""Share of the largest logit, as in tests/models/test_families.py."""


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    with nbflow.load(FOLDER / request.param, kv="f32", max_step_tokens=16, threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def greedy(model):
    """Most probable continuation of the first n tokens, by computing all tokens again."""
    found = {}

    def continuation(n):
        if n not in found:
            ids = IDS[:n]
            for _ in range(N_NEW):
                ids = [*ids, int(model.logits(ids)[-1].argmax())]
            found[n] = ids[n:]
        return found[n]

    return continuation


def assert_close(found, expected):
    assert np.abs(found - expected).max() < TOLERANCE * np.abs(expected).max()


def test_state_rows_of_a_block_table():
    table = BlockTable(4, states=StateTable())
    states = table.states
    table.add(7)
    table.extend(7, 5)
    table.fork(7, 8)
    assert states.rows([8, 7]).tolist() == [1, 0]
    assert states.take_copies() == [(ZEROS, 0), (0, 1)]
    table.save_state(8)
    table.extend(8, 3)
    assert table.truncate(8, 8) == 8  # nothing to do
    assert states.take_copies() == [(1, 2)]
    assert table.truncate(8, 6) == table.length(8) == 5
    assert states.take_copies() == [(2, 1)]
    assert table.truncate(7, 3) == table.length(7) == 0  # no saved state
    assert states.take_copies() == [(ZEROS, 0)]
    table.drop(8)
    table.add(9)
    assert states.rows([7, 9]).tolist() in ([0, 1], [0, 2])
    assert (states.n_rows, states.most_used_rows) == (4, 3)


def test_sessions_fork_and_truncate(model):
    whole = model.logits(IDS)
    with model.session() as session:
        a = session.begin()
        rows = [session.run({a: IDS[i:j]})[a].logits for i, j in ((0, 1), (1, 3), (3, 9))]
        assert_close(np.concatenate(rows), whole[:9])
        b = session.fork(a)
        both = session.run({b: IDS[5:7], a: IDS[9:12]})
        assert_close(both[a].logits, whole[9:12])
        assert_close(both[b].logits, model.logits([*IDS[:9], *IDS[5:7]])[9:])
        session.truncate(a, 10)  # computed again from the start
        assert_close(session.run({a: IDS[10:14]})[a].logits, whole[10:14])
        session.save_state(a)
        session.run({a: [IDS[14], 2, 3]})
        session.truncate(a, 15)  # one token after the saved state is computed again
        assert_close(session.run({a: IDS[15:]})[a].logits, whole[15:])


def test_a_batch_equals_recomputation(model, greedy):
    lengths = (40, 3, 26)
    found = model.generate_batch([IDS[:n] for n in lengths], N_NEW)
    assert [r.ids for r in found] == [greedy(n) for n in lengths]


@pytest.mark.parametrize("n_right", [0, 2, 5])
def test_wrong_draft_tokens_are_rolled_back(model, greedy, n_right):
    expected = greedy(11)

    def propose(ids, n):
        tokens = expected[len(ids) - 11 :][:n]
        return [t if i < n_right else (t + 1) % 97 for i, t in enumerate(tokens)]

    found = model.generate_batch([IDS[:11], IDS[:3]], N_NEW, draft=propose, n_draft=4)
    assert found[0].ids == expected
    assert found[1].ids == greedy(3)
    assert (found[0].n_accepted > 0) == (n_right > 0)


def test_a_recurrent_draft_model(model, greedy):
    """It drafts what the model would generate itself."""
    options = {"kv": "f32", "max_step_tokens": 16, "threads": 1}
    with nbflow.load(FOLDER / model.spec.name, **options) as draft:
        found = model.generate(IDS[:11], N_NEW, draft=draft, n_draft=3)
    assert found.ids == greedy(11)
    assert found.n_accepted >= N_NEW - 3


def test_beams_follow_their_states(model):
    beam = model.generate(IDS, 6, "beam", num_beams=3)
    rows = model.logits([*IDS, *beam.ids])[len(IDS) - 1 : -1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    expected = rows[np.arange(len(beam.ids)), beam.ids]
    assert_close(np.array(beam.logprobs), expected)


def test_preempted_requests_are_computed_again(model, greedy):
    request = model.make_request(IDS[:11], N_NEW)
    model.call("configure")
    model.call("submit", request)
    scheduler, n = model.workers[0].scheduler, 0
    while request.finish_reason is None:
        model.call("step", 0.0)
        if len(request.ids) in (1, 4) and n < len(request.ids) and scheduler.running:
            scheduler.preempt(request)
            n = len(request.ids)
    assert (request.ids, scheduler.n_preemptions) == (greedy(11), 2)


@pytest.mark.parametrize("name", MODELS)
def test_prompts_start_from_kept_states(name, tmp_path, caplog):
    """Tokens are the same with and without the prefix cache, and with different later tokens."""
    long = [*IDS, *IDS[::-1], *IDS[::2]]  # 100 tokens; a page holds 64
    other = [*long[:66], 5, 6, 7]
    prompts = [long, long, IDS[:3], other, long[:64], other]
    (tmp_path / "own.toml").write_text(f'family = "{name}"\n[override]\nmax_context = 128\n')
    options = {"kv": "f32", "max_step_tokens": 24, "threads": 1, "spec": tmp_path / "own.toml"}
    found = []
    with nbflow.load(FOLDER / name, **options) as model:
        for kept, cached in ((0, [0] * 6), (1, [0, 64, 0, 64, 0, 64])):
            tokens = []
            with (
                caplog.at_level(logging.INFO),
                nbflow.LLMEngine(model, max_sequences=3, prefix_states=kept) as engine,
            ):
                for ids, n in zip(prompts, cached, strict=True):
                    greedy = engine.submit(model.make_request(ids, N_NEW)).result()
                    seeded = model.make_request(ids, N_NEW, "top_p", 7, top_p=0.95)
                    assert greedy.cached_tokens == n
                    tokens.append((greedy.ids, engine.submit(seeded).result().ids))
            found.append(tokens)
            assert ("the prefix cache is off" in caplog.text) == (kept == 0)
            caplog.clear()
    assert found[0] == found[1]


def test_borders_at_which_states_are_kept():
    scheduler = Scheduler(BlockTable(4, states=StateTable(1, 1)), 4096, prefix_cache=True)
    request, ends = Request(list(range(2000)), 1, Greedy()), []
    scheduler.add(request)
    while request.n_pending:
        (entry,) = scheduler.next_step()
        scheduler.table.extend(request.id, entry.n_tokens)
        request.n_computed += entry.n_tokens
        scheduler.commit(request)
        kept = scheduler.table.find(scheduler.table.chain(request.prompt), 2000)[0]
        ends.append((request.n_computed, kept))
    assert ends == [(512, 512), (1024, 1024), (1984, 1984), (2000, 1984)]


def test_kept_states_of_a_block_table():
    table = BlockTable(4, 8, states=StateTable(2, 2))
    chains = [table.chain([*range(8), *more]) for more in ([9, 9], [9, 9], [8, 8, 8, 8, 8])]
    ids = [*range(8), 9, 9]
    table.add(1, chains[0], 10)
    table.extend(1, 8)
    table.commit(1, ids[:8], keep_state=True)
    assert table.states.take_copies() == [(ZEROS, 0), (0, 1)]
    assert table.find(chains[1], 10) == (8, False)
    assert table.add(2, chains[1], 10) == 8
    assert table.states.take_copies() == [(1, 2)]
    table.extend(2, 4)
    table.commit(2, [*ids, 3, 3], keep_state=False)
    assert table.find(table.chain([*ids, 3, 3, 1]), 13)[0] == 8  # no state after the third page
    table.drop(1)
    table.drop(2)
    assert table.add(3, table.chain([7] * 33), 33) == 0
    table.extend(3, 32)  # takes all pages, so that the states after them go as well
    assert table.find(chains[2], 13) == (0, False)
    table.commit(3, [7] * 32, keep_state=True)
    assert table.states.most_used_rows == 3
    table.drop(3)
    table.clear_cache()
    assert len(table.states._free) == table.states.n_rows


def test_memory_of_the_states(model):
    (rank,) = model.gather("page_memory")
    n_bytes = rank["page_bytes"] + 5 * rank["state_bytes"]
    options = {"max_sequences": 2, "prefix_states": 3}
    with pytest.raises(UsageError, match=f"least {n_bytes}, .* 2 sequences .* 3 kept ones"):
        nbflow.LLMEngine(model, kv_bytes=n_bytes - 1, **options)
    with nbflow.LLMEngine(model, kv_bytes=n_bytes, **options):
        assert model.memory()[0]["kv_bytes"] == n_bytes
    path = FOLDER / model.spec.name
    planned = plan_memory(path, kv="f32", kv_bytes=n_bytes, **options)
    assert planned.ranks[0].kv_bytes == n_bytes


def test_groups_that_ranks_cannot_share():
    with pytest.raises(UsageError, match=r"have 2 groups of 40 columns, .* more stages"):
        nbflow.load(FOLDER / "qwen3_next", partition="0&1&2")


def test_halves_of_overlapped_steps_continue_from_each_other(monkeypatch):
    with np.load(FOLDER / "olmo_hybrid" / "golden.npz") as file:
        ids, logits = file["ids"], file["logits"]
    monkeypatch.setattr(overlap, "MIN_TOKENS", 16)
    monkeypatch.setenv("NBFLOW_OVERLAP", "1")
    options = {"kv": "f32", "threads": 1, "partition": "0&1"}
    with nbflow.load(FOLDER / "olmo_hybrid", **options) as model:
        assert_close(model.logits(ids), logits)


def test_transforms_that_need_plain_attention():
    for quantizer, message in (("awq", "recurrent layers"), ("hadamard", "recurrent layers")):
        with pytest.raises(UsageError, match=message):
            nbflow.load(FOLDER / "qwen3_5", weights="q8", quantizer=quantizer)


def test_layer_types_by_numbers():
    config = json.loads((FOLDER / "lfm2" / "config.json").read_text())
    del config["layer_types"]
    for family, key, stated, expected in (
        ("lfm2", "full_attn_idxs", [1], "conv attention conv conv"),
        ("lfm2", "full_attn_idxs", [4], "layers must be 0..3, got 4"),
        ("lfm2", "none", [], "attention attention attention attention"),
        ("nemotron_h", "hybrid_override_pattern", "M-*-", "ssm none attention none"),
        ("nemotron_h", "hybrid_override_pattern", "M-X-", "hybrid_override_pattern: must be"),
        ("jamba", "attn_layer_period", 3, "mamba1 attention mamba1 mamba1"),
        ("qwen3_next", "full_attention_interval", 3, "delta delta attention delta"),
    ):
        mixers = {"short_conv": "conv", "gated_delta_rule": "delta", "mamba2": "ssm"}
        more = {"moe_intermediate_size": 8, key: stated}
        if family == "jamba":
            more |= {"attn_layer_offset": 1, "mamba_expand": 2}
        build = functools.partial(
            build_spec, families()[family], config | more, name="a", where="b"
        )
        if "must" in expected:
            with pytest.raises(UsageError, match=expected):
                build(checkpoint_tensors=None)
        else:
            found = [kind.mixer[0] for kind in build(checkpoint_tensors=None).layer_kinds]
            assert " ".join(mixers.get(name, name) for name in found) == expected


def test_layer_types_of_a_family_file(tmp_path):
    base = 'extends = "lfm2"\n'
    for text, message in (
        ('[layer.conv]\nmixer = "fft"\n', r"\[layer.conv\] mixer: must be .*short_conv"),
        ("[layer.conv]\nmixers = 1\n", r"\[layer.conv\].*mixers"),
        ('[config]\nn_heads = { keys = ["a"], kinds = ["conv", "b"] }\n', "n_heads: kinds are"),
        ("[structure]\nconv_kernel = 1\n", "need conv_kernel, at least 2, got 1"),
        ('[structure]\nlayer_types = ["conv", "conv"]\n', "must have 4 entries, got 2"),
        ('[structure]\nlayer_types = ["convs"]\n', "layer_types: must be .*conv"),
        ('[layer.conv]\nmixer = ["mamba2", "none"]\n', "several mixers in a layer need"),
        ('[layer.conv]\nmixer = ["short_conv", "short_conv"]\n', "several that differ"),
    ):
        (tmp_path / "own.toml").write_text(base + text)
        with pytest.raises(UsageError, match=message):
            nbflow.load(FOLDER / "lfm2", spec=tmp_path / "own.toml")
