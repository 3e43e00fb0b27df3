"""Engines to play with, that hand partitions over and take them: who works on what is written into one ledger.

The changelog is played too: of each partition it keeps the last record, a release marker or something else. What is
real is the group: broker, membership, claims, plans.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from streams.group import THIS_GENERATION, Assigned, Assignment, Copies, GroupEvent, Lost, MemberReport, Order, Revoked
from tests.broker.membership_kit import PARTITIONS, PATIENCE, Seat, make_topic, until

QUICK = {"session_timeout_ms": 2000}
MORTAL = {"session_timeout_ms": 6000}
"""For who dies or is frozen, when it must not be lost before."""


class Wishes:
    """A strategy that does what the test wants: ``want`` says which instance shall have a partition.

    It moves what the wanted one has ready, has it prepared if not, and keeps every move that is under way. A partition
    that nobody has goes to who expects it, else to the wanted one. ``gate`` holds the leader up.
    """

    def __init__(self, **wanted: range) -> None:
        self.want = {number: instance for instance, numbers in wanted.items() for number in numbers}
        self.gate = threading.Event()
        self.gate.set()
        self.reports: list[dict[str, MemberReport]] = []

    def __call__(self, partitions: int, reports: Mapping[str, MemberReport]) -> dict[str, Assignment]:
        self.reports.append({report.instance: report for report in reports.values()})
        assert self.gate.wait(PATIENCE)
        by_name = {reports[member].instance: member for member in sorted(reports)}
        plan: dict[str, dict[str, Any]] = {
            member: {"own": set(), "preparing": set(), "release": {}, "incoming": {}} for member in reports
        }
        for number in range(partitions):
            self._place(number, by_name.get(self.want.get(number, "")), reports, plan)
        names = tuple(sorted(report.instance for report in reports.values()))
        return {
            member: Assignment(
                own=frozenset(roles["own"]),
                preparing=frozenset(roles["preparing"]),
                release=roles["release"],
                incoming=roles["incoming"],
                members=names,
                sequence=reports[member].sequence,
                quit=all(report.leaving for report in reports.values()),
            )
            for member, roles in plan.items()
        }

    @staticmethod
    def _place(number: int, wanted: str | None, reports: Mapping[str, MemberReport], plan: Any) -> None:
        def move(giver: str, taker: str, since: int) -> None:
            plan[giver]["release"][number] = taker
            plan[taker]["incoming"][number] = since

        owners = [member for member in reports if number in reports[member].owned]
        giving = [member for member in owners if number in reports[member].releasing]
        owner = next((member for member in owners if member not in giving), giving[0] if giving else None)
        if owner is None:
            expecting = [member for member in reports if number in reports[member].incoming]
            staying = [member for member in sorted(reports) if not reports[member].leaving]
            heirs = [*expecting, *([wanted] if wanted in staying else []), *staying]
            if heirs:
                plan[heirs[0]]["own"].add(number)
            return
        order = reports[owner].releasing.get(number)
        if order is not None and order.to in reports:
            move(owner, order.to, order.generation)
        elif wanted in (None, owner):
            plan[owner]["own"].add(number)
        elif number in reports[wanted].copies.ready:
            move(owner, wanted, THIS_GENERATION)
        else:
            plan[owner]["own"].add(number)
            plan[wanted]["preparing"].add(number)


class Ledger:
    """Who works on what, and the last record of each changelog partition when it is a release marker."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.owner: dict[int, str] = {}
        self.marker: dict[int, Order] = {}
        self.wrong: list[str] = []
        self.engines: list[Engine] = []

    def begin(self, number: int, name: str) -> None:
        with self.lock:
            before = self.owner.get(number)
            if before is not None:
                self.wrong.append(f"{name} begins with {number}, {before} works on it")
            self.owner[number] = name
            self.marker.pop(number, None)

    def end(self, number: int, name: str) -> None:
        with self.lock:
            if self.owner.get(number) != name:
                self.wrong.append(f"{name} ends with {number}, its owner is {self.owner.get(number)}")
            self.owner.pop(number, None)

    def mark(self, number: int, name: str, order: Order) -> None:
        """The last transaction of the donor is committed, with the marker."""
        with self.lock:
            self.end(number, name)
            self.marker[number] = order
            for engine in self.engines:
                engine.look(number)

    def expel(self, event: Assigned) -> None:
        """Who is not in the group any more works on nothing that counts: the broker refuses it. It has yet to hear."""
        with self.lock:
            for engine in self.engines:
                former = engine.membership.snapshot.generation < event.generation
                if engine.working and former and engine.name not in event.assignment.members:
                    engine.expelled()

    def works(self, name: str) -> frozenset[int]:
        with self.lock:
            return frozenset(number for number, owner in self.owner.items() if owner == name)


