"""State of other programs that comes along with their offsets: formats, one cut, and what is refused by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from streams import EventSource, Table
from streams.errors import DecodeError
from streams.records import Headers, IncomingRecord
from streams.runtime.changelog import BEGIN_KEY, OFFSET_KEY, decode_begin
from streams.stores.foreign import FORMATS, ForeignRow
from tests.unit.cli_kit import FakeCluster, Kes, admin, source_of, spec
from tests.unit.start_kit import OLD, World, start, world
from tests.unit.start_kit import admin as cluster
from tests.vocabulary import INTS

__all__ = ["admin", "cluster", "start", "world"]  # the fixtures

KEYS = ("bob", "carol"), ("alice", "frank")  # by partition, as murmur2 places them
STATE = "old-accounts-changelog"
OF_QUIX: Headers = [("__column_family__", b"default"), ("__processed_tp_offsets__", b'{"flights":5}')]


def number(value: int, length: int = 8) -> bytes:
    return value.to_bytes(length, "big")


def record(
    key: bytes | None, value: bytes | None, headers: Headers | None = None, partition: int = 0, topic: str = STATE
) -> IncomingRecord:
    return IncomingRecord(topic, partition, 0, key, value, headers, 77)


@pytest.mark.parametrize(
    ("name", "found", "key", "value", "start_ms", "end_ms"),
    [
        ("kafka-streams", record(b"k", b"v"), b"k", b"v", None, None),
        ("kafka-streams-window", record(b"k" + number(60) + number(0, 4), b"v"), b"k", b"v", 60, None),
        ("kafka-streams-session", record(b"k" + number(90) + number(60), b"v"), b"k", b"v", 60, 90),
        ("faust", record(b'"k"', b"1"), b'"k"', b"1", None, None),
        ("quixstreams", record(b'"k"|"n"', b"1", OF_QUIX), b'"k"|"n"', b"1", None, None),
        ("quixstreams", record(b"k", number(9) + b"1", [*OF_QUIX, ("__ttl_stamped__", b"1")]), b"k", b"1", None, 9),
        ("quixstreams", record(b"k", b"\xff" * 8, [*OF_QUIX, ("__ttl_stamped__", b"1")]), b"k", b"", None, None),
        ("raw", record(b"k", b"v"), b"k", b"v", None, None),
    ],
)
def test_a_row_is_what_was_stored_without_what_the_toolkit_put_around_it(
    name: str, found: IncomingRecord, key: bytes, value: bytes, start_ms: int | None, end_ms: int | None
) -> None:
    row = FORMATS[name].row(found)
    assert row is not None
    assert (row.key, row.value, row.start_ms, row.end_ms, row.timestamp_ms) == (key, value, start_ms, end_ms, 77)


@pytest.mark.parametrize(
    ("name", "found", "said"),
    [
        ("kafka-streams", record(b"k", b"v", topic="x-KTABLE-SUPPRESS-STATE-STORE-0000000001-changelog"), "suppress"),
        ("kafka-streams", record(b"k", b"v", topic="x-KSTREAM-JOINTHIS-0000000004-store-changelog"), "a join"),
        ("kafka-streams-window", record(b"short", b"v"), "end with a window"),
        ("kafka-streams-window", record(b"k" + number(60) + number(1, 4), b"v"), "end with a window"),
        ("kafka-streams-session", record(b"k" + number(60) + number(90), b"v"), "end with a session"),
        ("faust", record(b'"k"', b"\x80\x05K\x01."), "it is a pickle"),
        ("quixstreams", record(b"k", b"1"), "of the family None"),
        ("quixstreams", record(b"k", b"1", [("__column_family__", b"__values__")]), "of a windowed store"),
        ("quixstreams", record(b"k", b"1", [*OF_QUIX, ("__ttl_stamped__", b"1")]), "there are less"),
    ],
)
def test_what_is_no_row_of_the_format_is_refused(name: str, found: IncomingRecord, said: str) -> None:
    with pytest.raises(DecodeError, match=said):
        FORMATS[name].row(found)


def test_notes_of_quixstreams_are_no_rows() -> None:
    assert FORMATS["quixstreams"].row(record(b"done", b"2", [("__column_family__", b"__ttl_system__")])) is None


@pytest.mark.parametrize(
    ("name", "key", "found"),
    [
        ("kafka-streams", b'"a|b"', b'"a|b"'),
        ("faust", b'"k"', b"k"),
        ("faust", b'["k",[0.0,60.0]]', b"k"),
        ("faust", b"raw", b"raw"),
        ("faust", b"7", None),
        ("quixstreams", b'"k"|"n"', b"k"),
        ("quixstreams", b"k|7", b"k"),
    ],
)
def test_the_key_of_the_events_is_known_where_the_row_tells_it(name: str, key: bytes, found: bytes | None) -> None:
    assert FORMATS[name].record_key(key) == found


# -- the command -------------------------------------------------------------------------------------------------------


def take(store: Table[str, int], row: ForeignRow) -> None:
    """As a user writes it, for Long of Kafka Streams."""
    store.put(row.key.decode(), int.from_bytes(row.value, "big"))


@pytest.fixture
def adopt(world: World, start: Kes, admin: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The command, over a changelog with two rows in each partition, one of them written twice, and a deletion."""
    source = EventSource(
        source_of(num_partitions=2, bootstrap_servers="there:1").config, Table.factory(key=str, value=int)
    )
    monkeypatch.setattr(sys.modules["fleet"], "source", source)
    monkeypatch.setattr(sys.modules["fleet"], "take", take, raising=False)
    world.logs = {"flights": (2, 10)}
    world.offsets = {(OLD, "flights"): {0: 6, 1: 3}}
    rows(world, *[(key, number(7)) for key in KEYS[0]], ("gone", number(1)), ("gone", None), (KEYS[0][0], number(8)))
    rows(world, *[(key, number(9)) for key in KEYS[1]], partition=1)
    admin.there[STATE] = spec(STATE, 2)

    def call(*words: str, state: str = f"kafka-streams:{STATE}", code: int = 0, yes: bool = True) -> Any:
        words = ("--from-group", OLD, "--state", state, "--rows", "fleet:take", *words)
        return start(*words, *(["--yes"] if yes else []), "--json", code=code)

    return call


