"""The relay's real loop over a simulated database and a simulated broker, a step at a time, in an order from a seed.

Each relay is a thread that runs only when the world lets it: everything that it does to database, broker or group is a
step, at which it may be killed, frozen (by not being chosen), fenced, or have its answer lost. Rows are committed
meanwhile, late ones too; the database fails over and loses its newest changes; requests to commit arrive late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import pytest

from streams import RelayConfig
from streams.core.outbox import RowId
from streams.errors import BrokerUnavailable, RecordsRefused, TransactionFailed
from streams.kafka.questions.admin import Watermarks
from streams.outbox import shard
from streams.outbox.database import DatabaseLost, OutboxAbout, StashedRow
from streams.records import Output, RefusedRecord
from tests.simulation.turns import Process, TurnWorld

ROWS, KEYS, FAULTS = 24, 4, 8
CONFIG = RelayConfig(name="sim", database="postgresql://nowhere/x", bootstrap_servers="nowhere:1", batch_rows=3)


class Row(NamedTuple):
    """``number``: of its key, in the order of the commits. ``serial``: of all rows ever made."""

    id: RowId
    key: str
    number: int
    topic: str
    serial: int


class State:
    """What the database has committed."""

    def __init__(self) -> None:
        self.rows: dict[RowId, Row] = {}
        self.parked: dict[RowId, Row] = {}
        self.noted = 0
        self.next_id = 1
        self.numbers: dict[str, int] = defaultdict(int)
        self.alive: set[int] = set()  # serials of rows that were committed, and not lost since


class Session:
    """A session of the simulated database."""

    def __init__(self, process: Process) -> None:
        self._process, self._world = process, process.world
        self._step()
        self._generation = self._world.database_generation
        self._is_fresh = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def close(self) -> None:
        pass

    def _step(self) -> None:
        self._process.step()
        if self._world.luck():
            raise DatabaseLost("it was cut off")

    def _call(self) -> State:
        self._step()
        if self._generation != self._world.database_generation:
            raise DatabaseLost("it was ended")
        return self._world.state

    def about(self) -> OutboxAbout:
        self._call()
        return OutboxAbout("sim", 1, 1, "topic", 0)

    def adopt(self, topic_id: str) -> str:
        return topic_id

    def noted_serial(self, shard: int) -> int:
        return self._call().noted

    def fetch(self, shard: int, rows: int, size: int) -> list[StashedRow]:
        state = self._call()
        held = {row.key for row in state.parked.values()}
        ready = [row for _, row in sorted(state.rows.items()) if row.key not in held][:rows]
        self._process.step()
        return [
            StashedRow(row.id, Output(row.topic, str(row.serial).encode(), row.key.encode(), None, -1, 1, 0, index))
            for index, row in enumerate(ready)
        ]

    def delete(self, shard: int, rows: Sequence[RowId], serial: int) -> None:
        state = self._call()
        missing, self._is_fresh = "O5" in self._world.without and self._is_fresh, False
        if not missing:
            for row in rows:
                for place in (state.rows, state.parked):
                    place.pop(row, None)
                    if "O8" in self._world.without:
                        for other in [other for other in place if other.id == row.id]:
                            del place[other]
        state.noted = max(state.noted, serial)
        self._step()  # the answer may be lost

    def park(self, shard: int, row: RowId, error: str, first_seconds: float, longest_seconds: float) -> None:
        state = self._call()
        if (found := state.rows.pop(row, None)) is not None:
            state.parked[row] = found

    def retry_parked(self, shard: int) -> int:
        state, count = self._world.state, len(self._world.state.parked)
        if self._generation == self._world.database_generation:
            state.rows.update(state.parked)
            state.parked.clear()
        return count

    def listen(self) -> None:
        pass

    def show_owner(self, lock_class: int, shard: int) -> None:
        pass

    def fall_asleep(self, lock_class: int, shard: int) -> bool:
        return False


class FakeClaim:
    """The claim of the one partition at the simulated broker."""

    where, topic, partition = "sim.outbox[0]", "sim.outbox", 0

    def __init__(self, process: Process) -> None:
        self._process, self._world = process, process.world
        self._epoch = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def identity(self) -> tuple[str, int]:
        return "topic", 1

    def take(self) -> Watermarks:
        world = self._world
        self._step()
        early = len(world.positions)
        if "O1" in world.without:
            self._process.step()
        world.epoch += 1
        self._epoch = world.epoch
        self._step()
        end = early if "O1" in world.without else len(world.positions)
        return Watermarks(0, end, end)

    def read(self, start: int, end: int) -> list[Any]:
        self._step()
        return [
            SimpleNamespace(key=output.key, value=output.value, timestamp_ms=0, where=f"{self.where}@{start + number}")
            for number, output in enumerate(self._world.positions[start:end])
        ]

    def append(self, outputs: Sequence[Output]) -> int:
        world = self._world
        self._check()
        refused = [
            RefusedRecord(output.topic, "REFUSED", "refused", True, output)
            for output in outputs
            if output.topic == "bad" and world.refuses
        ]
        if refused:
            raise RecordsRefused("flush", refused)
        if world.luck():
            world.late.append((self._epoch, list(outputs)))  # it may still arrive
            self._process.step()
            if "O4" in world.without:
                return len(world.positions)
            raise TransactionFailed("commit_transaction", "_TIMED_OUT", "unknown")
        self._check()
        if "O2" in world.without:
            world.commit(outputs[:-1])
            self._process.step()
            world.commit(outputs[-1:])
        else:
            world.commit(outputs)
        self._process.step()
        if world.luck():
            raise TransactionFailed("commit_transaction", "_TIMED_OUT", "unknown")
        return len(world.positions)

    def _check(self) -> None:
        self._process.step()
        if self._epoch != self._world.epoch:
            raise TransactionFailed("flush", "PRODUCER_FENCED", "fenced")

    def _step(self) -> None:
        self._process.step()
        if self._world.luck():
            raise BrokerUnavailable("nothing answers")


class DeletesFirst(shard.ShardLoop):
    """Rule O3 taken out: rows are deleted before they are committed."""

    def _relay(self, session: Any, claim: Any, positions: Any, rows: list[StashedRow], serial: int) -> None:
        session.delete(self.shard, [row.row for row in rows], serial)
        super()._relay(session, claim, positions, rows, serial)


class World(TurnWorld):
    """A database and a broker, and the rows that writers commit."""

    most_steps, bad_luck = 5_000, 0.04

    def __init__(self, seed: int, without: Iterable[str] = ()) -> None:
        super().__init__(seed, without, FAULTS)
        self.state = State()
        self.replica = deepcopy(self.state)
        self.database_generation = self.epoch = 0
        self.positions: list[Output] = []
        self.sent: list[int] = []
        self.late: list[tuple[int, list[Output]]] = []
        self.open: list[Row] = []  # rows of transactions that are not committed yet; their keys are locked
        self.made = 0
        self.keys: dict[int, str] = {}
        self.refuses = True

    def loop_of(self, process: Process) -> shard.ShardLoop:
        session: Any = lambda database, table: Session(process)  # noqa: E731
        claim: Any = lambda *arguments: FakeClaim(process)  # noqa: E731
        double: Any = process
        loop = DeletesFirst if "O3" in self.without else shard.ShardLoop
        return loop(CONFIG, double, lambda event: None, session=session, claim=claim)

    def commit(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if output.topic == FakeClaim.topic:
                self.positions.append(output)
            else:
                self.sent.append(int(output.value or b""))

    def actions(self) -> list[tuple[float, Callable[[], None]]]:
        return [
            (0.80, self.let_one_run),
            (0.90, self._write),
            (0.93, self._replicate),
            (0.95, self._deliver),
            (0.97, self.elect_another),
            (0.985, self.kill),
            (1.0, self._fail_over),
        ]

    def is_quiet(self) -> bool:
        is_made = self.made == ROWS and not self.open
        if is_made:
            self.faults, self.refuses = min(self.faults, 2), False
        return is_made and not (self.state.rows or self.state.parked or self.late)

    def _write(self) -> None:
        if self.open and self.rng.random() < 0.6:
            row = self.open.pop(self.rng.randrange(len(self.open)))
            self.state.numbers[row.key] += 1
            self.state.rows[row.id] = row._replace(number=self.state.numbers[row.key])
            self.state.alive.add(row.serial)
        elif self.made < ROWS:
            free = sorted({f"k{number}" for number in range(KEYS)} - {row.key for row in self.open})
            if free:
                key = self.rng.choice(free)
                row_id = RowId(self.state.next_id, self.rng.getrandbits(31))
                self.state.next_id += 1
                topic = "bad" if self.rng.random() < 0.1 else "good"
                self.open.append(Row(row_id, key, 0, topic, self.made))
                self.keys[self.made] = key
                self.made += 1

    def _replicate(self) -> None:
        self.replica = deepcopy(self.state)

    def _deliver(self) -> None:
        if self.late:
            epoch, outputs = self.late.pop(self.rng.randrange(len(self.late)))
            if epoch == self.epoch:
                self.commit(outputs)

    def _fail_over(self) -> None:
        if self.faults <= 0:
            return
        self.faults -= 1
        self.database_generation += 1
        if self.rng.random() < 0.5:
            self.state = self.replica  # deletes come back, newest rows and the counter of ids are lost
            self.replica = deepcopy(self.state)
            self.open.clear()
        # The rest of the transactions that were open is lost, too.

    def judge(self) -> None:
        assert len(self.sent) == len(set(self.sent)), f"sent twice: {self.sent}"
        lost = self.state.alive - set(self.sent)
        assert not lost, f"never sent: {lost}"
        order: dict[str, list[int]] = defaultdict(list)
        for serial in self.sent:
            if serial in self.state.alive:
                order[self.keys[serial]].append(serial)
        assert all(serials == sorted(serials) for serials in order.values()), f"misplaced: {dict(order)}"


def simulate(seed: int, monkeypatch: pytest.MonkeyPatch, without: Iterable[str] = ()) -> None:
    """Run one world. No time passes in it: who runs next is drawn."""
    for name in ("_BUSY_SECONDS", "_IDLE_SECONDS", "_RETRY_SECONDS"):
        monkeypatch.setattr(shard, name, 0.0)
    monkeypatch.setattr(shard, "_AWAKE_SECONDS", float("inf"))
    World(seed, without).run()
