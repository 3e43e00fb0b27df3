"""Lanes: the rows of a batch go out in several transactions, one per lane, from the tasks of one Spark job.

A batch has two rows here. With one lane both are in lane 0; with two lanes each has its own. A task may be started any
number of times, two at a time where ``copies`` says so; a driver that is dead is one that takes no step any more, while
its tasks may. What a single transaction goes through on its way to the broker is in ``spark_driver.py``; here a commit
is one step, and its answer may be lost.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from .search import Broken, put
from .spark_rules import LaneModel, Rule

LANES = 2
NOBODY = (-1, -1, -1)
ROWS = {(1, 0): 0b11, (1, 1): 0, (2, 0): 0b01, (2, 1): 0b10}
"""Bits of the rows in a lane, by (number of lanes, lane)."""

# A driver, in one batch. It fences every lane, reads all markers, pins every lane, and runs the tasks.
FENCING, DECIDE, PINNING, RUN, GONE = range(5)
# A task.
IDLE, READY, OPEN, SENT = range(4)


class Marker(NamedTuple):
    """The newest batch of a lane, how many lanes it was written with, and the driver that has pinned it last."""

    batch: int
    width: int
    token: int


class Lane(NamedTuple):
    """``holder``: who has initialised its transactional id last: (driver, lane, copy), or a driver that pins."""

    marker: Marker | None = None
    holder: tuple[int, int, int] = NOBODY


class Task(NamedTuple):
    """One attempt at a lane of a batch. ``cut``: its input ended early, which looks like an end."""

    at: int = IDLE
    batch: int = 0
    cut: bool = False


class Driver(NamedTuple):
    """A run of the query. ``lane``: how far pinning is; ``done``: bits of the lanes that have answered;
    ``tasks``: by lane and copy."""

    batch: int
    width: int
    tasks: tuple[tuple[Task, ...], ...]
    at: int = FENCING
    lane: int = 0
    done: int = 0


class World(NamedTuple):
    """Everything. ``written``: bits of the rows in Kafka, by batch."""

    lanes: tuple[Lane, ...]
    written: tuple[int, ...]
    finished: int
    drivers: tuple[Driver, ...]


Steps = list[tuple[str, World]]


class Lanes(LaneModel):
    """``search.Rules``: a sink that writes a batch in several transactions."""

    def initial(self) -> World:
        return World((Lane(),) * LANES, (0,) * self.config.batches, 0, ())

    def successors(self, world: World) -> tuple[Steps, Steps]:
        steps: Steps = []
        config = self.config
        for index, driver in enumerate(world.drivers):
            if driver.at != GONE:
                _driver_steps(world, self, index, steps)
            for lane in range(LANES):
                for copy in range(config.copies):
                    _Attempt(world, self, (index, lane, copy), steps).next()
        if len(world.drivers) < config.drivers and world.finished < config.batches:
            for width in config.widths:
                driver = Driver(world.finished, width, ((Task(),) * config.copies,) * LANES)
                told = f"driver {len(world.drivers)} starts at batch {world.finished} with lanes: {width}"
                steps.append((told, world._replace(drivers=(*world.drivers, driver))))
        return steps, []

    def done(self, world: World) -> bool:
        """Every batch is in Kafka, and Spark knows."""
        return world.finished == self.config.batches

    def stalled(self, world: World) -> str:
        return ""


def may_pin(markers: list[Marker | None], batch: int, width: int, out: Collection[Rule] = ()) -> bool:
    """Whether a driver goes on with its batch when it has read these markers."""
    there = [marker for marker in markers if marker is not None]
    ahead = any(marker.batch > batch for marker in there) and Rule.PIN_NOT_AHEAD not in out
    others = any(marker.batch == batch and marker.width != width for marker in there)
    return not ahead and not (others and Rule.LANES_IN_MARKER not in out)


def pinned(marker: Marker | None, index: int, width: int, out: Collection[Rule] = ()) -> Marker:
    """A lane's marker names this driver from here on; what it says of the rows stays."""
    batch = -1 if marker is None else marker.batch
    return Marker(batch, width if marker is None or Rule.PIN_KEEPS_ROWS in out else marker.width, index)


def _driver_steps(world: World, model: LaneModel, index: int, steps: Steps) -> None:
    driver, out = world.drivers[index], model.out
    markers = [lane.marker for lane in world.lanes]
    batch, width, lane = driver.batch, driver.width, driver.lane
    last = LANES if Rule.PIN_LEFT_LANES not in out else width
    further = lane + 1 < last

    def goes(told: str, after: World = world, /, **changes: object) -> None:
        changed = after.drivers[index]._replace(**changes)  # type: ignore[arg-type]
        steps.append((f"driver {index} {told}", after._replace(drivers=put(after.drivers, index, changed))))

    def holding(marker: Marker | None) -> World:
        return world._replace(lanes=put(world.lanes, lane, Lane(marker, (index, -1, -1))))

    if driver.at == FENCING:
        if Rule.PINNED in out:
            allowed = all(marker is None or marker.batch in (batch - 1, batch) for marker in markers)
            told = f"finds batch {batch} or the one before it in every lane that is not new"
            goes(told, at=RUN if allowed else GONE)
        elif Rule.PIN_FENCES in out:
            goes("does not fence the lanes", at=DECIDE)
        else:
            at = FENCING if further else DECIDE
            goes(f"fences lane {lane}", holding(markers[lane]), at=at, lane=lane + 1 if further else 0)
    elif driver.at == DECIDE:
        if may_pin(markers, batch, width, out):
            goes("reads the markers: it may pin", at=PINNING)
        else:
            goes("finds a newer batch in a lane, or its own with another number of lanes, and stops", at=GONE)
    elif driver.at == PINNING:
        if Rule.PIN_FENCES not in out and world.lanes[lane].holder != (index, -1, -1):
            goes("is fenced while it pins, and stops", at=GONE, lane=0)
            return
        marker = pinned(markers[lane], index, width, out)
        told = f"pins lane {lane}: batch {marker.batch}, lanes: {marker.width}"
        goes(told, holding(marker), at=PINNING if further else RUN, lane=lane + 1 if further else 0)
    elif driver.at == RUN:
        wanted = (1 << width) - 1
        enough = driver.done == wanted if Rule.ALL_LANES_DONE not in out else driver.done
        if enough:
            if world.written[batch] != 0b11:
                raise Broken(f"batch {batch} is finished in Spark, not all of its rows are in Kafka")
            after = world._replace(finished=max(world.finished, batch + 1))
            over = batch + 1 == model.config.batches
            told = f"has batch {batch} logged as finished by Spark"
            goes(told, after, at=GONE if over else FENCING, batch=batch if over else batch + 1, done=0)


