"""The runs of a visit in one partition, as a value: which one is under way, how far it is, and which are over.

It is kept where timers are, as one that is due at the end of all time: so whatever carries timers carries it (restores,
standbys, moves, folders, and the members of releases that know no visits). Each event of a run sets it further in the
transaction of its own effects. Keys are those of the store, as bytes, and a run goes by their order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from streams.core.origin import Origin, visit_origin
from streams.core.timers import Timer
from streams.events import event_type, event_type_of
from streams.records import Headers
from streams.statistics import VisitRunStatistics, VisitStatistics

TIMER_PREFIX: Final = "@visit/"
"""The name of a visit's timer: this, and the visit's name. No timer of a handler is called so."""
NEVER_MS: Final = 253_402_300_799_999
"""The end of the year 9999, in milliseconds since the epoch: a timer that does not fire."""
FORMAT: Final = 1
"""The newest layout of ``VisitState`` that is known here."""
LONGEST_NAME: Final = 100
"""Letters of the longest name of a visit, or of a run. Both are written with each key."""
MOST_FINISHED: Final = 32
"""Runs of one visit that are remembered when they are over, so that a request that comes again begins none of them."""
MOST_WAITING: Final = 16
"""Runs of one visit that wait for the one under way; further ones are over at once, as cancelled."""


@event_type("kes.visit")
class VisitRequest(msgspec.Struct, frozen=True):
    """A request to one partition, and the value of a visit's dead letter. ``again``: visit the record's key once more
    (a letter that is sent again). ``run``: empty for ``cancel``: all runs that are under way, or wait."""

    visit: str
    run: str
    action: Literal["start", "cancel", "again"] = "start"


class FinishedRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run that is over in one partition, with the keys that it has visited there."""

    run: str
    keys: int = 0
    cancelled: bool = False


class VisitState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A visit in one partition. ``run``: under way; empty: none is. ``after``: the last key that it is done with, and
    ``keys`` how many those are; ``waiting`` and ``finished``: other runs, the oldest first."""

    v: int = FORMAT
    run: str = ""
    after: bytes | None = None
    keys: int = 0
    waiting: tuple[str, ...] = ()
    finished: tuple[FinishedRun, ...] = ()

    def requested(self, request: VisitRequest) -> VisitState:
        """Return the state behind a request to start or cancel; the same one for a run that is known."""
        run = request.run
        if request.action == "cancel":
            return self._cancelled(run)
        if run == self.run or run in self.waiting or any(run == one.run for one in self.finished):
            return self  # a request may come twice, also behind the end of its run
        if not self.run:
            return msgspec.structs.replace(self, run=run)
        if len(self.waiting) >= MOST_WAITING:
            return self._with(FinishedRun(run, cancelled=True))
        return msgspec.structs.replace(self, waiting=(*self.waiting, run))

    def visited(self, key: bytes) -> VisitState:
        """Return the state behind the event of a key."""
        return msgspec.structs.replace(self, after=key, keys=self.keys + 1)

    def ended(self, *, cancelled: bool = False) -> VisitState:
        """Return the state behind the run that is under way: the next one begins."""
        over = self._with(FinishedRun(self.run, self.keys, cancelled))
        run, *waiting = self.waiting or ("",)
        return msgspec.structs.replace(over, run=run, after=None, keys=0, waiting=tuple(waiting))

    def _cancelled(self, run: str) -> VisitState:
        if not run:
            none_waits = msgspec.structs.replace(self, waiting=())
            for waiting in self.waiting:
                none_waits = none_waits._with(FinishedRun(waiting, cancelled=True))
            return none_waits.ended(cancelled=True) if self.run else none_waits
        if run == self.run:
            return self.ended(cancelled=True)
        if any(run == one.run for one in self.finished):
            return self
        rest = tuple(waiting for waiting in self.waiting if waiting != run)
        return msgspec.structs.replace(self, waiting=rest)._with(FinishedRun(run, cancelled=True))

    def _with(self, over: FinishedRun) -> VisitState:
        return msgspec.structs.replace(self, finished=(*self.finished, over)[-MOST_FINISHED:])

    def as_timer(self, visit: str) -> Timer:
        """Return the timer that keeps it."""
        return Timer(TIMER_PREFIX + visit, NEVER_MS, _REQUEST.name, _encode(self))


class VisitedKey(Timer, frozen=True, kw_only=True):
    """The event of one key in a run, as that of a timer: when it is complete, ``then`` takes the place of the visit's
    timer."""

    kind = "visit"

    run: str
    then: Timer

    @classmethod
    def of(cls, visit: str, state: VisitState, key: bytes, now_ms: int) -> VisitedKey:
        """Make the event of the next key in the run that is under way; ``now_ms``: its time."""
        value = _REQUEST.encode(VisitRequest(visit, state.run, "again"))
        name, then = TIMER_PREFIX + visit, state.visited(key).as_timer(visit)
        return cls(name, now_ms, _REQUEST.name, value, key=key, run=state.run, then=then)

    @property
    def visit(self) -> str:
        """Return the name of the visit."""
        return self.name.removeprefix(TIMER_PREFIX)

    @property
    def origin(self) -> Origin:
        """Return the origin of the effects of the key's event: the same after a restart."""
        return visit_origin(f"{self.run} {self.name}", self.key or b"")

    @property
    def title(self) -> str:
        """Name it in messages."""
        return f"the visit {self.visit!r} (run {self.run!r}) of the key {(self.key or b'')[:80]!r}"

    @property
    def following(self) -> Timer | None:
        """Return the timer that is set in its place when its event is complete."""
        return self.then

    @property
    def facts(self) -> dict[str, str]:
        """Return what its dead letter names."""
        return {"visit": self.visit, "run": self.run}