class Engine(Seat):
    """A member whose engine hands over and takes by itself, unless told otherwise.

    ``gives=False``: it keeps what it shall hand over until ``give``. ``hears=False``: it does not see markers until
    ``listen``. ``prepares=False``: copies are ready when ``prepared`` says so. ``tells=False``: the membership does not
    hear of what was handed over and taken, until ``tell``.
    """

    def __init__(
        self,
        ledger: Ledger,
        *arguments: Any,
        gives: bool = True,
        hears: bool = True,
        prepares: bool = True,
        tells: bool = True,
        **settings: Any,
    ) -> None:
        self.ledger = ledger
        self.gives, self.hears, self.prepares, self.tells = gives, hears, prepares, tells
        self.orders: dict[int, Order] = {}
        self.incoming: dict[int, int] = {}
        self.given: dict[int, Order] = {}
        self.working: set[int] = set()
        self.untold: list[Any] = []
        self.dead = self.void = False
        with ledger.lock:
            ledger.engines.append(self)
        super().__init__(*arguments, **settings)

    # ------------------------------------------------------------------ what it hears

    def _hear(self, event: GroupEvent) -> None:
        with self.ledger.lock:
            if self.dead:
                return
            if isinstance(event, Lost):
                self.void = False
                self._stop(self.working)
                self.orders, self.incoming, self.given = {}, {}, {}
            elif isinstance(event, Assigned) and not self.void:
                self._assigned(event)
            elif isinstance(event, Revoked):
                self._stop(event.partitions)
        super()._hear(event)

    def _stop(self, numbers: Any) -> None:
        for number in list(numbers):
            if number in self.working:
                self.working.remove(number)
                self.ledger.end(number, self.name)

    def _assigned(self, event: Assigned) -> None:
        self.ledger.expel(event)
        self.orders, self.incoming = dict(event.releasing), dict(event.incoming)
        for number in self.working - event.owned - event.incoming.keys():
            self.ledger.wrong.append(f"{self.name} works on {number}, which is not its own")
        for number in event.owned - self.working:
            order = event.releasing.get(number)
            if order is None or self.given.get(number) != order:  # withdrawn, or new: taken over
                self.given.pop(number, None)
                self._begin(number)
        for number in self.incoming:
            self.look(number)
        if self.gives:
            for number in sorted(self.orders):
                self.give(number)
        if self.prepares and event.assignment.preparing:
            self.prepared(*event.assignment.preparing)

    def seated(self) -> Engine:
        """It has its first assignment."""
        self.wait(lambda event: isinstance(event, Assigned))
        return self

    # ------------------------------------------------------------------ what it does

    def _begin(self, number: int) -> None:
        self.ledger.begin(number, self.name)
        self.working.add(number)

    def look(self, number: int) -> None:
        """Is the last record of the changelog a marker for us?"""
        marker, since = self.ledger.marker.get(number), self.incoming.get(number)
        if self.dead or self.void or not self.hears or marker is None or since is None or number in self.working:
            return
        if marker.to == self.membership.snapshot.member_id and marker.generation >= since:
            self._begin(number)
            self._tell(lambda: self.membership.took(number, self.membership.snapshot.incarnation))

    def listen(self) -> None:
        with self.ledger.lock:
            self.hears = True
            for number in list(self.incoming):
                self.look(number)

    def give(self, *numbers: int) -> None:
        """Commit the release markers."""
        with self.ledger.lock:
            for number in numbers or tuple(sorted(self.orders)):
                if number in self.working:
                    order = self.orders[number]
                    self.working.remove(number)
                    self.given[number] = order
                    self.ledger.mark(number, self.name, order)
                    self._tell(lambda number=number, order=order: self.membership.handed_over(number, order))

    def prepared(self, *numbers: int) -> None:
        with self.ledger.lock:
            ready = frozenset(numbers) | self.membership._state.holdings.copies.ready
        self.membership.report(Copies(ready=ready), announce=True)

    def _tell(self, message: Any) -> None:
        if self.tells:
            message()
        else:
            self.untold.append(message)

    def tell(self) -> None:
        with self.ledger.lock:
            self.tells = True
            for message in self.untold:
                message()
            self.untold = []

    def freeze(self) -> Callable[[], None]:
        """No heartbeats until what is returned is called. What it works on is of no use any more once the group
        expelled it: the broker sees to that, so the ledger does not count it from now on."""
        self.expelled()
        return super().freeze()

    def expelled(self) -> None:
        """Nothing that it works on, or hears of, counts until it hears that it lost its membership."""
        with self.ledger.lock:
            self._stop(self.working)
            self.void = True

    def is_heard(self) -> None:
        """Wait until the membership has heard all that it was told."""
        heard = threading.Event()
        if self.membership._client.post(heard.set):
            assert heard.wait(PATIENCE)

    def die(self) -> None:
        """Killed: it says nothing to the group, its session has to expire."""
        with self.ledger.lock:
            self.dead = True
            self._stop(self.working)
        if self.membership._coordinator is not None:
            self.membership._coordinator._generation.member_id = ""
        self.membership.close(3.0)

    def go(self) -> None:
        """An end in order: it works on nothing any more, and tells the group so."""
        with self.ledger.lock:
            self.dead = True
            self._stop(self.working)
        self.membership.close(3.0)

    def catch_up(self) -> None:
        """It does all that it was late with, and is not late any more."""
        self.tell()
        self.listen()
        with self.ledger.lock:
            self.gives = self.prepares = True
            self.give()
            last = self.assigned()[-1:]
            preparing = last[0].assignment.preparing if last else frozenset()
        if preparing:
            self.prepared(*preparing)