def may_write(marker: Marker | None, index: int, batch: int, width: int, out: Collection[Rule] = ()) -> bool | None:
    """What a task does with its lane of the batch by the marker that it has read behind the fence: ``True``: it writes,
    ``False``: it is there already, ``None``: the task is refused."""
    if Rule.PINNED in out:
        allowed = True
    else:
        allowed = marker is not None and (marker.token == index or Rule.PIN_NAMES_RUN in out)
    there = -1 if marker is None else marker.batch
    same = marker is None or marker.width == width or Rule.LANES_IN_MARKER in out
    if allowed and there == batch and same:
        return False
    return True if allowed and there < batch else None


class _Attempt:
    """One attempt at a lane: what it can do next, collected in ``steps``."""

    def __init__(self, world: World, model: LaneModel, who: tuple[int, int, int], steps: Steps) -> None:
        self._world = world
        self._model = model
        self._who = who
        self._steps = steps
        self._index, self._number, self._copy = who
        self._driver = world.drivers[self._index]
        self._lane = world.lanes[self._number]
        self._task = self._driver.tasks[self._number][self._copy]
        self._current = self._task.batch == self._driver.batch and self._driver.at == RUN
        """Its batch is the one that its driver waits for."""

    def next(self) -> None:
        """Add every possible step."""
        driver, task = self._driver, self._task
        if task.at == IDLE:
            if driver.at == RUN and self._number < driver.width and not driver.done >> self._number & 1:
                lane = self._lane._replace(holder=self._who)
                after = self._world._replace(lanes=put(self._world.lanes, self._number, lane))
                self._goes("has a new producer, init_transactions, for", Task(READY, driver.batch), after)
            return
        self._goes("dies or is fenced with", Task())
        if task.at == SENT:
            self._goes("is done, the driver hears of", Task(), done=self._done())
        elif self._lane.holder == self._who:
            if task.at == READY:
                self._decide(self._lane.marker)
            elif not task.cut or Rule.END_ROW in self._model.out:
                after = _committed(self._world, self._index, task, self._number)
                self._goes("commits", Task(SENT, task.batch), after)

    def _goes(self, told: str, changed: Task, after: World | None = None, **changes: object) -> None:
        base = self._world if after is None else after
        copies = put(self._driver.tasks[self._number], self._copy, changed)
        tasks = put(self._driver.tasks, self._number, copies)
        driver = self._driver._replace(tasks=tasks, **changes)  # type: ignore[arg-type]
        batch = changed.batch if self._task.at == IDLE else self._task.batch
        state = base._replace(drivers=put(base.drivers, self._index, driver))
        what = f"driver {self._index}, lane {self._number}, attempt {self._copy}"
        self._steps.append((f"{what} {told} batch {batch}", state))

    def _done(self) -> int:
        return self._driver.done | 1 << self._number if self._current else self._driver.done

    def _decide(self, marker: Marker | None) -> None:
        task, driver = self._task, self._driver
        writes = may_write(marker, self._index, task.batch, driver.width, self._model.out)
        if writes:
            self._goes("sends the rows of", task._replace(at=OPEN))
            if self._model.config.truncated:
                self._goes("(whose input has ended early) sends a part of", task._replace(at=OPEN, cut=True))
        elif writes is False:
            self._goes("finds by the marker that it is there:", Task(), done=self._done())
        elif task.batch == driver.batch:
            self._goes("is not allowed to write, and the query stops:", Task(), at=GONE)
        else:
            self._goes("ends, it is over:", Task())


def _committed(world: World, index: int, task: Task, number: int) -> World:
    driver = world.drivers[index]
    rows = ROWS[driver.width, number]
    if task.cut:
        raise Broken(f"a part of lane {number} of batch {task.batch} is committed")
    if world.written[task.batch] & rows:
        raise Broken(f"rows of batch {task.batch} are committed twice")
    if task.batch and world.written[task.batch - 1] & rows != rows:
        raise Broken(f"rows of batch {task.batch} are committed, those before them are not")
    lane = Lane(Marker(task.batch, driver.width, index), NOBODY)
    written = put(world.written, task.batch, world.written[task.batch] | rows)
    return world._replace(lanes=put(world.lanes, number, lane), written=written)
