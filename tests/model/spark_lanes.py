"""Lanes: the rows of a batch go out in several transactions, one per lane, from the tasks of one Spark job.

A batch has two rows here. With one lane both are in lane 0; with two lanes each has its own. A task may be started any
number of times, two at a time where ``copies`` says so; a driver that is dead is one that takes no step any more, while
its tasks may. What a single transaction goes through on its way to the broker is in ``spark_driver.py``; here a commit
is one step, and its answer may be lost.
"""

from __future__ import annotations

from typing import NamedTuple

from .spark_rules import LaneModel, Rule
from .state import Broken, put

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


Steps = list[tuple[tuple[object, ...], World]]

ACTIONS = {
    "start": "driver {0} starts at batch {1} with lanes: {2}",
    "not_pinned": "driver {0} finds batch {1} or the one before it in every lane that is not new",
    "pin_fence": "driver {0} fences lane {1}",
    "pin_decide": "driver {0} reads the markers: it may pin",
    "pin_refused": "driver {0} finds a newer batch in a lane, or its own with another number of lanes, and stops",
    "pin": "driver {0} pins lane {1}: batch {2}, lanes: {3}",
    "pin_fenced": "driver {0} is fenced while it pins, and stops",
    "init": "driver {0}, lane {1}, attempt {2}: new producer, init_transactions (batch {3})",
    "skip": "driver {0}, lane {1}, attempt {2}: the marker says that batch {3} is there",
    "begin": "driver {0}, lane {1}, attempt {2}: sends the rows of batch {3}",
    "begin_cut": "driver {0}, lane {1}, attempt {2}: sends a part of batch {3}; its input has ended early",
    "refused": "driver {0}, lane {1}, attempt {2}: the marker does not allow batch {3}; the query stops",
    "stale": "driver {0}, lane {1}, attempt {2}: ends, batch {3} is over",
    "commit": "driver {0}, lane {1}, attempt {2}: batch {3} is committed",
    "ok": "driver {0}, lane {1}, attempt {2}: the driver hears of it (batch {3})",
    "fails": "driver {0}, lane {1}, attempt {2}: dies or is fenced (batch {3})",
    "finish": "Spark logs batch {1} of driver {0} as finished",
}


def initial(model: LaneModel) -> World:
    """Nothing has run yet."""
    return World((Lane(),) * LANES, (0,) * model.config.batches, 0, ())


def successors(world: World, model: LaneModel) -> tuple[Steps, Steps]:
    """(steps, luck) out of ``world``. Raises Broken when an invariant does not hold."""
    steps: Steps = []
    config = model.config
    for index, driver in enumerate(world.drivers):
        if driver.at != GONE:
            _driver_steps(world, model, index, steps)
        for lane in range(LANES):
            for copy in range(config.copies):
                _Attempt(world, model, (index, lane, copy), steps).next()
    if len(world.drivers) < config.drivers and world.finished < config.batches:
        for width in config.widths:
            driver = Driver(world.finished, width, ((Task(),) * config.copies,) * LANES)
            label = ("start", len(world.drivers), world.finished, width)
            steps.append((label, world._replace(drivers=(*world.drivers, driver))))
    return steps, []


def done(world: World, model: LaneModel) -> bool:
    """Every batch is in Kafka, and Spark knows."""
    return world.finished == model.config.batches


def describe(label: tuple[object, ...]) -> str:
    """One step as a sentence."""
    return ACTIONS[str(label[0])].format(*label[1:])


