"""One scenario, two back ends: what it may do and see, and the comparison of what came of it.

Scenarios are written against ``BackEnd``. ``DrivenBackEnd`` runs them in a ``TestDriver``, ``RealBackEnd`` over a real
broker; both use the same names of topics and groups, so that also errors' texts can be compared word by word.

What a scenario leaves behind is made comparable in ``observed``. Left out, or made equal, because it depends on time:

* how many transactions there were, and so the offsets of outputs and changelog records (markers lie between them), and
  the order of outputs of different keys of a partition when they come from different ones;
* the figures in a broker's words on a timestamp that is out of range;
* times of day: a timestamp of this century's present is "now", one that a scenario chose is compared;
* the partition of records without a key that name none (spread by chance, on both sides), and so their order;
* the changelog's records of the toolkit itself: their names are compared, and the offset, not their random parts; and
  not whether a partition was handed over, which depends on who was there first.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streams import EventSource, EventSourceConfig, IncomingRecord, Record, Retry
from streams.codecs import RESERVED_KEY_PREFIX
from streams.events import event_type_of
from streams.records import Headers
from streams.runtime.changelog import OFFSET_KEY, RELEASE_KEY, decode_offset
from streams.runtime.partition.dead_letters import PREFIX
from tests.vocabulary import TOTALS, Added, Work, config_of, tell_total

Make = Callable[[EventSourceConfig], EventSource[Any]]
Play = Callable[["BackEnd"], None]
PRESENT_MS = 1_600_000_000_000
"""Later timestamps are "now"; scenarios choose earlier ones."""
BY_CHANCE = -1
"""Stands for the partition of a record without a key."""


@dataclass(frozen=True, eq=False)
class Scenario:
    """``partitions`` of the source's topic, ``topics`` with theirs, ``configs`` of these."""

    play: Play
    partitions: int = 1
    topics: Mapping[str, int] = field(default_factory=lambda: {"out": 1})
    configs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.play.__name__


def scenario(**settings: Any) -> Callable[[Play], Scenario]:
    """Makes a ``Scenario`` of the function that plays it."""
    return lambda play: Scenario(play, **settings)


