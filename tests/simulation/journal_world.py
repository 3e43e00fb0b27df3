"""The real writer of a journal over a simulated broker, a step at a time, in an order from a seed.

Each leader is a thread that runs only when the world lets it. At each step it may be killed, frozen (by not being
chosen), fenced, or have its answer lost; requests to commit arrive late; the group elects another one, and a deposed
leader may not notice. What each append was answered is noted, and judged by the log at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import pytest

from streams.core.journal import LogOrder, Payload, SettledAppend, TermState
from streams.errors import BrokerUnavailable, ConfigError, JournalError, NotLeading, TopicError, TransactionFailed
from streams.journal import writer as module
from streams.journal.writer import TermWriter
from streams.kafka.questions.admin import Watermarks
from streams.records import IncomingRecord, Output
from tests.simulation.turns import Process, TurnWorld

APPENDS, FAULTS = 18, 9
PATIENCE = 60
"""Steps of the world, as all its seconds."""
FAILURES: Final = [BrokerUnavailable, BrokerUnavailable, ConfigError, TopicError]
"""Of a request; a right that is taken away for a while is among them."""
OPEN, COMMITTED, ABORTED = "open", "committed", "aborted"


class Transaction:
    """The records of one transaction, at their offsets, and its end."""

    def __init__(self, epoch: int, records: list[IncomingRecord]) -> None:
        self.epoch, self.records, self.state = epoch, records, OPEN


class SimulatedClaim:
    """The claim of the one partition, as ``runtime.claim.Claim``."""

    where, topic = "ledger[0]", "ledger"

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world: World = process.world
        self._epoch = -1

    def _step(self) -> None:
        self._process.step()
        if self._world.luck():
            raise self._world.rng.choice(FAILURES)("nothing answers")

    def take(self) -> Watermarks:
        world = self._world
        self._step()
        early = self._marks()
        if "J1" in world.without:
            self._process.step()
        world.epoch += 1
        self._epoch = world.epoch
        for one in world.transactions:
            if one.state == OPEN:
                world.close(one, ABORTED)
        self._step()  # the answer may be lost
        return early if "J1" in world.without else self._marks()

    def log_range(self) -> Watermarks:
        self._step()
        return self._marks()

    def _marks(self) -> Watermarks:
        return Watermarks(0, self._world.end, self._world.end)

    def read(self, start: int, end: int) -> list[IncomingRecord]:
        self._step()
        found = []
        for one in self._world.transactions:
            for record in one.records:
                if start <= record.offset < end:
                    if one.state == OPEN:
                        raise BrokerUnavailable("an open transaction holds the end of the log back")
                    if one.state == COMMITTED:
                        found.append(record)
        return found

    def append(self, outputs: Sequence[Output]) -> int:
        world = self._world
        self._check("flush")
        begin = world.end
        records = [
            IncomingRecord(self.topic, 0, begin + index, output.key, output.value, output.headers)
            for index, output in enumerate(outputs)
        ]
        world.transactions.append(one := Transaction(self._epoch, records))
        world.end += len(records)
        self._process.step()
        if world.luck():
            if world.rng.random() < 0.5:
                world.late.append(one)  # the request to commit is on its way
            raise TransactionFailed("commit_transaction", "_TIMED_OUT", "unknown")
        self._check("commit_transaction")
        if one.state == OPEN:
            world.close(one, COMMITTED)
        if one.state == ABORTED:
            raise TransactionFailed("commit_transaction", "PRODUCER_FENCED", "fenced")
        self._process.step()
        if world.luck():
            raise TransactionFailed("commit_transaction", "_TIMED_OUT", "unknown")
        return begin + len(records)

    def _check(self, call: str) -> None:
        self._process.step()
        if self._epoch != self._world.epoch:
            raise TransactionFailed(call, "PRODUCER_FENCED", "fenced")


class Guesses(TermWriter):
    """Rule J3 taken out: a failure is taken for an abort, once the claim is taken again."""

    def _settle(self, first: int, count: int) -> SettledAppend:
        answer = super()._settle(first, count)
        return SettledAppend((), answer.newer)


class Hopes(TermWriter):
    """Rule J3 taken out, the other way: a failure is taken for a commit."""

    def _settle(self, first: int, count: int) -> SettledAppend:
        answer = super()._settle(first, count)
        return (
            answer
            if answer.offsets
            else SettledAppend(tuple(range(self.position, self.position + count)), answer.newer)
        )


class GoesOn(TermWriter):
    """Rule J5 taken out: a younger term in the log ends nothing, if the group says that this process leads."""

    def _read_outcome(self, first: int, count: int, *, is_last: bool) -> SettledAppend | None:
        answer = super()._read_outcome(first, count, is_last=is_last)
        self.state, self.reason = TermState.SETTLING, ""
        return answer


WITHOUT: Final[dict[str, type[TermWriter]]] = {"J3": Guesses, "J3b": Hopes, "J5": GoesOn}


class LeaderLoop:
    """What one process does: terms, and appends in each, as ``Candidate`` and the term's pump do it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world: World = process.world
        self._claim: Any = SimulatedClaim(process)

    def run(self) -> None:
        while True:
            if (term := self._begin()) is None:
                return
            try:
                while self._world.left:
                    self._append(term)
                return
            except NotLeading:
                if self._process.is_over:
                    return

    def _begin(self) -> TermWriter | None:
        while not self._process.is_over:
            tenure: Any = self._process
            term = self._world.writer_class(self._claim, tenure, PATIENCE)
            term._given_up = SimpleNamespace(wait=self._wait)  # type: ignore[assignment]
            try:
                self._world.tokens.append(term.begin())
                if self._process.is_confirmed():
                    return term
            except (TransactionFailed, *FAILURES):  # a new process begins again, too
                pass
            while not self._process.wait(0) and not self._process.is_confirmed():
                pass
        return None

    def _append(self, term: TermWriter) -> None:
        world = self._world
        numbers = [world.next_append() for _ in range(world.rng.choice([1, 1, 2, 3])) if world.left]
        try:
            offsets = term.commit([Payload([], b"%d" % number) for number in numbers])
        except NotLeading:
            world.refused.update(numbers)
            raise
        world.acknowledged.update(zip(numbers, offsets, strict=True))

    def _wait(self, seconds: float) -> bool:
        self._process.step()
        return False