class MovingTable:
    """A group of engines, with one ledger."""

    def __init__(self, servers: str, prefix: str) -> None:
        self.servers, self.group, self.topic = servers, f"{prefix}group", make_topic(servers, f"{prefix}in")
        self.ledger = Ledger()

    def engine(self, name: str, strategy: Any, **settings: Any) -> Engine:
        assignors = strategy if isinstance(strategy, dict) else {"wishes": strategy}
        settings = {"assignors": assignors, "heartbeat_interval_ms": 200, **settings}
        return Engine(self.ledger, self.servers, self.group, self.topic, name, **settings)

    def settled(self, **shares: Any) -> None:
        """Wait until each works on its share, and all that was claimed is what is done."""

        def done() -> bool:
            with self.ledger.lock:
                engines = {engine.name: engine for engine in self.ledger.engines if not engine.dead}
                return all(
                    self.ledger.works(name) == frozenset(share) == engines[name].membership._state.holdings.owned
                    for name, share in shares.items()
                )

        try:
            until(done, "not settled")
        except AssertionError:
            raise AssertionError(f"not settled: {self.ledger.owner}") from None
        for engine in self.ledger.engines:
            if not engine.dead:
                engine.is_heard()
        assert done(), f"it did not last: {self.ledger.owner}"
        assert self.ledger.wrong == []
        if sum(len(frozenset(share)) for share in shares.values()) == PARTITIONS:
            assert len(self.ledger.owner) == PARTITIONS

    def even(self, *engines: Engine) -> None:
        """Wait until these share everything, by counts that differ by one at most, and no move is under way."""

        def done() -> bool:
            with self.ledger.lock:
                works = [self.ledger.works(engine.name) for engine in engines]
                quiet = all(
                    holdings.owned == work and not holdings.releasing and not holdings.incoming
                    for holdings, work in zip(
                        (engine.membership._state.holdings for engine in engines), works, strict=True
                    )
                ) and not any(engine.void for engine in engines)
            counts = [len(work) for work in works]
            return quiet and sum(counts) == PARTITIONS and max(counts) - min(counts) <= 1

        try:
            until(done, "not even")
        except AssertionError:
            raise AssertionError(f"not even: {self.ledger.owner}") from None
        assert self.ledger.wrong == []

    def restart(self, engine: Engine, strategy: Any) -> Engine:
        """As a deployment does it: it leaves, gives everything away, and comes back under the same name."""
        engine.membership.leave()
        until(lambda: not engine.working and not engine.membership._state.holdings.owned, "it keeps something")
        engine.dead = True
        engine.membership.close(3.0)
        return self.engine(engine.name, strategy).seated()


@contextmanager
def moving_table(servers: str, prefix: str) -> Iterator[MovingTable]:
    table = MovingTable(servers, prefix)
    try:
        yield table
        assert table.ledger.wrong == []
    finally:
        for engine in table.ledger.engines:
            engine.membership.close(3.0)