class BackEnd(ABC):
    """What a scenario has in its hands. All calls block; members are numbered from 0."""

    def __init__(self, scenario: Scenario, prefix: str) -> None:
        self.scenario, self.prefix = scenario, prefix
        self.topic, self.group = f"{prefix}in", f"{prefix}group"
        self.notes: dict[str, Any] = {}
        """What a scenario wants to have compared besides."""

    def name(self, topic: str) -> str:
        """The name of one of the scenario's topics."""
        return f"{self.prefix}{topic}"

    @property
    def out(self) -> str:
        """The usual output topic."""
        return self.name("out")

    def config(self, **settings: Any) -> EventSourceConfig:
        """The same on both sides but for the broker's address."""
        return config_of(
            **{
                "group_id": self.group,
                "topic": self.topic,
                "num_partitions": self.scenario.partitions,
                "bootstrap_servers": self.bootstrap,
                "instance_id": "member",
                **settings,
            }
        )

    def send(self, event: object, key: str | bytes | None = None, **record: Any) -> int:
        """An event; see ``send_raw``."""
        described = event_type_of(type(event))
        data = key.encode() if isinstance(key, str) else key
        headers = described.headers + list(record.pop("headers", ()))
        return self.send_raw(described.encode(event), data, headers=headers, **record)

    def failure(self, name: str = "failure", deed: Callable[[], object] = lambda: None) -> BaseException:
        """Wait until the source stops with an error, now or during this: it is noted, and returned."""
        try:
            deed()
            self.settle()
        except Exception as error:
            self.notes[name] = described_error(error)
            return error
        raise AssertionError("the source did not stop with an error")

    def refused(self, name: str, deed: Callable[[], object]) -> None:
        """Note what this raises."""
        try:
            self.notes[name] = deed()
        except Exception as error:
            self.notes[name] = described_error(error)

    def send_raw(
        self,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> int:
        """A record to the source's topic; returns its offset. Waits for nothing else."""
        return self.send_record(Record(self.topic, value, key, headers, partition, timestamp_ms))

    @property
    @abstractmethod
    def bootstrap(self) -> str: ...

    @abstractmethod
    def run(self, make: Make, members: int = 1, *, start: bool = True, **settings: Any) -> None:
        """Members of a source, each made anew for each start from a config with these settings."""

    @abstractmethod
    def start(self) -> None:
        """After ``run(start=False)``: returns when every partition is worked on."""

    @abstractmethod
    def send_record(self, record: Record) -> int: ...

    @abstractmethod
    def send_transaction(self, *records: tuple[int, bytes, bytes, Headers], commit: bool) -> None:
        """(partition, key, value, headers) by a transactional producer, ended so."""

    @abstractmethod
    def settle(self) -> None:
        """Until everything that was sent is committed; raises what a member stopped with."""

    @abstractmethod
    def until(self, condition: Callable[[], bool], what: str) -> None: ...

    @abstractmethod
    def interject(self, partition: int, handler: Callable[[Any], Any]) -> Any: ...

    @abstractmethod
    def join(self) -> int: ...

    @abstractmethod
    def leave(self, member: int = 0) -> None: ...

    @abstractmethod
    def restart(self, member: int = 0) -> None: ...

    @abstractmethod
    def records(self, topic: str) -> Sequence[IncomingRecord]:
        """What read_committed readers see, each partition in its order."""

    @abstractmethod
    def committed(self) -> dict[int, int]: ...

    @abstractmethod
    def stores(self) -> dict[int, object]:
        """Contents of the stores that are worked on."""

    @abstractmethod
    def hanging(self) -> list[str]:
        """Partitions whose readers wait for a transaction."""

    @abstractmethod
    def close(self) -> None: ...


def making(work: Work, on_error: Retry | None = None, store: Any = TOTALS) -> Make:
    """Makes sources with one handler."""

    def make(config: EventSourceConfig) -> EventSource[Any]:
        source = EventSource(config, store)
        source.register_event_type(Added, work, on_error=on_error)
        return source

    return make


def telling(end: BackEnd) -> Make:
    """Makes sources that tell totals."""
    return making(lambda ctx, event: tell_total(ctx, event, end.out))


def feed(end: BackEnd, *names: str, deed: str = "", amount: int = 1) -> None:
    """Send events, each by its name as key."""
    for name in names:
        end.send(Added(name, amount, deed), name)


def described_error(error: BaseException) -> list[tuple[str, str]]:
    """Class and text of an error and of its causes."""
    found: list[tuple[str, str]] = []
    one: BaseException | None = error
    while one is not None:
        found.append((type(one).__name__, str(one)))
        one = one.__cause__
    return found


def observed(end: BackEnd) -> dict[str, Any]:
    """What a scenario has left behind, as values that can be compared."""
    scenario = end.scenario
    config = end.config()
    inputs = end.records(end.topic)
    return {
        "input": [(record.partition, record.offset, record.key, *_content(record)) for record in inputs],
        "outputs": {topic: _by_key(end.records(end.name(topic))) for topic in scenario.topics},
        "dead letters": [_letter(record) for record in end.records(config.dead_letters)],
        "stores": end.stores(),
        "changelog": {
            partition: _last_values(record for record in end.records(config.changelog) if record.partition == partition)
            for partition in range(scenario.partitions)
        },
        "committed": end.committed(),
        "hanging": end.hanging(),
        "notes": end.notes,
    }


def _content(record: IncomingRecord) -> tuple[Any, ...]:
    time = "now" if record.timestamp_ms > PRESENT_MS else record.timestamp_ms
    return _short(record.value), None if record.headers is None else [tuple(header) for header in record.headers], time


def _short(value: Any) -> Any:
    return value if not isinstance(value, bytes | str) or len(value) < 200 else (value[:20], len(value))


def _by_key(records: Iterable[IncomingRecord]) -> dict[tuple[int, bytes | None], list[tuple[Any, ...]]]:
    found: dict[tuple[int, bytes | None], list[tuple[Any, ...]]] = {}
    for record in records:
        partition = record.partition if record.key is not None or _names_partition(record) else BY_CHANCE
        found.setdefault((partition, record.key), []).append(_content(record))
    return {where: sorted(some, key=repr) if where[0] == BY_CHANCE else some for where, some in found.items()}


def _names_partition(record: IncomingRecord) -> bool:
    return record.header("partition") is not None


OF_THE_RUN = {f"{PREFIX}failed_at_ms", f"{PREFIX}instance"}


def _letter(record: IncomingRecord) -> tuple[Any, ...]:
    headers = [
        (name, b"here and now" if name in OF_THE_RUN or _is_present(name, value) else _one_way(value))
        for name, value in record.headers or ()
    ]
    return record.partition, record.key, record.value, headers


def _one_way(value: bytes | None) -> bytes | None:
    """A broker adds the timestamp, the offset and its limits, which depend on the time of day."""
    return re.sub(rb"Timestamp .*out of range.*", b"Timestamp out of range", value) if value else value


def _is_present(name: str, value: bytes | None) -> bool:
    return name == f"{PREFIX}timestamp_ms" and int(value or b"0") > PRESENT_MS


def _last_values(records: Iterable[IncomingRecord]) -> dict[str, Any]:
    last: dict[bytes, Any] = {}
    own: dict[bytes, bool] = {}
    offset = None
    for record in records:
        key = record.key
        assert key is not None, "a changelog record without a key"
        if key == OFFSET_KEY:
            offset = decode_offset(record).offset
        elif key == RELEASE_KEY:
            continue
        elif key.startswith(RESERVED_KEY_PREFIX):
            own[key] = record.value is not None
        elif record.value is None:
            last.pop(key, None)
        else:
            last[key] = (_short(record.value), record.headers)
    return {"values": last, "offset": offset, "own": dict(sorted(own.items()))}


def differences(driven: Mapping[str, Any], real: Mapping[str, Any]) -> list[str]:
    """Where the two are not the same, each with both sides."""
    return [
        f"{kind}:\n  driver: {driven[kind]!r}\n  broker: {real[kind]!r}" for kind in real if driven[kind] != real[kind]
    ]


async def turn_of_others() -> None:
    """Once around the loop."""
    loop = asyncio.get_running_loop()
    passed: asyncio.Future[None] = loop.create_future()
    loop.call_soon(passed.set_result, None)
    await passed
