"""Base of ``TestDriver``'s calls: the loop that is run a little, the checks, the waiting."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, Final, TypeVar

from streams.errors import ConfigError, DecodeError, Stopped
from streams.events import event_type_of, parse_version
from streams.model.round_trips import everything_read_back
from streams.records import VERSION_HEADER, IncomingRecord
from streams.source.event_source import EventSource
from streams.testing import quiescence
from streams.testing.simulation.faults import POSSIBLE, Conditions, Strike
from streams.testing.world import DrivenMember, DrivenWorld, until

T = TypeVar("T")

_STRUCK_AS: Final[Mapping[str, str]] = {"send_offsets": "send"}
_STRIKABLE: Final = ("init", "flush", "send_offsets", "commit", "abort", "ask")


class Unsettled(AssertionError):
    """There was still something to do when the patience of a driver was at its end. The message names it."""


class Driving:
    """The inside of ``TestDriver``."""

    def __init__(
        self,
        source: EventSource[Any] | Callable[[], EventSource[Any]],
        members: int,
        seed: int,
        topics: Mapping[str, int],
        conditions: Conditions,
        patience: float,
        start_time: float,
        state_folder: str,
    ) -> None:
        self._closed = self._stepping = False
        self._check_open()
        if members < 1:
            raise ConfigError(f"members is {members}; a driver needs one or more")
        if not patience > 0:
            raise ConfigError(f"patience is {patience}; it must be more than 0 seconds")
        for topic, count in topics.items():
            if count < 1:
                raise ConfigError(f"topics gives {topic} {count} partitions; it must be 1 or more")
        self._first_members, self._patience = members, patience
        self._world = DrivenWorld(
            source, seed=seed, conditions=conditions, start_time=start_time, state_folder=state_folder
        )
        self._world.broker.topics.update(topics)
        self._chance = random.Random(seed).getstate()
        self._read: dict[str, int] = {}

    # -- running -------------------------------------------------------------------------------------------------------

    def _run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run the loop until this is done. Raises what a member or a trap failed with, before what ``main`` raises."""
        try:
            self._check_open()
            if self._stepping:
                raise ConfigError(
                    "this call lets time pass, which a handler or a trap cannot do: it may only use faults, join, "
                    "leave, restart, and send with wait=False"
                )
        except BaseException:
            main.close()
            raise
        self._stepping = True
        try:
            with self._own_chance(), other_loop_set_aside(), everything_read_back():
                result = self._world.loop.run_main(main)
        except BaseException:
            self._raise_failures()
            raise
        finally:
            self._stepping = False
        self._raise_failures()
        return result

    @contextlib.contextmanager
    def _own_chance(self) -> Iterator[None]:
        """Draw ``random``'s numbers from the seed too, and leave its state outside as it was."""
        outside = random.getstate()
        random.setstate(self._chance)
        try:
            yield
        finally:
            self._chance = random.getstate()
            random.setstate(outside)

    def _settle(self, *, balanced: bool, patience: float | None = None) -> None:
        world = self._world
        patience = self._patience if patience is None else patience
        deadline = world.loop.time() + patience

        def done() -> bool:
            if self._has_failed() or quiescence.nothing_can_happen(world):
                return True
            return next(quiescence.reasons_to_wait(world, balanced=balanced), None) is None

        if not self._run(until(done, deadline)):
            waits = "\n  ".join(quiescence.reasons_to_wait(world, balanced=balanced))
            happened = "\n  ".join(world.trace[-10:])
            raise Unsettled(
                f"not done after {patience:g} simulated seconds, at {world.loop.time():.3f}:\n  {waits}\n"
                f"happened before:\n  {happened}"
            )

    def _settled_if_outside(self) -> None:
        if not self._stepping:
            self._settle(balanced=True)

    def _has_failed(self) -> bool:
        return bool(self._world.errors) or any(_failure(member) is not None for member in self._world.all_members)

    def _raise_failures(self) -> None:
        for member in self._world.all_members:
            error = _failure(member)
            if error is not None:
                member.reported = True
                raise error
            for membership in member.process.memberships:
                for wrong in membership.failures:
                    raise AssertionError("the simulation itself is wrong, please report it") from wrong
        if self._world.errors:
            raise self._world.errors.pop(0)

    def close(self) -> None:
        """End everything, as if all processes were killed. Harmless the second time."""
        if self._closed:
            return
        if self._stepping:
            raise ConfigError("a driver cannot be closed by what it runs")
        self._closed = True
        loop = self._world.loop
        try:
            with self._own_chance(), other_loop_set_aside():
                loop.run_main(self._world.end())
                loop.run_main(loop.shutdown_asyncgens())
        finally:
            self._world.fibers.close()
            loop.close()
            self._world.state_folder.close()

    def _decoded(self, topic: str, records: list[IncomingRecord], classes: tuple[type[Any], ...]) -> list[Any]:
        form = self._world.forms_sent.get(topic)
        return [decoded(record, classes) for record in (records if form is None else form.received(records))]

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise Stopped("this TestDriver is closed")

    def _partitions(self) -> range:
        return range(self._world.config.num_partitions)

    def _check_partition(self, partition: int) -> None:
        if partition not in self._partitions():
            config = self._world.config
            raise ConfigError(
                f"{config.topic} has no partition {partition!r}; num_partitions is {config.num_partitions}, so it is "
                f"one of 0 to {config.num_partitions - 1}"
            )

    def _check_known(self, member: int) -> DrivenMember:
        known = self._world.members.get(member)
        if known is None:
            raise ConfigError(f"there is no member {member!r}; there are {sorted(self._world.members) or 'none yet'}")
        return known

    def _member(self, member: int | None) -> DrivenMember:
        """The member of this number, or the only one; it must not be down."""
        self._check_open()
        running = self._world.running()
        if member is None:
            if len(running) != 1:
                numbers = [known.number for known in running]
                raise ConfigError(f"name the member; running are {numbers or 'none'}")
            return running[0]
        known = self._check_known(member)
        if known.is_down:
            raise ConfigError(f"member {member} is down; restart it first")
        return known

    def _dismiss(self, number: int) -> None:
        member = self._world.members[number]
        if not member.is_down:
            member.source._run.ask_to_stop(drain=True)

    def _strike(self, call: str, strike: Strike, member: int | None) -> None:
        if call not in _STRIKABLE:
            raise ConfigError(f"there is no call {call!r} to be struck; the calls are {', '.join(_STRIKABLE)}")
        kind = _STRUCK_AS.get(call, call)
        if strike not in POSSIBLE[kind]:
            possible = ", ".join(one.name for one in POSSIBLE[kind])
            raise ConfigError(f"{call} cannot be struck by {strike.name}; it can by {possible}")
        found = self._member(member)
        self._world.note(f"the next {call} of member {found.number}: {strike.name}")
        found.process.forced.setdefault(kind, deque()).append(strike)


