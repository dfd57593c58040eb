"""Sequence evaluator: stepwise runs, forks, truncation."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import nbflow
from nbflow_kernels.errors import UsageError

FAMILIES = Path(__file__).parents[1] / "golden" / "families"
IDS = (np.arange(300) * 7 % 101).tolist()


def test_random_forks_and_cuts_give_what_the_whole_sequence_gives(model):
    """Forked sequences do not overwrite shared pages."""
    rng = random.Random(3)
    with model.session() as session:
        first = session.begin()
        texts = {first: []}
        for _ in range(150):
            sequence = rng.choice(list(texts))
            kind = rng.random()
            if kind < 0.25 and len(texts) < 12:
                new = session.fork(sequence)
                texts[new] = list(texts[sequence])
            elif kind < 0.4 and texts[sequence]:
                n = rng.randrange(len(texts[sequence]) + 1)
                session.truncate(sequence, n)
                del texts[sequence][n:]
            elif kind < 0.45 and len(texts) > 1:
                session.drop(sequence)
                del texts[sequence]
            else:
                chosen = rng.sample(sorted(texts), min(len(texts), rng.randrange(1, 4)))
                more = {s: rng.choices(range(101), k=rng.randrange(1, 40)) for s in chosen}
                more = {s: t for s, t in more.items() if len(texts[s]) + len(t) < 300}
                if not more:
                    continue
                rows = session.run(more)
                for s, tokens in more.items():
                    texts[s] += tokens
                    n = len(tokens)
                    np.testing.assert_array_equal(rows[s].logits, model.logits(texts[s])[-n:])
        assert {s: session.length(s) for s in texts} == {s: len(t) for s, t in texts.items()}
    table = model.workers[0].table
    assert table.n_used_pages == 0


def test_hidden_states_come_along(model):
    with model.session() as session:
        a = session.begin()
        session.run({a: IDS[:5]})
        rows = session.run({a: IDS[5:9]}, hidden=True)[a]
        np.testing.assert_array_equal(rows.hidden, model.hidden(IDS[:9])[5:])
        np.testing.assert_array_equal(rows.logits, model.logits(IDS[:9])[5:])


@pytest.mark.parametrize("partition", ["0;1", "0&1"])
def test_on_several_ranks(checkpoint, partition):
    with nbflow.load(checkpoint, threads=1, partition=partition) as model:
        with model.session() as session:
            a = session.begin()
            session.run({a: IDS[:70]})
            b = session.fork(a)
            rows = session.run({a: [1], b: [2]})
            session.truncate(b, 66)
            again = session.run({b: [*IDS[66:70], 2]})[b]
        np.testing.assert_array_equal(rows[b].logits[-1], again.logits[-1])
        np.testing.assert_array_equal(rows[a].logits, model.logits([*IDS[:70], 1])[-1:])


def test_with_an_encoder():
    read = np.load(FAMILIES / "bart" / "golden.npz")["encoder_ids"].tolist()
    with nbflow.load(FAMILIES / "bart", threads=1) as model, model.session() as session:
        a = session.begin(read)
        session.run({a: [1, 2]})
        b = session.fork(a)
        session.drop(a)
        rows = session.run({b: [3]})[b]
        np.testing.assert_array_equal(rows.logits, model.logits([1, 2, 3], read)[2:])
        with pytest.raises(UsageError, match="has an encoder; give its token ids"):
            session.begin()


def test_what_is_refused(model):
    with model.session() as session:
        a = session.begin()
        session.run({a: IDS[:4]})
        with pytest.raises(UsageError, match=r"length must be 0\.\.4"):
            session.truncate(a, 5)
        with pytest.raises(UsageError, match="this session has no sequence 7"):
            session.run({7: [1]})
        with pytest.raises(UsageError, match="token id 101 is outside"):
            session.run({a: [101]})
        session.run({a: IDS[:200]})
        session.run({a: IDS[:300]})
        with pytest.raises(UsageError, match="has 504 tokens, and 9 more do not fit"):
            session.run({a: [1] * 9})


def test_the_last_rows_alone_are_the_last_of_all(model):
    rng = np.random.default_rng(6)
    texts = [rng.integers(0, 101, n).tolist() for n in (150, 3, 64)]
    with model.session() as session:
        every = [session.begin() for _ in texts]
        whole = session.run(dict(zip(every, texts, strict=True)), hidden=True)
        again = [session.begin() for _ in texts]
        last = session.run(dict(zip(again, texts, strict=True)), hidden=True, last=True)
        for a, b in zip(every, again, strict=True):
            np.testing.assert_array_equal(whole[a].logits[-1:], last[b].logits)
            np.testing.assert_array_equal(whole[a].hidden[-1:], last[b].hidden)