def _driver_steps(world: World, model: LaneModel, index: int, steps: Steps) -> None:
    driver, out = world.drivers[index], model.out
    markers = [lane.marker for lane in world.lanes]
    batch, width, lane = driver.batch, driver.width, driver.lane

    def goes(label: tuple[object, ...], after: World = world, /, **changes: object) -> None:
        changed = after.drivers[index]._replace(**changes)  # type: ignore[arg-type]
        steps.append(((label[0], index, *label[1:]), after._replace(drivers=put(after.drivers, index, changed))))

    last = LANES if Rule.PIN_LEFT_LANES not in out else width
    if driver.at == FENCING:
        if Rule.PINNED in out:
            allowed = all(marker is None or marker.batch in (batch - 1, batch) for marker in markers)
            goes(("not_pinned", batch), at=RUN if allowed else GONE)
        elif Rule.PIN_FENCES in out:
            goes(("pin_fence", lane), at=DECIDE)
        else:
            after = world._replace(lanes=put(world.lanes, lane, Lane(markers[lane], (index, -1, -1))))
            further = lane + 1 < last
            goes(("pin_fence", lane), after, at=FENCING if further else DECIDE, lane=lane + 1 if further else 0)
    elif driver.at == DECIDE:
        there = [marker for marker in markers if marker is not None]
        ahead = any(marker.batch > batch for marker in there) and Rule.PIN_NOT_AHEAD not in out
        others = any(marker.batch == batch and marker.width != width for marker in there)
        if ahead or (others and Rule.LANES_IN_MARKER not in out):
            goes(("pin_refused",), at=GONE)
        else:
            goes(("pin_decide",), at=PINNING)
    elif driver.at == PINNING:
        _pin(world, model, index, last, steps)
    elif driver.at == RUN:
        wanted = (1 << width) - 1
        enough = driver.done == wanted if Rule.ALL_LANES_DONE not in out else driver.done
        if enough:
            if world.written[batch] != 0b11:
                raise Broken(f"batch {batch} is finished in Spark, not all of its rows are in Kafka")
            after = world._replace(finished=max(world.finished, batch + 1))
            over = batch + 1 == model.config.batches
            goes(("finish", batch), after, at=GONE if over else FENCING, batch=batch if over else batch + 1, done=0)


def _pin(world: World, model: LaneModel, index: int, last: int, steps: Steps) -> None:
    """One lane's marker names this driver from here on; what it says of the rows stays."""
    driver = world.drivers[index]
    lane, fenced_first = driver.lane, Rule.PIN_FENCES not in model.out
    marker = world.lanes[lane].marker

    def goes(label: tuple[object, ...], after: World, at: int, lane: int) -> None:
        drivers = put(after.drivers, index, driver._replace(at=at, lane=lane))
        steps.append((label, after._replace(drivers=drivers)))

    if fenced_first and world.lanes[lane].holder != (index, -1, -1):
        goes(("pin_fenced", index), world, GONE, 0)
        return
    pinned = Marker(-1, driver.width, index) if marker is None else marker._replace(token=index)
    if Rule.PIN_KEEPS_ROWS in model.out:
        pinned = Marker(pinned.batch, driver.width, index)
    after = world._replace(lanes=put(world.lanes, lane, Lane(pinned, (index, -1, -1))))
    further = lane + 1 < last
    goes(("pin", index, lane, *pinned), after, PINNING if further else RUN, lane + 1 if further else 0)


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
                self._goes("init", Task(READY, driver.batch), after)
            return
        self._goes("fails", Task())
        if task.at == SENT:
            self._goes("ok", Task(), done=self._done())
        elif self._lane.holder == self._who:
            if task.at == READY:
                self._decide(self._lane.marker)
            elif not task.cut or Rule.END_ROW in self._model.out:
                after = _committed(self._world, self._index, task, self._number)
                self._goes("commit", Task(SENT, task.batch), after)

    def _goes(self, label: str, changed: Task, after: World | None = None, **changes: object) -> None:
        base = self._world if after is None else after
        copies = put(self._driver.tasks[self._number], self._copy, changed)
        tasks = put(self._driver.tasks, self._number, copies)
        driver = self._driver._replace(tasks=tasks, **changes)  # type: ignore[arg-type]
        batch = changed.batch if self._task.at == IDLE else self._task.batch
        state = base._replace(drivers=put(base.drivers, self._index, driver))
        self._steps.append(((label, *self._who, batch), state))

    def _done(self) -> int:
        return self._driver.done | 1 << self._number if self._current else self._driver.done

    def _decide(self, marker: Marker | None) -> None:
        """What to do with this lane of the batch, by the marker that was read behind the fence."""
        out, task = self._model.out, self._task
        if Rule.PINNED not in out and Rule.PIN_NAMES_RUN not in out:
            allowed = marker is not None and marker.token == self._index
        else:
            allowed = marker is not None or Rule.PINNED in out
        batch = -1 if marker is None else marker.batch
        same = marker is None or marker.width == self._driver.width or Rule.LANES_IN_MARKER in out
        if allowed and batch == task.batch and same:
            self._goes("skip", Task(), done=self._done())
        elif allowed and batch < task.batch:
            self._goes("begin", task._replace(at=OPEN))
            if self._model.config.truncated:
                self._goes("begin_cut", task._replace(at=OPEN, cut=True))
        elif task.batch == self._driver.batch:
            self._goes("refused", Task(), at=GONE)
        else:
            self._goes("stale", Task())


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
