"""``kes state import|migrate|repair|get --raw``: what they make of a state, without a broker."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from streams import EventSource, EventSourceConfig
from streams.cli import state, state_repair, state_writing
from streams.cli.skip import Position
from streams.core.jobs import COUNTER, PREFIX, JobRecord, JobState
from streams.core.parking import queue_name
from streams.core.timers import Timer
from streams.errors import OffsetError, StoreError
from streams.records import IncomingRecord
from streams.runtime.changelog import OffsetRecord, encode_timer, timer_key
from streams.stores import NamedTable, Stores
from tests.unit.cli_kit import Kes


class Order(msgspec.Struct):
    cents: int
    currency: str


class Shop(Stores):
    orders = NamedTable.of(str, Order, version=2, upcast={1: lambda old: old | {"currency": "EUR"}}, bare=True)


Changes = Callable[[int, dict[bytes, bytes]], dict[bytes, bytes | None]]


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[Changes]:
    """What the commands would make of a state."""
    found: list[Changes] = []
    vars(module := ModuleType("shop")).update(
        source=EventSource(EventSourceConfig(topic="in", group_id="g", num_partitions=1), store=Shop.factory())
    )
    monkeypatch.setitem(sys.modules, "shop", module)
    monkeypatch.setattr(state_writing, "write_changes", lambda _, __, changes, *___, **____: found.append(changes))
    return found


def line(**fields: Any) -> str:
    return json.dumps({"partition": 0, **fields}) + "\n"


def test_a_partition_without_any_state_is_imported_and_a_cut_file_is_refused(
    changes: list[Changes], kes: Kes, tmp_path: Path
) -> None:
    """An export has the offset -1 for a changelog without records."""
    (file := tmp_path / "in.jsonl").write_text(line(offset=-1))
    kes("state", "import", "shop:source", str(file), "--yes")
    assert changes[0](0, {b"o1": b"1"}) == {b"o1": None}
    file.write_text(line(key=base64.b64encode(b"o1").decode(), value=base64.b64encode(b"{}").decode()))
    refused = kes("state", "import", "shop:source", str(file), "--yes", code=1)
    assert "the line that ends partition 0 is missing: the file is cut off" in refused.words
    event = timer_key(queue_name(b"ada") + "/00000000")  # of a parked key whose queue is not in the file
    file.write_text(line(key=base64.b64encode(event).decode(), value="") + line(offset=7))
    refused = kes("state", "import", "shop:source", str(file), "--yes", code=1)
    assert "partition 0: the queue @park/" in refused.words
    assert len(changes) == 1


def exported(*timers: Timer) -> str:
    return "".join(
        line(key=base64.b64encode(timer_key(timer.name)).decode(), value=base64.b64encode(encode_timer(timer)).decode())
        for timer in timers
    )


def test_ids_of_durable_jobs_are_not_given_again(changes: list[Changes], kes: Kes, tmp_path: Path) -> None:
    """A receiver drops a call whose id it has seen: their number goes on from that of the file, or of the log."""
    counters = {number: Timer(COUNTER, 99, "kes.jobs", b'{"next":%d}' % number) for number in (3, 7)}
    encoded = {number: encode_timer(counter) for number, counter in counters.items()}
    (file := tmp_path / "in.jsonl").write_text(exported(counters[3]) + line(offset=9))
    kes("state", "import", "shop:source", str(file), "--yes")
    key = timer_key(COUNTER)
    assert changes[0](0, {key: encoded[7]}) == {}
    assert changes[0](0, {}) == {key: encoded[3]}
    file.write_text(exported(counters[7]) + line(offset=9))
    kes("state", "import", "shop:source", str(file), "--yes")
    assert changes[1](0, {key: encoded[3]}) == {key: encoded[7]}
    file.write_text(line(offset=9))  # of a time before the first job
    kes("state", "import", "shop:source", str(file), "--yes")
    assert changes[2](0, {key: encoded[7]}) == {}
    job = JobRecord.of(PREFIX + "n", 0, JobState("deliver", b"{}", 0, number=3, id="kes-0-0-3"), None)
    file.write_text(exported(counters[3], job) + line(offset=9))
    refused = kes("state", "import", "shop:source", str(file), "--yes", code=1)
    assert "has the number 3, and the next one is 3" in refused.words


def test_of_two_runs_at_a_time_the_second_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the last record is of a run before, at the same position."""
    log = [OffsetRecord(7, "kes state", 0, 0, "source", "changelog")]
    slot: Any = SimpleNamespace(
        commit=lambda: None,
        abort=lambda: None,
        send=lambda outputs: log.append(msgspec.json.decode(outputs[-1].value, type=OffsetRecord)),
    )
    checks: Any = SimpleNamespace(source_id=lambda: "source", changelog_id=lambda: "changelog", hold=lambda *_: None)
    monkeypatch.setattr(state_writing, "position_of", lambda *_: Position(7, 7, log[-1]))
    config = EventSourceConfig(topic="in", group_id="g", num_partitions=1)

    def run() -> state_writing.StoppedPartition:
        return state_writing.StoppedPartition(config, checks, slot, 0, 7)

    run().write(Position(7, 7, log[-1]), {b"a": b"1"})
    seen = Position(7, 7, log[-1])
    run().write(seen, {b"a": b"2"})
    with pytest.raises(OffsetError, match="run it again"):
        run().write(seen, {b"a": b"3"})
    assert len(log) == 3


