"""Hold records back whose schemas are not known yet: their partition waits for the registry, the others go on.

Of an input whose records need no registry the batches never come here (``SchemaWaits.before``). A parked event waits
alone: its partition goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, NamedTuple, Protocol

import anyio

from streams.core.admission import size_of_records
from streams.core.router import Route, Router
from streams.errors import RegistryUnavailable
from streams.formats.needs import REPLICA_SECONDS
from streams.model.topics import InputSpec
from streams.records import TYPE_HEADER, IncomingRecord
from streams.runtime.ports import Blocking, Input, Polled
from streams.runtime.signal import Signal

_log = logging.getLogger(__name__)

ASK_SECONDS: Final = 0.1
"""Seconds between two questions: values of a producer of noise, each with another id, must not take a registry down."""
AGAIN_SECONDS: Final = 1.0
"""Seconds to the next question about an id that the registry does not have, and after none was answered."""


class UnknownSchema(NamedTuple):
    """The id of a schema that is to be fetched before a record is read (``formats.SchemaRegistry``)."""

    registry: Any
    key: bytes


Unknown = Callable[[IncomingRecord], UnknownSchema | None]
"""Looks for the schema that a record waits for; ``None``: it can be read."""


def unknown_schemas(rule: Any, routes: Mapping[bytes, Route]) -> Unknown | None:
    """Return what finds the records of an input that wait for a registry; ``None``: none does. ``rule``: of the
    input."""
    if hasattr(rule, "unknown"):

        def by_rule(record: IncomingRecord) -> UnknownSchema | None:
            key = rule.unknown(record)
            return None if key is None else UnknownSchema(rule.registry, key)

        return by_rule
    needy: dict[bytes, Any] = {
        name: route.event_type.codec
        for name, route in routes.items()
        if route.event_type is not None and hasattr(route.event_type.codec, "unknown")
    }
    if not needy:
        return None
    codecs: list[Any] = [*needy.values()]

    def by_type(record: IncomingRecord) -> UnknownSchema | None:
        # The rule has not run yet, which may know more; an id too many is fetched then.
        found = codecs if rule is not None else [needy.get(record.header(TYPE_HEADER) or b"")]
        for codec in filter(None, found):
            key = codec.unknown(record.value)
            if key is not None:
                return UnknownSchema(codec.registry, key)
        return None

    return by_type


class InputsOwner(Protocol):
    """The member whose inputs these are (``runtime.member.InputsOwner``)."""

    @property
    def router(self) -> Router: ...
    @property
    def further_inputs(self) -> Sequence[tuple[InputSpec, Input]]: ...
    @property
    def workers(self) -> Mapping[int, Any]: ...
    @property
    def now(self) -> Callable[[], float]: ...
    def thread(self, name: str) -> Blocking: ...
    def spawn(self, task: Callable[[], Awaitable[None]]) -> None: ...


class _Head(NamedTuple):
    """A parked event that waits; ``known`` is called when it can be read."""

    record: IncomingRecord
    unknown: Unknown
    known: Callable[[], None]


class SchemaWaits:
    """The waits of one member: of the inputs that need a registry, and of parked events. On the loop."""

    def __init__(self, member: InputsOwner) -> None:
        self._member, self._waits = member, list[SchemaWait]()
        self._heads: dict[tuple[int, str], _Head] = {}
        self._questions, self._is_asking = _Questions(member), False

    def before(self, number: int, port: Input, deliver: Callable[[Polled], None]) -> Callable[[Polled], None]:
        """Return what takes the batches of an input: ``deliver`` itself, unless its records need a registry."""
        member = self._member
        rule = member.further_inputs[number - 1][0].types if number else member.router.types
        unknown = unknown_schemas(rule, member.router.routes)
        if unknown is None:
            return deliver
        wait = SchemaWait(member, number, port, unknown, deliver)
        self._waits.append(wait)
        member.spawn(wait.run)
        return wait.deliver

    def waits(self, at: tuple[int, str], rule: Any, record: IncomingRecord, known: Callable[[], None]) -> bool:
        """Check whether the schema of a parked event is to be fetched first, which another process may have read. Then
        ``known`` is called once it is there, or refused. ``at``: partition and queue."""
        unknown = unknown_schemas(rule, self._member.router.routes)
        if unknown is None or unknown(record) is None:
            return False
        self._heads[at] = _Head(record, unknown, known)
        if not self._is_asking:
            self._is_asking = True
            self._member.spawn(self._fetch_for_heads)
        return True

    async def _fetch_for_heads(self) -> None:
        try:
            while self._heads:
                found = (head.unknown(head.record) for head in self._heads.values())
                await self._questions.ask(filter(None, found), self.partitions)
                for at, head in list(self._heads.items()):
                    if at[0] not in self._member.workers:
                        del self._heads[at]
                    elif head.unknown(head.record) is None:
                        del self._heads[at]
                        head.known()
                await anyio.sleep(ASK_SECONDS)
        finally:
            self._is_asking = False
            self._questions.away_since = None

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions that wait for a registry, or have parked events that do."""
        waiting = {partition for wait in self._waits for partition in wait.waiting}
        return tuple(sorted(waiting | {partition for partition, _ in self._heads}))