def rows(world: World, *found: tuple[str | bytes, bytes | None], partition: int = 0, headers: Any = None) -> None:
    """Make them what the other program has written into this partition."""
    kept = [each for each in world.foreign.get(STATE, []) if each.partition != partition]
    texts = [(key.encode() if isinstance(key, str) else key, value) for key, value in found]
    made = [IncomingRecord(STATE, partition, at, key, value, headers) for at, (key, value) in enumerate(texts)]
    world.foreign[STATE] = kept + made


def entries(world: World) -> dict[int, dict[bytes, int]]:
    found: dict[int, dict[bytes, int]] = {0: {}, 1: {}}
    for each in world.written:
        if each.key not in (BEGIN_KEY, OFFSET_KEY):
            found[each.partition][each.key or b""] = INTS.decode(each.value or b"")
    return found


WHOLE = {0: {b"bob": 8, b"carol": 7}, 1: {b"alice": 9, b"frank": 9}}


def test_rows_come_along_in_the_transaction_of_the_offsets(world: World, adopt: Callable[..., Any]) -> None:
    answer = adopt().data
    assert entries(world) == WHOLE
    assert (answer["state"]["rows"], answer["state"]["exact"]) == ({"0": 2, "1": 2}, True)
    assert answer["state"]["samples"][0] == "bob: 8"
    assert world.steps[world.steps.index("hold flights of old") :] == [
        "hold flights of old",
        "hold flights",
        "look at demo",
        "look at demo",
        "look at old",
        "read the changelog",
        f"look at the end of {STATE}",
        "send",  # how it begins
        f"read {STATE}[0]",
        "send",
        f"read {STATE}[1]",
        "send",
        "look at old",
        "send",  # the positions
        "commit",
    ]
    for number in (0, 1):
        of_it = [each.key for each in world.written if each.partition == number]
        assert (of_it[0], of_it[-1]) == (BEGIN_KEY, OFFSET_KEY), "found at the front, and complete at the end"
    began = decode_begin(world.records(0, BEGIN_KEY)[0])
    assert (began.state, began.exact, began.group) == ((f"kafka-streams:{STATE}",), True, OLD)
    assert not adopt().data["written"], "repeating it is harmless"
    assert "has begun elsewhere" in adopt(state=f"raw:{STATE}", code=1).words