# -- repair ------------------------------------------------------------------------------------------------------------

GOOD, BAD, OTHER = b'{"cents":1,"currency":"EUR"}', b'{"cents":true}', b'{"cents":2,"currency":"EUR"}'


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch, changes: list[Changes], tmp_path: Path) -> list[IncomingRecord]:
    """Records of the changelog that ``repair`` finds."""
    records: list[IncomingRecord] = []

    @contextmanager
    def opened(_: object, __: str, ___: float, wanted: list[int] | None, ____: str) -> Iterator[Any]:
        yield [0], lambda receive: receive(0, [one for one in records if wanted is None or one.partition in wanted])

    monkeypatch.setattr(state_repair, "opened", opened)
    monkeypatch.setattr(state_repair, "write_changes", state_writing.write_changes)
    monkeypatch.chdir(tmp_path)
    return records


def entry(offset: int, value: bytes | None, key: bytes = b"o1") -> IncomingRecord:
    return IncomingRecord("g.in.changelog", 0, offset, key, value, None)


@pytest.mark.parametrize(
    ("how", "history", "put"),
    [
        (["--delete"], [GOOD, BAD], None),
        (["--previous"], [OTHER, GOOD, BAD, BAD], GOOD),
        (["--previous"], [GOOD, None, BAD], GOOD),
        (["--with", "mended"], [BAD], OTHER),
    ],
)
def test_a_value_is_mended_and_what_it_was_is_kept(
    kes: Kes,
    changes: list[Changes],
    logged: list[IncomingRecord],
    how: list[str],
    history: list[bytes | None],
    put: bytes | None,
) -> None:
    Path("mended").write_bytes(OTHER)
    logged += [entry(at, value) for at, value in enumerate(history)]
    logged.append(entry(9, GOOD, b"o2"))
    answer = kes("state", "repair", "shop:source", '["orders","o1"]', *how, "--yes")
    there = {b"o1": BAD, b"o2": GOOD}
    assert changes[0](0, there) == {b"o1": put}
    assert Path(f"g.in.changelog-0-{len(history) - 1}.value").read_bytes() == BAD
    assert f"will be: {'removed' if put is None else put.decode()}" in answer.words
    with pytest.raises(StoreError, match="has changed in the meantime"):
        changes[0](0, {b"o1": GOOD})


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["--delete"], 1, "no such key: o3"),
        ([], 2, "choose one of --previous, --with FILE and --delete"),
        (["--delete", "--previous"], 2, "choose one of --previous, --with FILE and --delete"),
        (["--with", "nothing"], 1, "nothing: No such file or directory"),
        (["--with", "wrong"], 1, "wrong: partition 0, key"),
        (["--previous"], 1, "has no earlier value of"),
    ],
)
def test_a_repair_that_would_help_nobody_is_refused(
    kes: Kes, changes: list[Changes], logged: list[IncomingRecord], words: list[str], code: int, complaint: str
) -> None:
    Path("wrong").write_bytes(BAD)
    logged += [entry(3, BAD), entry(4, BAD)]
    key = "o3" if "no such" in complaint else '["orders","o1"]'
    assert complaint in kes("state", "repair", "shop:source", key, *words, "--yes", code=code).words
    assert not changes
    assert not list(Path().glob("*.value"))


@pytest.mark.parametrize(("partitions", "complaint"), [([], "no such key: o1"), ([0, 2], "is in the partitions 0, 2")])
def test_raw_writes_one_value_or_nothing(
    kes: Kes, changes: list[Changes], monkeypatch: pytest.MonkeyPatch, partitions: list[int], complaint: str
) -> None:
    """Its output goes into a file, which is put back."""
    found = [SimpleNamespace(partition=number, data=b"1") for number in partitions]
    monkeypatch.setattr(state, "_entries", lambda *_: found)
    answer = kes("state", "get", "shop:source", "o1", "--raw", code=1)
    assert (complaint in answer.err, answer.out) == (True, "")