class NoSchemaWaits:
    """For a host in which no parked event is tried."""

    def waits(self, at: tuple[int, str], rule: Any, record: IncomingRecord, known: Callable[[], None]) -> bool:
        return False


class _Questions:
    """The questions to registries for one input, or for parked events. On the loop."""

    def __init__(self, member: InputsOwner) -> None:
        self._member, self._now = member, member.now
        self._thread: Blocking | None = None
        self._first_asked: dict[UnknownSchema, float] = {}
        self._due: dict[UnknownSchema, float] = {}  # when it is fetched again
        self.away_since: float | None = None
        """When the registry was first away, for those that wait now."""

    async def ask(self, wanted: Iterable[UnknownSchema], waiting: Sequence[int]) -> None:
        """Fetch the first schema that is due. Raises ``ConfigError``, and ``RegistryUnavailable`` after the registry's
        ``unavailable_seconds``. ``waiting``: the partitions, for messages."""
        now = self._now()
        found = next((each for each in wanted if self._due.get(each, now) <= now), None)
        if found is None:
            return
        registry, key = found
        try:
            missing = await self._fetch(found)
        except RegistryUnavailable as error:
            from streams.formats.registry import shown  # it is loaded: with the registry

            now = self._now()
            if self.away_since is None:
                self.away_since = now
                _log.warning("partitions %s wait for the schema %s: %s", [*waiting], shown(key), error)
            if 0 < registry.unavailable_seconds < now - self.away_since:
                raise RegistryUnavailable(
                    f"{error}; partitions {[*waiting]} have waited for the schema {shown(key)} for more than "
                    f"unavailable_seconds={registry.unavailable_seconds:g}"
                ) from None
            await anyio.sleep(AGAIN_SECONDS)
            return
        self.away_since, now = None, self._now()
        # A registry's replica may be behind: an id that it does not have is fetched again before it is refused.
        if missing is not None and now - self._first_asked.setdefault(found, now) < REPLICA_SECONDS:
            self._due[found] = now + AGAIN_SECONDS
            return
        if missing is not None:
            registry.refuse(key, missing)
        self._first_asked.pop(found, None)
        self._due.pop(found, None)

    async def _fetch(self, found: UnknownSchema) -> str | None:
        fetch: Callable[[bytes], str | None] = found.registry.fetch
        if found.registry.is_local:
            return fetch(found.key)
        if self._thread is None:
            self._thread = self._member.thread("kes-registry")
        return await self._thread.call(fetch, found.key)


