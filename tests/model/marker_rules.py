"""Markers that a broker leaves out, as a model: one transactional id, two partitions, and who ends what hangs.

A broker that is killed may count a prepared transaction as complete without some of its markers. What is open in a
partition is ended by the next marker of its producer there, whichever transaction that belongs to. Transactions are of
version 2, so each has an epoch of its own (its serial here). Luck is where a transaction writes to, how it ends, and
when a broker dies.

``kafka/writing/last_transaction.py`` and ``kafka/questions/hanging_transactions.py`` are the code. Not in it: a process
that dies and forgets its last transaction; version 1; compaction of the coordinators' log.
"""

from __future__ import annotations

from enum import Enum
from itertools import chain, combinations
from typing import NamedTuple

from tests.model.search import Broken, Steps, put

PLACES = (0, 1)


class MarkerConfig(NamedTuple):
    """``serials``: transactions; ``kills``: of the broker. ``operates``: somebody else looks after what hangs;
    ``reads_log``: that one can read the log of the coordinators."""

    name: str
    serials: int = 2
    kills: int = 1
    operates: bool = True
    reads_log: bool = True


ALONE = MarkerConfig("nobody else", operates=False)
TWICE = MarkerConfig("nobody else, two kills", kills=2, operates=False)
LOG = MarkerConfig("with the log")
MARKERS = MarkerConfig("without the log", reads_log=False)
STANDARD = (ALONE, TWICE, LOG, MARKERS)
DEEP = (MarkerConfig("three, two kills", serials=3, kills=2), MarkerConfig("no log", 3, 2, reads_log=False))


class MarkerRule(Enum):
    """A rule: what happens when it is out, and the world where it is missed."""

    H1_BY_PROOF = ("what hangs is aborted", LOG)
    H2_LISTED_IS_LEFT = ("what a coordinator lists is ended, too", LOG)
    H3_OF_THIS_EPOCH = ("any commit of the producer elsewhere counts for it", MARKERS)
    H4_NOWHERE_IS_NO_PROOF = ("without the log, no commit elsewhere means an abort", MARKERS)
    H5_AGAIN_WHEN_OPENED = ("a slot that is opened again goes on to its next transaction", TWICE)
    H6_AGAIN_WHEN_LOST = ("a slot that lost its connection, and was not opened again, goes on", ALONE)
    H7_AGAIN_WHEN_KNOWN = ("a commit without an answer is ended again as an abort", ALONE)
    H8_LAST_THAT_BEGAN = ("a transaction that was sent, and did not begin, is the last one", ALONE)


Markers = tuple[tuple[frozenset[int], int, bool], ...]
"""Of one partition: which transactions each one ended, the epoch before its own, and whether it is a commit."""


class World(NamedTuple):
    """``status``: of the transaction ``serial`` at its coordinator: done, ongoing, or how it is prepared to end, with
    the markers that are ``left``. ``ends``: by serial, what the coordinator decided. ``slot``: idle, waits (one is
    sent, and begins when the markers of the last one are written), running, asked (an end without an answer yet),
    closed, unsure (opened again, outcome not known). ``last``: serial, places, outcome as the slot knows it. ``owes``:
    it is to be ended again; ``again``: that is under way."""

    serial: int = 0
    status: str = "done"
    left: frozenset[int] = frozenset()
    ends: tuple[bool, ...] = ()
    open: tuple[frozenset[int], ...] = (frozenset(), frozenset())
    marks: tuple[Markers, ...] = ((), ())
    slot: str = "idle"
    places: frozenset[int] = frozenset()
    last: tuple[int, frozenset[int], bool | None] | None = None
    owes: bool = False
    again: bool = False
    kills: int = 0


