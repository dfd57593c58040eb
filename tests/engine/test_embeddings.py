"""Embedding requests, which share steps and pages with generating ones."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import nbflow
from nbflow.engine.errors import EngineClosed, QueueFull
from nbflow_kernels.errors import UsageError

IDS = (np.arange(2000) * 7 % 101).tolist()
BERT = Path(__file__).parents[1] / "golden" / "families" / "bert"
PARTITIONS = ["0", "0&1", "0;1"]


def texts_of(n, length):
    return [IDS[i : i + length] for i in range(n)]


def stream_of(model, i, n=60, **fields):
    request = model.make_request(IDS[i : i + 9], n, "top_p", 3, True)
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def pages(model, n):
    """Return the bytes of `n` pages on the rank with the largest pages."""
    return n * max(engine.storage.page_bytes for engine in model.workers)


def all_free(engine):
    stats = engine.stats()
    return stats.running == stats.waiting == stats.pages_used == 0


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_a_vector_does_not_depend_on_the_pieces_of_the_text(checkpoint, pooling):
    texts = texts_of(3, 150)
    with nbflow.load(checkpoint, threads=1, max_step_tokens=512) as model:
        rows = [model.hidden(text) for text in texts]
    pooled = {
        "mean": [r.mean(axis=0) for r in rows],
        "first": [r[0] for r in rows],
        "last": [r[-1] for r in rows],
    }
    with nbflow.load(checkpoint, threads=1, max_step_tokens=64) as model:
        found = model.embed_batch(texts, pooling=pooling, normalize=False)
    np.testing.assert_array_equal(found, pooled[pooling])


@pytest.mark.parametrize("partition", PARTITIONS)
def test_texts_and_streams_share_a_cache_that_is_short(checkpoint, partition):
    texts = texts_of(8, 150)
    with nbflow.load(checkpoint, threads=1, max_step_tokens=64, partition=partition) as model:
        expected = model.embed_batch(texts)
        alone = [model.generate(r.prompt, 60, "top_p", 3, True).ids
                 for r in (stream_of(model, i) for i in range(3))]  # fmt: skip
        with nbflow.LLMEngine(model, max_sequences=6, kv_bytes=pages(model, 4)) as engine:
            assert engine.limits.max_tokens == 256
            streams = [engine.submit(stream_of(model, i)) for i in range(3)]
            np.testing.assert_array_equal(engine.embed(texts), expected)
            assert [s.result(300).ids for s in streams] == alone
            with pytest.raises(UsageError, match="has 300 tokens, but the key/value cache holds"):
                engine.embed([IDS[:300]])
            assert all_free(engine)
            stats = engine.stats()
            assert stats.finished == {"stop": 8, "length": 3}
            assert stats.prompt_tokens == 8 * 150 + 3 * 9


@pytest.mark.parametrize("partition", PARTITIONS)
def test_texts_of_an_encoder(partition):
    ids = np.load(BERT / "golden.npz")["ids"].tolist()
    texts = [ids[i:] for i in range(5)]
    types = [[k % 2 for k in range(len(text))] for text in texts]
    options = {"threads": 1, "partition": partition}
    with nbflow.load(BERT, **options) as model:
        expected = [model.hidden(t, y).mean(axis=0) for t, y in zip(texts, types, strict=True)]
        plain = model.embed(texts[0], normalize=False)
    # some texts fill a step, or are longer than one; the cache holds two of them
    with nbflow.load(BERT, max_step_tokens=len(ids) - 2, **options) as model:
        kv_bytes = pages(model, 2 * -(-len(ids) // 64))
        with nbflow.LLMEngine(model, kv_bytes=kv_bytes) as engine:
            found = engine.embed(texts, types, normalize=False)
            np.testing.assert_array_equal(found, expected)
            np.testing.assert_array_equal(engine.embed(texts[:1], normalize=False)[0], plain)
            assert all_free(engine)
    assert np.abs(plain - expected[0]).max() > 1e-3


def test_no_logits_of_texts_are_computed(checkpoint):
    rows = Counter()
    with nbflow.load(checkpoint, threads=1, max_step_tokens=64) as model:
        executor = model.workers[0].executor
        executor.observe = lambda op, inputs: rows.update({op.out: sum(map(len, inputs))})
        model.embed_batch(texts_of(2, 150))
        model.hidden(IDS[:150])
        with nbflow.LLMEngine(model, kv_bytes=pages(model, 16)) as engine:
            engine.embed(texts_of(2, 150), pooling="last")
        assert rows["q_k_v"] >= 2 * 5 * 150  # of two layers
        assert rows["logits"] == 0


def test_streams_go_on_between_the_pieces_of_many_texts(checkpoint, monkeypatch):
    with nbflow.load(checkpoint, threads=1, max_step_tokens=64) as model:
        sizes, came = [], []
        begun, go_on = threading.Event(), threading.Event()
        run = model.workers[0].executor.run

        def record(step):
            sizes.append(step.size)
            run(step)

        def listen(_, events):
            came.extend("token" for event in events if event.token is not None)
            begun.set()
            go_on.wait(60)

        monkeypatch.setattr(model.workers[0].executor, "run", record)
        with nbflow.LLMEngine(model, kv_bytes=pages(model, 32)) as engine:
            stream = engine.submit(stream_of(model, 0, 100), listen)
            assert begun.wait(60)
            sizes.clear()
            texts = model.embedding_requests(texts_of(6, 200))
            handles = [engine.submit(t, lambda *_: came.append("vector")) for t in texts]
            go_on.set()
            for handle in (*handles, stream):
                handle.wait(60)
    # 1200 tokens of texts, and one of the stream in every step
    assert sizes[:19] == [(64, 64, 1)] * 18 + [(64, 64, 1)]
    assert came.index("vector") > 3
    assert came[came.index("vector") :].count("token") > 12


def test_a_text_that_loses_its_pages_is_read_again(checkpoint, monkeypatch):
    text = IDS[:200]
    with nbflow.load(checkpoint, threads=1, max_step_tokens=64) as model:
        expected = model.embed(text)
        with nbflow.LLMEngine(model, max_sequences=4, kv_bytes=pages(model, 4)) as engine:
            run, first = model.workers[0].executor.run, []

            def submit_then_run(step):
                if not first and step.positions[0] == 64:  # the second piece of the text
                    first.append(engine.submit(stream_of(model, 0, priority=-1)))
                run(step)

            monkeypatch.setattr(model.workers[0].executor, "run", submit_then_run)
            (request,) = model.embedding_requests([text])
            engine.submit(request).wait(60)
            np.testing.assert_array_equal(request.vector, expected)
            assert request.n_preempted == 1
            assert len(first[0].result(60).ids) == 60


def test_the_last_hidden_state_takes_a_beginning_that_is_known(checkpoint):
    with nbflow.load(checkpoint, threads=1, max_step_tokens=64) as model:
        expected = model.embed(IDS[:150], pooling="last")
        with nbflow.LLMEngine(model, kv_bytes=pages(model, 16)) as engine:
            for known in (0, 149):
                (request,) = model.embedding_requests([IDS[:150]], pooling="last")
                engine.submit(request).wait(60)
                np.testing.assert_array_equal(request.vector, expected)
                assert request.cached_tokens == known
            (request,) = model.embedding_requests([IDS[:150]])
            engine.submit(request).wait(60)
            assert request.cached_tokens == 0  # all hidden states are wanted
            np.testing.assert_array_equal(request.vector, model_mean(checkpoint))


def model_mean(checkpoint):
    with nbflow.load(checkpoint, threads=1) as model:
        return model.embed(IDS[:150])


def test_texts_that_end_early(checkpoint, monkeypatch):
    with nbflow.load(checkpoint, threads=1, max_step_tokens=64) as model:
        engine = nbflow.LLMEngine(model, max_sequences=2, max_waiting=2, kv_bytes=pages(model, 8))
        with engine:
            cancelled, late = model.embedding_requests(texts_of(2, 400))
            late.deadline = 0.0
            run = model.workers[0].executor.run

            def cancel_then_run(step):
                handles[0].cancel()
                run(step)

            with monkeypatch.context() as patch:
                patch.setattr(model.workers[0].executor, "run", cancel_then_run)
                handles = [engine.submit(cancelled), engine.submit(late)]
                for handle in handles:
                    handle.wait(60)
            assert [h.finish_reason for h in handles] == ["abort", "deadline"]
            assert cancelled.vector is None
            assert late.vector is None
            assert all_free(engine)
            # more texts than may wait; those of others are in the way
            assert len(engine.embed(texts_of(12, 70))) == 12
            hold = threading.Event()
            blocked = engine.submit(stream_of(model, 0, 2), lambda *_: hold.wait(60))
            begun = threading.Event()
            blocked_too = [engine.submit(stream_of(model, 0, 2), lambda *_: begun.set())]
            try:
                for i in range(4):
                    blocked_too.append(engine.submit(stream_of(model, i, 2)))
            except QueueFull:
                with pytest.raises(QueueFull):
                    engine.embed(texts_of(1, 70))
            finally:
                hold.set()
            for handle in (blocked, *blocked_too):
                handle.wait(60)
        with pytest.raises(EngineClosed):
            engine.embed(texts_of(1, 70))


def test_offline_texts_leave_streams_and_sessions_alone(checkpoint):
    with nbflow.load(checkpoint, threads=1, max_step_tokens=64) as model:
        expected = model.generate(IDS[:9], 12, ignore_eos=True).ids
        vector = model.embed(IDS[:150])
        stream = model.stream(IDS[:9], 12, ignore_eos=True)
        found = [next(stream)]
        with model.session() as session:
            sequence = session.begin()
            before = session.run({sequence: IDS[:9]}, last=True)[sequence].logits
            np.testing.assert_array_equal(model.embed(IDS[:150]), vector)
            session.truncate(sequence, 8)
            again = session.run({sequence: IDS[8:9]}, last=True)[sequence].logits
            np.testing.assert_array_equal(before, again)
        assert found + list(stream) == expected