class _Held:
    """Records of a partition that wait, under the epoch in which they were read."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.records: list[IncomingRecord] = []
        self.at_end = False


class SchemaWait:
    """The way of one input's records through a registry. On the loop."""

    def __init__(
        self, member: InputsOwner, number: int, port: Input, unknown: Unknown, deliver: Callable[[Polled], None]
    ) -> None:
        self._member, self._number, self._port = member, number, port
        self._unknown, self._deliver, self._questions = unknown, deliver, _Questions(member)
        self._held: dict[int, _Held] = {}
        self._news = Signal()

    @property
    def waiting(self) -> list[int]:
        """The partitions that wait."""
        return sorted(self._held)

    def deliver(self, batch: Polled) -> None:
        """Deliver the records up to the first one of each partition whose schema is not known yet."""
        stopped = {
            partition: at for partition, records in batch.records.items()
            if (at := self._stop_at(partition, records, batch.epochs.get(partition))) is not None
        }  # fmt: skip
        if not stopped:
            self._deliver(batch)
            return
        records, sizes = dict(batch.records), dict(batch.sizes)
        for partition, at in stopped.items():
            found, epoch = records[partition], batch.epochs[partition]
            held = self._held.get(partition)
            if held is None or held.epoch != epoch:  # older ones come again, from the new position
                held = self._held[partition] = _Held(epoch)
            held.records += found[at:]
            held.at_end = partition in batch.at_end
            # Paused anew with each batch: the partition's queue may have resumed it. What waits takes no room of the
            # thread's, or it would read nothing for other partitions.
            self._port.pause(partition)
            rest = size_of_records(found[at:])
            self._port.handled(len(found) - at, rest)
            records[partition], sizes[partition] = found[:at], sizes[partition] - rest
        self._deliver(batch._replace(records=records, sizes=sizes, at_end=batch.at_end - stopped.keys()))
        self._news.notify()

    async def run(self) -> None:
        """Fetch the schemas that are waited for, until it is cancelled. Raises as ``_Questions.ask``."""
        while True:
            while not self._held:
                self._questions.away_since = None  # the next one waits its own time
                await self._news.wait()
            await self._questions.ask(self._wanted(), self.waiting)
            # In a callback, as all deliveries: handlers may run in it, as of their partition's task.
            asyncio.get_running_loop().call_soon(self._release)
            await anyio.sleep(ASK_SECONDS)

    def _wanted(self) -> list[UnknownSchema]:
        """Return the ids that are waited for, each once: the first ones of all partitions, then the second ones. So
        noise in one does not hold up the others."""
        each = [filter(None, map(self._unknown, held.records)) for held in self._held.values()]
        return list(dict.fromkeys(found for row in zip_longest(*each) for found in row if found is not None))

    def _release(self) -> None:
        """Deliver what can be read."""
        for partition, held in list(self._held.items()):
            worker = self._member.workers.get(partition)
            if worker is None or worker.epoch != held.epoch:
                del self._held[partition]  # given up, or read again from another position
                continue
            unknown = (at for at, record in enumerate(held.records) if self._unknown(record) is not None)
            known = next(unknown, len(held.records))
            if not known and held.records:
                continue
            front, held.records = held.records[:known], held.records[known:]
            size = size_of_records(front)
            at_end = frozenset([partition]) if held.at_end and not held.records else frozenset[int]()
            self._port.handled(-known, -size)  # they count again, until they are handled
            if not held.records:
                del self._held[partition]
            self._deliver(Polled({partition: front}, {partition: size}, {partition: held.epoch}, at_end))
            # A queue that is full resumes the partition itself, once it has room.
            if not held.records and not worker.inboxes[self._number].paused:
                self._port.resume(partition)

    def _stop_at(self, partition: int, records: list[IncomingRecord], epoch: int | None) -> int | None:
        held = self._held.get(partition)
        if held is not None and held.epoch == epoch:
            return 0
        unknown = self._unknown
        return next((at for at, record in enumerate(records) if unknown(record) is not None), None)