class World(TurnWorld):
    """A broker, and what the leaders append."""

    most_steps, bad_luck = 6_000, 0.06

    def __init__(self, seed: int, without: Iterable[str] = ()) -> None:
        super().__init__(seed, without, FAULTS)
        self.writer_class = next((WITHOUT[rule] for rule in self.without if rule in WITHOUT), TermWriter)
        self.epoch = self.end = 0
        self.left = APPENDS
        self.transactions: list[Transaction] = []
        self.late: list[Transaction] = []
        self.tokens: list[int] = []
        self.acknowledged: dict[int, int] = {}
        self.refused: set[int] = set()

    def loop_of(self, process: Process) -> LeaderLoop:
        return LeaderLoop(process)

    def next_append(self) -> int:
        self.left -= 1
        return APPENDS - self.left

    def close(self, one: Transaction, state: str) -> None:
        one.state = state
        self.end += 1  # the marker

    def actions(self) -> list[tuple[float, Callable[[], None]]]:
        return [(0.90, self.let_one_run), (0.95, self._deliver), (0.98, self.elect_another), (1.0, self.kill)]

    def is_quiet(self) -> bool:
        return not self.left and all(process.is_done for process in self.processes)

    def may_fail(self) -> bool:
        return self.faults > 0 and self.left > 0

    def let_one_run(self) -> None:
        if not self.left:  # sessions end at last, also those of processes that were cut off
            for process in self.processes:
                process.is_over = process.is_over or process is not self.elected
        super().let_one_run()

    def _deliver(self) -> None:
        if self.late:
            one = self.late.pop(self.rng.randrange(len(self.late)))
            if one.epoch == self.epoch and one.state == OPEN:
                self.close(one, COMMITTED)

    def elect_another(self) -> None:
        unaware = [one for one in self.processes if not (one.is_over or one.is_done or one is self.elected)]
        if self.may_fail() and unaware and self.rng.random() < 0.6:
            self.faults -= 1
            self.elected = self.rng.choice(unaware)  # by a coordinator without its memory: one leads again
        else:
            super().elect_another()

    def judge(self) -> None:
        log = [record for one in self.transactions if one.state == COMMITTED for record in one.records]
        order = LogOrder()
        there: dict[int, int] = {}
        for record in sorted(log, key=lambda record: record.offset):
            try:
                mark = order.see(record)
            except JournalError as error:
                raise AssertionError(f"J1, J3: {error}") from error
            if mark.number:
                number = int(record.value or b"")
                assert number not in there, f"J1: append {number} is there twice"
                there[number] = record.offset
        lost = {number: at for number, at in self.acknowledged.items() if there.get(number) != at}
        assert not lost, f"J2: acknowledged, and not there: {lost}"
        assert not self.refused & there.keys(), f"J2: refused, and there: {self.refused & there.keys()}"
        assert len(set(self.tokens)) == len(self.tokens)


def simulate(seed: int, monkeypatch: pytest.MonkeyPatch, without: Iterable[str] = ()) -> None:
    """Run one world. No time passes in it: who runs next is drawn, and steps are its seconds."""
    world = World(seed, without)
    clock = SimpleNamespace(monotonic=lambda: world.steps, time=lambda: 0)
    monkeypatch.setattr(module, "time", clock)
    world.run()
