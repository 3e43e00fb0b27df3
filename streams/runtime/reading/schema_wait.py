"""Hold records back whose schemas are not known yet: their partition waits for the registry, the others go on.

Of an input whose records need no registry the batches never come here (``SchemaWaits.before``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, Protocol

import anyio

from streams.core.admission import size_of_records
from streams.core.router import Router
from streams.errors import RegistryUnavailable
from streams.model.topics import InputSpec
from streams.records import IncomingRecord
from streams.runtime.partition.decoding import Unknown, UnknownSchema, unknown_schemas
from streams.runtime.ports import Blocking, Input, Polled
from streams.runtime.signal import Signal

_log = logging.getLogger(__name__)

ASK_SECONDS: Final = 0.1
"""Seconds between two questions: values of a producer of noise, each with another id, must not take a registry down."""
REPLICA_SECONDS: Final = 10.0
"""Seconds in which requests for an id that the registry does not have are repeated: a replica of it may be behind."""
AGAIN_SECONDS: Final = 1.0
"""Seconds to the next question about an id that the registry does not have, and after none was answered."""


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


class SchemaWaits:
    """The waits of the inputs of one member, for those that need a registry. On the loop."""

    def __init__(self, member: InputsOwner) -> None:
        self._member, self._waits = member, list[SchemaWait]()

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

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions that wait for a registry."""
        return tuple(sorted({partition for wait in self._waits for partition in wait.waiting}))


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
        self._unknown, self._deliver, self._now = unknown, deliver, member.now
        self._thread: Blocking | None = None
        self._held: dict[int, _Held] = {}
        self._first_asked: dict[bytes, float] = {}
        self._due: dict[bytes, float] = {}  # when an id is fetched again
        self._away_since: float | None = None
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
        """Fetch the schemas that are waited for, until it is cancelled. Raises ``ConfigError``, and
        ``RegistryUnavailable`` after the registry's ``unavailable_seconds``."""
        while True:
            while not self._held:
                await self._news.wait()
            now = self._now()
            due = next((found for found in self._wanted() if self._due.get(found.key, now) <= now), None)
            if due is not None:
                await self._ask(due)
            # In a callback, as all deliveries: handlers may run in it, as of their partition's task.
            asyncio.get_running_loop().call_soon(self._release)
            await anyio.sleep(ASK_SECONDS)

    async def _ask(self, found: UnknownSchema) -> None:
        registry, key = found
        try:
            missing = await self._fetch(found)
        except RegistryUnavailable as error:
            from streams.formats.registry import shown  # it is loaded: with the registry

            now = self._now()
            if self._away_since is None:
                self._away_since = now
                _log.warning("partitions %s wait for the schema %s: %s", self.waiting, shown(key), error)
            if 0 < registry.unavailable_seconds < now - self._away_since:
                raise RegistryUnavailable(
                    f"{error}; partitions {self.waiting} have waited for the schema {shown(key)} for more than "
                    f"unavailable_seconds={registry.unavailable_seconds:g}"
                ) from None
            await anyio.sleep(AGAIN_SECONDS)
            return
        self._away_since, now = None, self._now()
        # A registry's replica may be behind: an id that it does not have is fetched again before it is refused.
        if missing is not None and now - self._first_asked.setdefault(key, now) < REPLICA_SECONDS:
            self._due[key] = now + AGAIN_SECONDS
            return
        if missing is not None:
            registry.refuse(key, missing)
        self._first_asked.pop(key, None)
        self._due.pop(key, None)

    async def _fetch(self, found: UnknownSchema) -> str | None:
        fetch: Callable[[bytes], str | None] = found.registry.fetch
        if found.registry.is_local:
            return fetch(found.key)
        if self._thread is None:
            self._thread = self._member.thread("kes-registry")
        return await self._thread.call(fetch, found.key)

    def _wanted(self) -> list[UnknownSchema]:
        """Return the ids that are waited for, each once: the first ones of all partitions, then the second ones. So
        noise in one does not hold up the others."""
        each = [filter(None, map(self._unknown, held.records)) for held in self._held.values()]
        return list({found.key: found for row in zip_longest(*each) for found in row if found is not None}.values())

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