class MarkerModel:
    """The rules without those that are ``out``."""

    def __init__(self, config: MarkerConfig, out: frozenset[MarkerRule] = frozenset()) -> None:
        self._config, self._out = config, out

    def initial(self) -> World:
        return World()

    def done(self, world: World) -> bool:
        return world.serial == self._config.serials and world.slot == "idle" and not any(world.open)

    def stalled(self, world: World) -> str:
        if not self._config.operates or not self._config.reads_log:
            return ""  # an operator has to look
        return "a transaction hangs for good"

    def successors(self, world: World) -> tuple[Steps[World], Steps[World]]:
        steps = [*self._slot(world), *self._ends(world), *self._markers(world)]
        if self._config.operates:
            steps += self._operator(world)
        return steps, self._kill(world)

    # -- the slot ------------------------------------------------------------------------------------------------------

    def _slot(self, w: World) -> Steps[World]:
        steps: Steps[World] = []
        settled = w.status == "done"
        if w.slot == "idle" and w.owes and w.last and settled:
            steps.append(self._end_again(w))
        elif w.slot == "idle" and not w.owes and w.serial < self._config.serials:
            for places in (frozenset(some) for n in (1, 2) for some in combinations(PLACES, n)):
                steps.append((f"T{w.serial + 1} is sent to {sorted(places)}", w._replace(slot="waits", places=places)))
        if w.slot == "waits" and settled:
            opened = tuple(o | {w.serial + 1} if p in w.places else o for p, o in zip(PLACES, w.open, strict=True))
            begun = w._replace(serial=w.serial + 1, status="ongoing", left=w.places, open=opened, slot="running")
            steps.append((f"T{w.serial + 1} begins", begun))
        if w.slot == "asked":
            told = w.last if w.again else (w.serial, w.places, w.ends[-1])
            steps.append(("the end is acknowledged", w._replace(slot="idle", last=told, again=False)))
        if w.slot in ("closed", "closed, asked") and w.status == "ongoing":
            aborted = w._replace(status="abort", ends=(*w.ends, False))
            steps.append(("taking the id aborts what is ongoing", aborted))
        elif w.slot in ("closed", "closed, asked", "closed, sent") and settled:
            steps.append(("the slot is opened again", self._opened(w)))
        if w.slot == "unsure" and w.last is not None:
            serial, places, _ = w.last
            if serial not in w.open[min(places)]:  # readers pass it
                found = (serial, places, w.ends[serial - 1])
                steps.append(("the outcome is looked up", w._replace(slot="idle", last=found, owes=True)))
        return steps

    def _opened(self, w: World) -> World:
        if w.again:
            return w._replace(slot="idle", owes=True, again=False)
        if w.slot == "closed, sent" and MarkerRule.H8_LAST_THAT_BEGAN not in self._out:
            return w._replace(slot="idle", owes=w.last is not None)
        if w.slot == "closed, asked" and MarkerRule.H7_AGAIN_WHEN_KNOWN not in self._out:
            return w._replace(slot="unsure", last=(w.serial, w.places, None))
        owes = MarkerRule.H5_AGAIN_WHEN_OPENED not in self._out
        return w._replace(slot="idle", last=(w.serial, w.places, False), owes=owes)

    def _end_again(self, w: World) -> tuple[str, World]:
        assert w.last is not None
        _, places, commit = w.last
        status = "commit" if commit else "abort"
        return f"ended again: {status}", w._replace(status=status, left=places, slot="asked", owes=False, again=True)

    def _ends(self, w: World) -> Steps[World]:
        if w.slot != "running":
            return []
        return [
            (
                f"the end of T{w.serial} is requested: {how}",
                w._replace(status=how, ends=(*w.ends, how == "commit"), slot="asked"),
            )
            for how in ("commit", "abort")
        ]

    # -- the broker ----------------------------------------------------------------------------------------------------

    def _markers(self, w: World) -> Steps[World]:
        if w.status in ("done", "ongoing"):
            return []
        if not w.left:
            return [("the transaction is complete", w._replace(status="done"))]
        return [
            (
                f"a marker in {place}: {w.status}",
                _marked(w._replace(left=w.left - {place}), place, w.status == "commit"),
            )
            for place in sorted(w.left)
        ]

    def _kill(self, w: World) -> Steps[World]:
        if w.kills == self._config.kills:
            return []
        after = w._replace(kills=w.kills + 1)
        slots = [after]
        if w.slot == "running":
            slots = [after._replace(slot="closed")]
        elif w.slot == "waits":
            slots = [after._replace(slot="closed, sent")]
        elif w.slot == "asked":  # the end is requested again and answered, or its time is over
            told = w.last if w.again else (w.serial, w.places, w.ends[-1])
            closed = "closed" if w.again else "closed, asked"
            slots = [after._replace(slot="idle", last=told, owes=True, again=False), after._replace(slot=closed)]
        elif w.slot == "idle":
            owes = w.last is not None and MarkerRule.H6_AGAIN_WHEN_LOST not in self._out
            slots = [after._replace(owes=owes or w.owes)]
        lacking: list[frozenset[int]] = [frozenset()]
        if w.status not in ("done", "ongoing"):
            subsets = chain.from_iterable(combinations(sorted(w.left), n) for n in range(1, len(w.left) + 1))
            lacking += [frozenset(some) for some in subsets]
        return [
            (f"the broker is killed, and leaves out the markers in {sorted(some)}", slot._replace(left=w.left - some))
            for some in lacking
            for slot in slots
        ]

    # -- somebody else -------------------------------------------------------------------------------------------------

    def _operator(self, w: World) -> Steps[World]:
        steps: Steps[World] = []
        for place, found in enumerate(w.open):
            listed = w.status != "done" and place in w.left
            if not found or (listed and MarkerRule.H2_LISTED_IS_LEFT not in self._out):
                continue
            how = self._judged(w, place, max(found))  # there is one: see H5 and H6
            if how is not None:
                steps.append(
                    (f"what hangs in {place} is ended: {'commit' if how else 'abort'}", _marked(w, place, how))
                )
        return steps

    def _judged(self, w: World, place: int, serial: int) -> bool | None:
        if MarkerRule.H1_BY_PROOF in self._out:
            return False
        if self._config.reads_log:
            return w.ends[serial - 1] if serial <= len(w.ends) else False
        any_epoch = MarkerRule.H3_OF_THIS_EPOCH in self._out
        for ended, epoch, commit in w.marks[1 - place]:
            if commit and (any_epoch or (epoch == serial and serial in ended)):
                return True
        return False if MarkerRule.H4_NOWHERE_IS_NO_PROOF in self._out else None


def _marked(w: World, place: int, commit: bool) -> World:
    """A marker ends whatever its producer has open there."""
    for serial in sorted(w.open[place]):
        decided = w.ends[serial - 1] if serial <= len(w.ends) else None
        if decided is not commit:
            what = {True: "committed", False: "aborted", None: "not ended yet"}[decided]
            raise Broken(f"T{serial} is {what}, and is {'committed' if commit else 'aborted'} in {place}")
    marks = (*w.marks[place], (w.open[place], w.serial, commit)) if w.open[place] else w.marks[place]
    return w._replace(open=put(w.open, place, frozenset()), marks=put(w.marks, place, marks))