def test_a_dry_run_reads_and_checks_all_of_it(world: World, adopt: Callable[..., Any]) -> None:
    assert adopt("--dry-run").data["state"]["rows"] == {"0": 2, "1": 2}
    rows(world, ("frank", b"x" * 9), partition=1)
    assert f"{STATE}[1]@0, key b'frank': " in adopt("--dry-run", code=1).words
    assert world.written == []


@pytest.mark.parametrize(
    ("wrong", "words", "said"),
    [
        (lambda world: setattr(world, "exactly_once", False), [], "[0]: its end was not written in a transaction"),
        (lambda world: setattr(world, "trimmed", 2), [], f"{STATE}[0]: records below 2 were deleted"),
        (lambda world: None, ["--at", "1@5"], "flights[1] has rows, and begins at 1@5, not where the group stands"),
        (
            lambda world: world.offsets[OLD, "flights"].pop(1),
            ["--missing", "earliest"],
            "flights[1] has rows, and begins at earliest, not where the group stands",
        ),
    ],
)
def test_without_a_proof_of_one_cut_it_is_the_users_word(
    world: World, adopt: Callable[..., Any], wrong: Callable[[World], object], words: list[str], said: str
) -> None:
    wrong(world)
    assert said in adopt(*words, code=1).words
    assert world.written == []
    assert not adopt(*words, "--stopped-cleanly").data["state"]["exact"]
    began = decode_begin(world.records(0, BEGIN_KEY)[0])
    assert not began.exact
    assert began.shown.endswith("(on the word that it stopped cleanly)")


def test_a_changelog_of_another_group_needs_the_word(
    world: World, adopt: Callable[..., Any], admin: FakeCluster
) -> None:
    world.foreign["other-changelog"], admin.there["other-changelog"] = world.foreign[STATE], spec("o", 2)
    said = adopt(state="kafka-streams:other-changelog", code=1).words
    assert "other-changelog is not named as a changelog of old" in said


def test_windows_are_deleted_from_their_log_on_purpose(world: World, adopt: Callable[..., Any]) -> None:
    world.trimmed = 1
    for partition, keys in enumerate(KEYS):
        rows(world, *[(key.encode() + number(60) + number(0, 4), number(7)) for key in keys], partition=partition)
    assert adopt(state=f"kafka-streams-window:{STATE}").data["state"]["rows"] == {"0": 1, "1": 1}


@pytest.mark.parametrize(
    ("found", "state", "said"),
    [
        ([(b"\xff\xff", number(1))], "kafka-streams", f"{STATE}[0]@0, key b'\\xff\\xff': UnicodeDecodeError"),
        ([(b"bob", b"\x80\x05K\x01.")], "faust", f"{STATE}[0]@0: it is a pickle"),
        ([(None, b"1")], "raw", f"{STATE}[0]@0: it has no key"),
        ([("alice", number(1))], "kafka-streams", "@0: the key b'alice' belongs to partition 1 of 2 (murmur2)"),
        ([], "kafka-streams", f"{STATE} is empty: to begin with an empty state"),
    ],
)
def test_rows_that_cannot_be_taken_are_named_before_anything_is_written(
    world: World, adopt: Callable[..., Any], found: Any, state: str, said: str
) -> None:
    rows(world, *found)
    if not found:
        rows(world, partition=1)
    assert said in adopt(state=f"{state}:{STATE}", code=1).words
    assert world.written == []


def test_rows_may_stay_where_another_partitioner_has_put_them(world: World, adopt: Callable[..., Any]) -> None:
    rows(world, ("alice", number(1)))
    assert adopt("--keep-unplaced").data["state"]["rows"] == {"0": 1, "1": 2}


