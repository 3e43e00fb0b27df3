"""The parts of an outbox that need no server: rings and their records, statements, what is refused at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams import AsyncOutbox, Outbox, Record, RelayConfig
from streams.core.outbox import RING, Ring, RowId, SentBatch, decode_batch, encode_batch, record_key
from streams.errors import ConfigError, DecodeError, OffsetError, OutboxError
from streams.outbox.postgres import refuse_shared_sessions
from streams.outbox.schema import schema_sql, stash_function

IDS = st.integers(1, 2**63 - 1)
TAGS = st.integers(-(2**31), 2**31 - 1)


def batch(serial: int, *rows: tuple[int, int]) -> SentBatch:
    return SentBatch(serial, tuple(RowId(*row) for row in rows))


def ring_of(first: int, last: int) -> Ring:
    return Ring(batch(serial, (serial * 10, serial)) for serial in range(first, last + 1))


@given(serial=IDS, rows=st.lists(st.tuples(IDS, TAGS), max_size=30))
def test_a_batch_is_read_as_it_was_written(serial: int, rows: list[tuple[int, int]]) -> None:
    found = decode_batch("me", encode_batch("me", batch(serial, *rows)))
    assert (found.serial, sorted(found.rows)) == (serial, sorted(RowId(*row) for row in rows))


def test_a_batch_of_two_thousand_rows_is_small() -> None:
    value = encode_batch("me", batch(1, *((10_000_000 + 7 * row, 2**31 - 1 - row) for row in range(2_000))))
    assert len(value) < 13_000


@given(value=st.none() | st.binary(max_size=60))
def test_foreign_bytes_are_refused(value: bytes | None) -> None:
    with pytest.raises(DecodeError):
        decode_batch("me", value)


def test_a_record_that_is_cut_off_newer_or_of_another_outbox_is_refused() -> None:
    value = encode_batch("me", batch(3, (1, 2), (5, 6)))
    for end in range(len(value)):
        with pytest.raises(DecodeError):
            decode_batch("me", value[:end])
    with pytest.raises(OffsetError, match="of the outbox me, and this is other"):
        decode_batch("other", value)
    fields = msgspec.msgpack.decode(value)
    with pytest.raises(DecodeError, match="update this program"):
        decode_batch("me", msgspec.msgpack.encode([2, *fields[1:]]))
    with pytest.raises(DecodeError, match="without a tag"):
        decode_batch("me", msgspec.msgpack.encode([*fields[:4], [1]]))


def test_a_ring_names_the_last_batches() -> None:
    ring = ring_of(1, RING + 5)
    assert ring.serial == RING + 5
    assert sorted(ring.rows)[0] == RowId(60, 6)
    assert len(ring.rows) == RING
    assert ring.is_whole
    ring.add(batch(3, (30, 3)))  # one that compaction has left
    assert RowId(30, 3) not in ring.rows
    assert record_key(RING + 3) == record_key(3)


@pytest.mark.parametrize("noted", [0, 1, 5])
def test_a_database_that_is_behind_by_less_than_a_ring_is_taken(noted: int) -> None:
    ring_of(1, 5).check_against(noted, "x.outbox[0]")


def test_a_database_or_a_topic_that_was_set_back_is_refused() -> None:
    ring_of(1, RING).check_against(0, "x.outbox[0]")
    with pytest.raises(OffsetError, match=r"x.outbox\[0\] ends with batch 65, .* batch 0: the database was set back"):
        ring_of(2, RING + 1).check_against(0, "x.outbox[0]")
    with pytest.raises(OffsetError, match=r"batch 5, .* batch 6: the topic was deleted"):
        ring_of(1, 5).check_against(6, "x.outbox[0]")
    with pytest.raises(OffsetError, match="does not have all of the last 64 batches up to 70"):
        ring_of(10, 70).check_against(70, "x.outbox[0]")


def test_a_ring_knows_which_batches_it_lacks() -> None:
    assert ring_of(1, 3).missing(3) == Ring().missing(0) == []
    assert ring_of(1, 3).missing(5) == [4, 5]
    assert Ring().missing(RING + 2) == list(range(3, RING + 3))
    assert ring_of(10, 70).missing(71) == [8, 9, 71]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (Record("a b", b""), "no topic's name"),
        (Record("x" * 250, b""), "no topic's name"),
        (Record("..", b""), "no topic's name"),
        (Record("t\n", b""), "no topic's name"),
        (Record("t", b"x" * 1_000_000), "max_record_bytes is 1,000,000"),
        (Record("t", b"", headers=[("h", b"x" * 1_000_000)]), "max_record_bytes is 1,000,000"),
        (Record("t", bytes(2**30)), "has 1,073,741,8.. bytes; max_record_bytes is 1,000,000"),
        (Record("t", b"", key=bytes(1_000_000)), "max_record_bytes is 1,000,000"),
        (Record("t", b"", headers=[("\ud800", b"")]), "is named .* no text"),
        (Record("\ud800", b""), "no topic's name"),
        (Record("t", b"", partition=2**31), "partition for t is 2147483648"),
        (Record("t", b"", partition=-1), "partition for t is -1"),
        (Record("t", b"", headers=[("a\0", b"")]), "without zero bytes|has no zero bytes"),
        (Record("t", "text"), "value for t is a str"),  # type: ignore[arg-type]
        (Record("t", b"", key="text"), "key for t is a str"),  # type: ignore[arg-type]
        (Record("t", b"", headers=[("a", "text")]), "header a for t is a str"),  # type: ignore[list-item]
    ],
)
def test_what_kafka_refuses_is_refused_at_once(record: Record, reason: str) -> None:
    for outbox in (Outbox(), AsyncOutbox()):
        with pytest.raises(OutboxError, match=reason):
            outbox.statement([record])


def test_a_statement_has_the_places_of_its_style() -> None:
    records = [Record("t", b"v", b"k", [("a", b"1"), ("a", None)], 2), Record("u", None)]
    text, arguments = Outbox().statement(records)
    assert text.count("CAST(%s AS ") == 8
    assert arguments == [["t", "u"], [b"k", None], [b"v", None], [2, None], [2, 0], ["a", "a"], [b"1", None], True]
    assert "$1" in Outbox().statement(records, "asyncpg")[0]
    assert "$8" in Outbox().statement(records, "asyncpg")[0]
    named = Outbox("orders_outbox").statement(records, "sqlalchemy", ordered=False)
    assert named[0].startswith("SELECT orders_stash_rows(CAST(:topics AS text[])")
    assert named[1]["ordered"] is False
    with pytest.raises(ConfigError, match="no style 'django'"):
        Outbox().statement(records, "django")  # type: ignore[call-overload]


def test_stashing_on_something_else_says_what_to_do() -> None:
    class Other:
        def __enter__(self) -> None: ...

        def execute(self, query: object, params: object = None, /) -> None: ...

    with pytest.raises(OutboxError, match="Other is no connection of psycopg, SQLAlchemy or sqlite3: run"):
        Outbox().stash_many(Other(), [Record("t", b"")])


@pytest.mark.parametrize("table", ["", "Kes", "a b", 'x"; DROP TABLE y; --', "x" * 41, "1a"])
def test_tables_that_need_quotes_are_refused(table: str) -> None:
    for use in (stash_function, schema_sql, Outbox):
        with pytest.raises(ConfigError, match="the table of an outbox is"):
            use(table)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "a b"}, "the name of a relay is 'a b'"),
        ({"database": ""}, "KES_OUTBOX_DATABASE"),
        ({"bootstrap_servers": ""}, "KES_BOOTSTRAP_SERVERS"),
        ({"batch_rows": 0}, "batch_rows is 0"),
        ({"backoff_seconds": 20.0, "max_backoff_seconds": 10.0}, "backoff_seconds"),
    ],
)
def test_settings_of_a_relay_are_checked(
    changes: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KES_BOOTSTRAP_SERVERS", raising=False)
    good: dict[str, object] = {"name": "bank", "database": "postgresql://me:secret@x/y", "bootstrap_servers": "x:1"}
    assert "secret" not in repr(RelayConfig(**good))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=reason):
        RelayConfig(**good | changes)  # type: ignore[arg-type]


class Session:
    """A connection, ``pid`` of the server's process behind it, ``said`` to the client at its start."""

    def __init__(self, pid: int, said: int) -> None:
        self.pid, self.info, self.is_closed = pid, SimpleNamespace(backend_pid=said), False

    def execute(self, text: str) -> Any:
        assert text == "SELECT pg_backend_pid()"
        return SimpleNamespace(fetchone=lambda: (self.pid,))

    def close(self) -> None:
        self.is_closed = True


def test_a_pooler_that_shares_sessions_is_refused_by_name() -> None:
    shared = Session(pid=70, said=2)
    with pytest.raises(OutboxError, match="a pooler in transaction mode is between relay and database"):
        refuse_shared_sessions(Session(pid=70, said=1), lambda: shared)
    assert shared.is_closed
    own = Session(pid=71, said=2)
    refuse_shared_sessions(Session(pid=70, said=1), lambda: own)  # a pool in session mode
    assert own.is_closed
    refuse_shared_sessions(Session(pid=70, said=1), no_second_session)  # a pool in session mode that is used up
    refuse_shared_sessions(Session(pid=70, said=70), lambda: pytest.fail("none is in between"))


def no_second_session() -> Session:
    raise psycopg.OperationalError("no more connections allowed")