@contextlib.contextmanager
def other_loop_set_aside() -> Iterator[None]:
    """Let another loop run on this thread: in an async test or a notebook one is running, and stands still meanwhile.

    asyncio keeps one running loop and one task of it for each thread; both are put back afterwards.
    """
    outside = asyncio._get_running_loop()
    if outside is None:
        yield
        return
    task = asyncio.current_task(outside)
    if task is not None:
        asyncio.tasks._leave_task(outside, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outside)
        if task is not None:
            asyncio.tasks._enter_task(outside, task)


def _failure(member: DrivenMember) -> BaseException | None:
    """Return the error that a member stopped with, unless it was reported already."""
    return None if member.reported or member.process.dead else member.failure


def decoded(record: IncomingRecord, classes: tuple[type[Any], ...]) -> Any:
    """The event of a record, which must be one of these types. Raises ``DecodeError``, ``RegistrationError``."""
    types = {name: described for described in map(event_type_of, classes) for name in described.names}
    described = types.get(record.record_type or "")
    if described is None:
        raise DecodeError(f"{record.where} is a {record.record_type!r}; expected were {', '.join(types)}")
    try:
        version = record.header(VERSION_HEADER)
        return described.decode(record.value, 1 if version is None else parse_version(version))
    except DecodeError as error:
        raise DecodeError(f"{record.where}: {error}") from error