_REQUEST: Final = event_type_of(VisitRequest)
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(VisitState).decode


def request_headers() -> Headers:
    """Return the headers of a request's record."""
    return [*_REQUEST.headers]


def encode_request(request: VisitRequest) -> bytes:
    """Encode a request."""
    return _REQUEST.encode(request)


def state_of(timer: Timer | None) -> VisitState | None:
    """Decode the state that a visit's timer keeps (the empty one without a timer). ``None``: a newer release wrote it;
    it is to be left as it is."""
    if timer is None:
        return VisitState()
    try:
        found = _decode(timer.value)
    except msgspec.DecodeError:
        return None
    return found if found.v <= FORMAT else None


def runs_of(partitions: Iterable[VisitStatistics]) -> tuple[VisitRunStatistics, ...]:
    """Return the runs of these partitions' visits, each over all of them; those that are under way are the last."""
    found: list[VisitRunStatistics] = []
    for one in partitions:
        for over, place in ((one.ended, "ended"), (one.cancelled, "cancelled")):
            found += [_one_run(one.visit, run, place, keys) for run, keys in over.items()]
        found += [_one_run(one.visit, run, "waiting", 0) for run in one.waiting]
        found += [_one_run(one.visit, one.run, "running", one.keys)] if one.run else []
    return tuple(sorted(joined_runs(found), key=lambda run: run.running > 0))


def joined_runs(runs: Iterable[VisitRunStatistics]) -> tuple[VisitRunStatistics, ...]:
    """Add up what is of the same run, as several members have it."""
    found: dict[tuple[str, str], VisitRunStatistics] = {}
    for one in runs:
        known = found.get((one.visit, one.run))
        counts = msgspec.structs.astuple(one)[2:]
        if known is not None:
            counts = tuple(map(sum, zip(msgspec.structs.astuple(known)[2:], counts, strict=True)))
        found[one.visit, one.run] = VisitRunStatistics(one.visit, one.run, *counts)
    return tuple(found.values())


def _one_run(visit: str, run: str, place: str, keys: int) -> VisitRunStatistics:
    return msgspec.structs.replace(VisitRunStatistics(visit, run, keys=keys), **{place: 1})