def test_a_row_behind_the_offsets_is_refused_whatever_is_said(world: World, adopt: Callable[..., Any]) -> None:
    """quixstreams names the record in each row."""
    rows(world, partition=1)
    for at, code in ((5, 0), (6, 1)):
        headers = [("__column_family__", b"default"), ("__processed_tp_offsets__", b'{"flights":%d}' % at)]
        rows(world, (b'"bob"', b"7"), headers=headers)
        answer = adopt("--stopped-cleanly", "--dry-run", "--keep-unplaced", state=f"quixstreams:{STATE}", code=code)
        if code:
            assert f"{STATE}[0]@0: it was written for flights[0]@6, and the group stands at 6" in answer.words


def test_deletions_only_are_an_empty_state(world: World, adopt: Callable[..., Any]) -> None:
    for partition in (0, 1):
        rows(world, ("gone", None), partition=partition)
    assert adopt().data["state"] == {
        "from": [f"kafka-streams:{STATE}"],
        "rows": {"0": 0, "1": 0},
        "exact": True,
        "samples": [],
    }


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("nothing", "cannot load --rows 'fleet:nothing'"),
        ("later", "is no plain function of a store and a row"),
        ("answering", f"{STATE}[0]@4: --rows returned int"),
        ("raising", f"{STATE}[0]@4, key b'bob': ValueError: no such thing"),
        ("reserved", "are reserved"),
        ("large", "bytes are more than a record may have"),
    ],
)
def test_functions_of_users_are_answered_for(
    world: World, adopt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, function: str, said: str
) -> None:
    async def later(store: Any, row: Any) -> None: ...

    def raising(store: Any, row: Any) -> None:
        raise ValueError("no such thing")

    found = {
        "later": later,
        "answering": lambda store, row: 1,
        "raising": raising,
        "reserved": lambda store, row: store.put(b"\xff\xffkes.offset", b"1"),
        "large": lambda store, row: store.put(row.key, b"x" * 2_000_000),
    }
    fleet = sys.modules["fleet"]
    if function in ("reserved", "large"):
        source = EventSource(fleet.source.config, Table.factory(key=bytes, value=bytes))
        monkeypatch.setattr(fleet, "source", source)
    if function in found:
        monkeypatch.setattr(fleet, "take", found[function])
    words = ["--rows", "fleet:nothing"] if function == "nothing" else []
    assert said in adopt(*words, code=1).words
    assert world.written == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from-group", OLD, "--state", f"raw:{STATE}"], "--state needs --rows"),
        (["--at", "earliest", "--state", f"raw:{STATE}"], "--state needs --from-group"),
        (["--from-group", OLD, "--rows", "fleet:take"], "need --state"),
        (["--from-group", OLD, "--state", "csv:x", "--rows", "fleet:take"], "formats are kafka-streams, "),
        (["--from-group", OLD, *["--state", f"raw:{STATE}"] * 2, "--rows", "fleet:take"], "is named twice"),
    ],
)
def test_wrong_usage_is_named(adopt: Callable[..., Any], start: Kes, words: list[str], said: str) -> None:
    assert said in start(*words, "--yes", code=2).words


def test_another_number_of_partitions_and_a_missing_topic_are_refused(
    adopt: Callable[..., Any], admin: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = admin.watermarks
    monkeypatch.setattr(
        admin, "watermarks", lambda topic, *_: {0: known(topic, [], 0)[0]} if topic == STATE else known(topic, [], 0)
    )
    assert f"{STATE} has 1 partitions, the source has 2" in adopt(code=1).words
    del admin.there[STATE]
    assert f"{STATE}" in adopt(code=1).words


@pytest.mark.parametrize("when", [f"look at the end of {STATE}", f"read {STATE}[1]", "send", "commit"])
def test_an_end_at_any_step_leaves_none_of_it(world: World, adopt: Callable[..., Any], when: str) -> None:
    def end() -> None:
        raise KeyboardInterrupt

    world.at[when] = end
    adopt(code=130)
    assert (world.written, world.sent, world.offsets[OLD, "flights"]) == ([], [], {0: 6, 1: 3})
    world.at.clear()
    adopt()
    assert entries(world) == WHOLE


def test_a_group_that_goes_on_while_the_rows_are_read_is_seen(world: World, adopt: Callable[..., Any]) -> None:
    world.at[f"read {STATE}[1]"] = lambda: world.offsets.update({(OLD, "flights"): {0: 7, 1: 3}})
    assert "group old has gone on in flights meanwhile" in adopt(code=1).words
    assert world.written == []
