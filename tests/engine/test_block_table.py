"""Block table against a naive model: random operations, all invariants after each."""

from __future__ import annotations

import random

import numpy as np
import pytest

from nbflow.kv_cache import BlockTable, KVStorage
from nbflow.kv_cache.block_table import NoFreePageError
from nbflow.spec.layer_specs import HeadShape

PAGE = 4


class Checked:
    """Block table, simulated page contents, and the expected contents of each sequence.

    The memory holds the tokens themselves: a page that was given to two writers, copied too late,
    or found under a wrong name shows as a wrong token.
    """

    def __init__(self, seed: int, max_pages: int | None) -> None:
        self.rng = random.Random(seed)
        self.table = BlockTable(PAGE, max_pages)
        self.memory: list[list[int]] = []
        self.texts: dict[int, list[int]] = {}
        self.shared: set[int] = set()  # sequences with names
        self.next = 0
        self.n_refused = 0
        self.in_part = 0  # how often a part of a page was found

    def add(self) -> None:
        ids = self.rng.choices((0, 1), (9, 1), k=self.rng.randrange(1, 20))
        named = self.rng.random() < 0.8
        chain = self.table.chain(ids) if named else None
        needed, available = self.table.n_new_pages(chain, len(ids)), self.table.n_available
        found = self.table.add(self.next, chain, len(ids))
        assert found < len(ids)
        self.in_part += found % PAGE > 0
        self.texts[self.next] = ids[:found]
        self.shared |= {self.next} if named else set()
        self.next += 1
        if needed > available:
            self.drop(self.next - 1)
        else:  # what was promised is there
            self.write(self.next - 1, ids[found:])
            assert self.table.n_available == available - needed

    def write(self, sequence: int, tokens: list[int]) -> None:
        text, before = self.texts[sequence], self.table.length(sequence)
        missing, available = (
            self.table.n_missing_pages(sequence, len(tokens)),
            self.table.n_available,
        )
        try:
            self.table.extend(sequence, len(tokens))
        except NoFreePageError:
            assert missing > available
            assert self.table.n_available == available
            assert self.table.length(sequence) == before
            self.n_refused += 1
            return
        assert self.table.n_available == available - missing
        self.memory += [[-1] * PAGE for _ in range(self.table.n_pages - len(self.memory))]
        for source, target in self.table.take_copies():
            self.memory[target] = list(self.memory[source])
        pages = self.table.view([sequence]).kv_indices
        for i, token in enumerate(tokens, before):
            self.memory[pages[i // PAGE]][i % PAGE] = token
        text += tokens
        if self.rng.random() < 0.9:  # else the step has failed
            self.table.commit(sequence, text)

    def drop(self, sequence: int) -> None:
        kept = self.texts.pop(sequence) if self.rng.random() < 0.7 else ()
        self.texts.pop(sequence, None)
        self.table.drop(sequence, kept)

    def step(self) -> None:
        sequence = self.rng.choice(list(self.texts)) if self.texts else None
        kind = self.rng.random()
        if sequence is None or (kind < 0.15 and len(self.texts) < 8):
            self.add()
        elif kind < 0.3:
            self.drop(sequence)
        elif kind < 0.4 and len(self.texts) < 8:
            self.table.fork(sequence, self.next)
            self.texts[self.next] = list(self.texts[sequence])
            self.next += 1
        elif kind < 0.55:
            length = self.rng.randrange(len(self.texts[sequence]) + 1)
            self.table.truncate(sequence, length)
            del self.texts[sequence][length:]
        elif kind < 0.552:
            self.table.clear_cache()
        else:
            self.write(sequence, self.rng.choices((0, 1), (9, 1), k=self.rng.randrange(1, 7)))

    def check(self) -> None:
        """Check the counters and the contents of one sequence."""
        table = self.table
        assert table.n_used_pages + table.n_cached <= table.n_pages <= table.max_pages
        assert table.n_available == table.max_pages - table.n_used_pages
        if self.texts:
            self.read(self.rng.choice(list(self.texts)))

    def read(self, sequence: int) -> list[int]:
        """Check the contents of a sequence and return its pages."""
        text, view = self.texts[sequence], self.table.view([sequence])
        assert view.kv_lens.tolist() == [len(text)]
        pages = view.kv_indices.tolist()
        cells = [token for page in pages for token in self.memory[page]]
        assert cells[: len(text)] == text
        return pages

    def check_all(self) -> None:
        """Check the contents of all sequences, and that every page is in one state."""
        table, held = self.table, set()
        assert sorted(table.sequences) == sorted(self.texts)
        for sequence in self.texts:
            pages = self.read(sequence)
            assert len(set(pages)) == len(pages)
            held.update(pages)
        assert len(held) == table.n_used_pages
        assert not held & set(table._free)
        assert not held & set(table._cached)
        assert len(table._free) + table.n_cached + table.n_used_pages == table.n_pages


@pytest.mark.parametrize(("seed", "max_pages"), [(1, 12), (2, 24), (3, 24), (4, None)])
def test_random_operations(seed, max_pages):
    checked = Checked(seed, max_pages)
    for i in range(25_000):
        checked.step()
        checked.check()
        if i % 20 == 0:
            checked.check_all()
    table = checked.table
    assert table.hit_tokens > 1000
    assert checked.in_part > 100
    assert (checked.n_refused > 100) == (max_pages is not None)
    for sequence in list(checked.texts):
        checked.drop(sequence)
    assert table.n_used_pages == 0
    assert table._in_flight == {}
    table.clear_cache()
    assert sorted(table._free) == list(range(table.n_pages))


def test_two_sequences_that_begin_alike_share_pages():
    table = BlockTable(PAGE, max_pages=8)
    ids = list(range(10))
    table.add(0, table.chain(ids), len(ids))
    table.extend(0, 10)
    assert table.find(table.chain(ids), 10) == (0, True)  # being computed right now
    table.commit(0, ids)
    assert table.find(table.chain(ids), 10) == (8, False)
    assert table.add(1, table.chain(ids), 10) == 8
    assert table.n_used_pages == 3
    assert table.add(2, table.chain(ids[:8]), 8) == 7  # the last token is computed always
    assert table.add(3, table.chain(ids, b"salt"), 10) == 0
    table.extend(2, 1)  # in a page of its own
    assert len(table.take_copies()) == 1
    table.drop(0)
    table.drop(1)
    assert table.n_cached == 1
    assert table.add(4, table.chain(ids), 10) == 8
    assert table.asked_tokens == 10 + 10 + 8 + 10 + 10


def test_cached_pages_go_when_there_are_no_others_the_oldest_first():
    table = BlockTable(PAGE, max_pages=4)
    texts = [[i] * PAGE + [0] for i in range(3)]
    for i, ids in enumerate(texts[:2]):
        table.add(i, table.chain(ids), 5)
        table.extend(i, 5)
        table.commit(i, ids)
        table.drop(i)
    assert table.add(9, table.chain(texts[0]), 5) == 4  # used again: now the youngest
    table.drop(9)
    table.add(3)
    table.extend(3, 3 * PAGE)
    assert table.find(table.chain(texts[0]), 5) == (4, False)
    assert table.find(table.chain(texts[1]), 5) == (0, False)
    with pytest.raises(NoFreePageError):
        table.extend(3, 2 * PAGE)
    table.extend(3, PAGE)
    assert table.find(table.chain(texts[0]), 5) == (0, False)


def test_what_was_cut_off_is_no_longer_found():
    table = BlockTable(PAGE, max_pages=4)
    table.add(0, table.chain([1] * 9), 9)
    table.extend(0, 9)
    table.commit(0, [1] * 9)
    table.truncate(0, 6)
    assert table.find(table.chain([1] * 9), 9)[0] == 8  # the page still holds them
    table.extend(0, 1)
    assert table.find(table.chain([1] * 9), 9)[0] == 8  # it was copied, as there is room
    assert len(table.take_copies()) == 1
    table.extend(0, 2)
    table.commit(0, [1] * 6 + [2] * 3)
    assert table.find(table.chain([1] * 6 + [2] * 3), 9)[0] == 8


def test_what_was_cut_off_goes_when_there_is_no_page_for_a_copy():
    table = BlockTable(PAGE, max_pages=3)
    table.add(0, table.chain([1] * 9), 9)
    table.extend(0, 9)
    table.commit(0, [1] * 9)
    table.truncate(0, 6)
    table.add(1)
    table.extend(1, 1)
    table.extend(0, 1)
    assert table.take_copies() == []
    assert table.find(table.chain([1] * 9), 9)[0] == 4  # the page holds something else now


def test_of_a_page_that_goes_on_otherwise_the_tokens_that_are_alike_are_taken():
    table = BlockTable(PAGE)
    first, second = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 9, 9, 9]
    table.add(0, table.chain(first), 8)
    table.extend(0, 8)
    table.commit(0, first)
    table.drop(0)
    assert table.add(1, table.chain(second), 9) == 6
    page = table.view([1]).kv_indices[1]
    table.extend(1, 3)
    (copy,) = table.take_copies()
    assert copy == (page, table.view([1]).kv_indices[1])
    assert table.find(table.chain([*first, 0]), 9)[0] == 8  # still there


def test_the_last_page_of_a_sequence_is_kept_though_it_is_not_full():
    table = BlockTable(PAGE)
    told = [1, 2, 3, 4, 5, 6]
    table.add(0, table.chain(told[:3]), 3)
    table.extend(0, 6)
    table.commit(0, told)
    table.drop(0, told)
    assert table.n_cached == 2
    assert table.add(1, table.chain([*told, 7, 8, 9]), 9) == 6
    table.extend(1, 3)
    assert table.take_copies() == []  # it goes on where the other one ended
    assert table.n_cached == 0
    table.drop(1)  # without its tokens: what has not been entered is not kept
    assert table.n_cached == 1


def test_pages_are_copied():
    storage = KVStorage([0, 3], 4, HeadShape(2, 8, 8), "f16")
    storage.ensure(3)
    storage.layers[3][1][1] = 7
    storage.copy_pages([(1, 2), (0, 1)])
    assert (storage.layers[3][1][2] == 7).all()
    assert (storage.layers[3][1][1] == 0).all()
    assert storage.page_bytes * 3 == storage.n_bytes
    version = storage.version
    storage.release()
    assert storage.n_bytes == 0
    assert storage.version > version


def test_views_of_no_sequence_and_of_several():
    table = BlockTable(PAGE)
    assert table.view([]).kv_indptr.tolist() == [0]
    for sequence in (5, 6):
        table.add(sequence)
        table.extend(sequence, sequence)
    view = table.view([6, 5])
    np.testing.assert_array_equal(view.kv_indptr, [0, 2, 4])
    np.testing.assert_array_equal(view.kv_last_page_len, [2, 1])
    assert len(set(view.kv_indices.tolist())) == 4
