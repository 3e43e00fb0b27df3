"""Ids that were handled, against a dict of their times; digests against pairs of scope and id."""

from __future__ import annotations

import os
import sys
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.core.seen import BYTES_PER_ID, DIGEST, LATEST_S, SeenTable, digest_of, due_of, encode, width_of
from tests.property.kit import seeded

IDS = st.sampled_from([bytes([number]) * DIGEST for number in range(12)])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), IDS, st.integers(0, 300), st.sampled_from([b"", b"", b"a", b"b" * 300])),
        st.tuples(st.just("new"), IDS, st.integers(0, 300), st.just(b"")),
        st.tuples(st.just("remove"), IDS, st.just(0), st.just(b"")),
        st.tuples(st.just("take"), st.integers(1, 5), st.integers(0, 400), st.just(b"")),
        st.tuples(st.just("oldest"), st.integers(1, 5), st.just(0), st.just(b"")),
    ),
    max_size=60,
)


@seeded
@given(STEPS, st.sampled_from([1, 7, 50]))
def test_a_table_is_a_dict_of_times(steps: list[tuple[str, object, int, bytes]], width: int) -> None:
    table, model = SeenTable(width), dict[bytes, tuple[int, bytes]]()
    for step, what, seconds, kept in steps:
        if step == "put":
            assert isinstance(what, bytes)
            table.put(what, encode(seconds, kept))
            model[what] = seconds, kept
        elif step == "new":
            new = [digest for digest in (what, b"n" * DIGEST, b"m" * DIGEST) if digest not in model]
            assert not any(map(table.has, new))
            table.put_new(new, encode(seconds))
            model |= dict.fromkeys(new, (seconds, b""))
        elif step == "remove":
            assert isinstance(what, bytes)
            table.remove(what)
            model.pop(what, None)
        else:
            assert isinstance(what, int)
            taken = table.take(what, seconds if step == "take" else None)
            buckets = {digest: due // width for digest, (due, _) in model.items()}
            over = {digest for digest, bucket in buckets.items() if (bucket + 1) * width <= seconds}
            allowed = over if step == "take" else set(buckets)
            assert len(taken) == min(what, len(allowed))
            assert set(taken) <= allowed
            assert len(set(taken)) == len(taken)
            left = [bucket for digest, bucket in buckets.items() if digest not in taken]
            assert all(buckets[digest] <= min(left, default=LATEST_S) for digest in taken), "the oldest first"
            for digest in taken:
                assert step == "oldest" or model[digest][0] <= seconds, "none goes before its time"
                del model[digest]
        assert len(table) == len(model)
        assert {one: table.find(one) for one in model} == {one: kept for one, (_, kept) in model.items()}
        assert table.kept_bytes == sum(len(kept) + 4 for _, kept in model.values() if kept)
        assert table.weight == len(model) + table.kept_bytes // BYTES_PER_ID
        if model:
            assert table.next_s is not None
            assert table.next_s <= (min(due for due, _ in model.values()) // width + 1) * width


GIVEN = st.one_of(st.text(min_size=1), st.binary(min_size=1), st.integers())
SCOPES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)


@seeded
@given(SCOPES, GIVEN, SCOPES, GIVEN)
def test_ids_have_one_digest_only_if_they_are_the_same(
    scope: str, one: object, other_scope: str, other: object
) -> None:
    def plain(id: object) -> object:
        return id.encode(errors="surrogatepass") if isinstance(id, str) else id

    assert isinstance(one, str | bytes | int)
    assert isinstance(other, str | bytes | int)
    same = scope == other_scope and plain(one) == plain(other) and isinstance(one, int) == isinstance(other, int)
    found = digest_of(scope, one)
    assert len(found) == DIGEST
    assert (found == digest_of(other_scope, other)) is same


def test_digests_are_those_of_the_changelogs_that_are_there() -> None:
    for id_, data in (("ä", b"s\0t\xc3\xa4"), (b"a", b"s\0ta"), (255, b"s\0nff"), (-1, b"s\0n-1")):
        assert digest_of("s", id_) == blake2b(data, digest_size=DIGEST).digest()  # type: ignore[arg-type]


@pytest.mark.parametrize("id_", ["", b"", True, 1.5, [1], object()])
def test_what_is_no_id_is_refused(id_: object) -> None:
    with pytest.raises(ValueError, match="the id is"):
        digest_of("s", id_)  # type: ignore[arg-type]


def test_times_beyond_what_a_record_holds() -> None:
    assert due_of(encode(-5)) == 0
    assert due_of(encode(1 << 40)) == LATEST_S
    with pytest.raises(ValueError, match="fewer than 4"):
        due_of(b"abc")
    assert [width_of(seconds) for seconds in (1, 63, 128, 6400)] == [1, 1, 2, 100]


def test_ids_of_one_time_go_a_few_at_a_time() -> None:
    table = SeenTable()
    for number in range(5):
        table.put(bytes([number]) * DIGEST, encode(7))
    assert [len(table.take(2, 8)) for _ in range(4)] == [2, 2, 1, 0]


def test_an_id_takes_about_a_hundred_bytes_in_memory() -> None:
    """Counted, not measured: the places that its dict and its list have, and the digest itself."""
    table, value = SeenTable(width_of(7 * 86_400)), encode(2_000_000_000)
    digests = [os.urandom(DIGEST) for _ in range(100_000)]
    for digest in digests:
        table.put(digest, value)
    held = sys.getsizeof(table._by_digest) + sum(map(sys.getsizeof, table._buckets.values()))
    assert held / len(digests) + 64 <= 130  # an object of 49 bytes takes 64
