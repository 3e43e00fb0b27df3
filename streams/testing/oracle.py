"""The replay oracle: reads what an event source was given and what it left behind, and reports every difference.

The input up to the committed offsets is folded again by a function of yours, with a plain dict for a store: no
engine, no transactions, no threads. What it yields must be what ``read_committed`` readers see: the *sequence* of
outputs per key, and the last value per key in the changelog. Besides, no transaction may be left hanging, and the
offset in the changelog must be the group's.

    oracle = ReplayOracle(servers, group_id="bank", topic="bank-events", outputs=["balances"], fold=fold)
    report = oracle.check()
    assert not report.differences, report
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

import msgspec

from streams.codecs import RESERVED_KEY_PREFIX
from streams.kafka.questions.admin import TopicAdmin, Watermarks
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.settings import ClientSettings
from streams.model.topics import changelog_name
from streams.records import IncomingRecord
from streams.runtime.changelog import OFFSET_KEY, decode_offset

State = dict[bytes, bytes]
"""A plain store: key bytes to value bytes."""

Sent = tuple[str, bytes | None, bytes | None]
"""An expected output: (topic, key, value)."""

Fold = Callable[[State, IncomingRecord], Iterable[Sent]]
"""Applies one input record to the state of its partition, and yields what it sends."""

SHOWN = 5
"""Differences of one kind that are reported in full."""


class Report(msgspec.Struct, frozen=True):
    """Counts of what was compared, and the differences found. No ``differences``: exactly once."""

    inputs: int
    outputs: int
    keys: int
    differences: tuple[str, ...]

    def __str__(self) -> str:
        facts = f"{self.inputs} inputs, {self.outputs} outputs, {self.keys} keys in the changelog"
        return facts + (": exact" if not self.differences else "".join(f"\n  - {text}" for text in self.differences))


class ReplayOracle:
    """Compares one event source with a fold of its input. Blocking; run it when the source has stopped or is idle.

    ``complete``: every input record must be handled (the default); otherwise only those below the committed offsets
    count. ``changelog``: name of the changelog topic, if it is not the default one. ``ordered``: compare sequences
    per key; set it to ``False`` for outputs whose key comes from several input partitions, then the records are
    compared as multisets.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        group_id: str,
        topic: str,
        outputs: Sequence[str],
        fold: Fold,
        changelog: str = "",
        complete: bool = True,
        ordered: bool = True,
        client_settings: Mapping[str, Any] | None = None,
        stalled_after_seconds: float = 30.0,
    ) -> None:
        self._settings = ClientSettings(bootstrap_servers, client_settings or {}, client_id="oracle")
        self._group, self._topic, self._outputs, self._fold = group_id, topic, list(outputs), fold
        self._changelog = changelog or changelog_name(group_id, topic)
        self._complete, self._ordered, self._patience = complete, ordered, stalled_after_seconds

    def check(self) -> Report:
        """Read everything and compare. Raises ``BrokerUnavailable`` if reading does not come to its end in time."""
        with closing(TopicAdmin(self._settings)) as admin, closing(PartitionReader(self._settings)) as reader:
            differences: list[str] = []
            marks = {name: admin.watermarks(name) for name in (self._topic, self._changelog, *self._outputs)}
            for name, partitions in marks.items():
                differences += _hanging(name, partitions)
            committed = admin.committed(self._group, self._topic)
            states, offsets = self._changelog_state(reader, marks[self._changelog])
            inputs, folded, expected, remarks = self._replay(reader, marks[self._topic], offsets)
            differences += remarks
            differences += _compare_offsets(self._topic, offsets, committed)
            for number in sorted(states.keys() | folded.keys()):
                differences += _compare_state(
                    f"{self._changelog}[{number}]", folded.get(number, {}), states.get(number, {})
                )
            seen, count = self._seen(reader, marks)
            for key in expected.keys() | seen.keys():
                differences += self._compare_outputs(key, expected.get(key, []), seen.get(key, []))
            return Report(inputs, count, sum(map(len, states.values())), tuple(_shortened(differences)))

    def _read(
        self, reader: PartitionReader, name: str, marks: Mapping[int, Watermarks]
    ) -> dict[int, list[IncomingRecord]]:
        ranges = {number: (mark.start, mark.end) for number, mark in marks.items()}
        return reader.read_all(name, ranges, stalled_after_seconds=self._patience)

    def _changelog_state(
        self, reader: PartitionReader, marks: Mapping[int, Watermarks]
    ) -> tuple[dict[int, State], dict[int, int]]:
        states: dict[int, State] = {}
        offsets: dict[int, int] = {}
        for number, records in self._read(reader, self._changelog, marks).items():
            state: State = states.setdefault(number, {})
            for record in records:
                if record.key == OFFSET_KEY:
                    offsets[number] = decode_offset(record).offset
                elif record.key is not None and not record.key.startswith(RESERVED_KEY_PREFIX):
                    if record.value is None:
                        state.pop(record.key, None)
                    else:
                        state[record.key] = record.value
        return states, offsets

    def _replay(
        self, reader: PartitionReader, marks: Mapping[int, Watermarks], offsets: Mapping[int, int]
    ) -> tuple[int, dict[int, State], dict[tuple[str, bytes | None], list[bytes | None]], list[str]]:
        inputs = 0
        folded: dict[int, State] = {}
        remarks: list[str] = []
        expected: dict[tuple[str, bytes | None], list[bytes | None]] = defaultdict(list)
        for number, records in self._read(reader, self._topic, marks).items():
            state: State = folded.setdefault(number, {})
            end = offsets.get(number, 0)
            beyond = [record for record in records if record.offset >= end]
            if beyond and self._complete:
                remarks.append(
                    f"{self._topic}[{number}]: {len(beyond)} records from offset {beyond[0].offset} on are not handled"
                )
            for record in records[: len(records) - len(beyond)]:
                inputs += 1
                for topic, key, value in self._fold(state, record):
                    expected[topic, key].append(value)
        return inputs, folded, expected, remarks

    def _seen(
        self, reader: PartitionReader, marks: Mapping[str, Mapping[int, Watermarks]]
    ) -> tuple[dict[tuple[str, bytes | None], list[bytes | None]], int]:
        seen: dict[tuple[str, bytes | None], list[bytes | None]] = defaultdict(list)
        count = 0
        for name in self._outputs:
            for records in self._read(reader, name, marks[name]).values():
                count += len(records)
                for record in records:
                    seen[name, record.key].append(record.value)
        return seen, count

    def _compare_outputs(
        self, key: tuple[str, bytes | None], expected: list[bytes | None], seen: list[bytes | None]
    ) -> list[str]:
        if not self._ordered:
            expected, seen = (sorted(values, key=lambda value: (value is None, value)) for values in (expected, seen))
        if expected == seen:
            return []
        where = f"{key[0]}, key {key[1]!r}"
        for position, (one, other) in enumerate(zip(expected, seen, strict=False)):
            if one != other:
                return [f"{where}: output {position} is {_short(other)}, expected {_short(one)}"]
        if len(seen) < len(expected):
            return [
                f"{where}: {len(expected) - len(seen)} outputs are missing, the first is {_short(expected[len(seen)])}"
            ]
        return [f"{where}: {len(seen) - len(expected)} outputs too many, the first is {_short(seen[len(expected)])}"]


def _hanging(name: str, partitions: Mapping[int, Watermarks]) -> list[str]:
    return [
        f"{name}[{number}]: a transaction hangs, readers stop at {mark.stable} of {mark.end}"
        for number, mark in partitions.items()
        if mark.stable != mark.end
    ]


def _compare_offsets(topic: str, changelog: Mapping[int, int], group: Mapping[int, int]) -> list[str]:
    return [
        f"{topic}[{number}]: the changelog's offset is {changelog.get(number)}, the group's {group.get(number)}"
        for number in sorted(changelog.keys() | group.keys())
        if changelog.get(number) != group.get(number)
    ]


def _compare_state(where: str, expected: State, seen: State) -> list[str]:
    return [
        f"{where}, key {key!r}: the state is {_short(seen.get(key))}, expected {_short(expected.get(key))}"
        for key in sorted(expected.keys() | seen.keys())
        if expected.get(key) != seen.get(key)
    ]


def _short(value: bytes | None) -> str:
    return "nothing" if value is None else repr(value[:80])


def _shortened(differences: list[str]) -> list[str]:
    if len(differences) <= 4 * SHOWN:
        return differences
    return [*differences[: 4 * SHOWN], f"... and {len(differences) - 4 * SHOWN} more"]
