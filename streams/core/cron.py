"""Schedules by the clock of a zone: the due times of a cron text, and the durable timer that a partition keeps for one.

A run sets the timer of its successor in the transaction of its effects, so each due time has one run, over restarts and
moves. In the changelog the timer is due at the end of all time, as the state of a visit is, and its value says when it
is due: members that do not know the schedule, or schedules at all, carry it and fire nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from streams.core.schedule import MissedRuns, Schedule
from streams.core.timers import Timer
from streams.core.visits import NEVER_MS
from streams.errors import ConfigError

TIMER_PREFIX: Final = "@cron/"
"""The name of a schedule's timer: this, and the name of the function. No timer of a handler is called so."""
CRON_TYPE: Final = "kes.cron"
FORMAT: Final = 1
"""The newest layout of ``CronState`` that is known here."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ANY_MS: Final = 1_767_225_600_000
"""Any moment. The parser looks 50 years ahead, and days of the month and of the week go together again within 40."""
_MILLISECOND: Final = timedelta(milliseconds=1)
_EXTRA: Final = "pip install 'kafka-event-source[cron]'"


class CronState(msgspec.Struct, frozen=True):
    """The value of a schedule's timer: what it was made of, and when it is due."""

    v: int
    cron: str
    zone: str
    due_ms: int


class CronTimer(Timer, frozen=True, kw_only=True):
    """The timer of a schedule's next run, and the event of that run. ``then``: the timer of the run behind it."""

    kind = "interjection"

    cron: str
    zone: str
    then: Timer | None = None

    @classmethod
    def of(cls, name: str, cron: str, zone: str, due_ms: int, then: Timer | None = None) -> CronTimer:
        """Make the timer of the schedule with this name."""
        value = _encode(CronState(FORMAT, cron, zone, due_ms))
        return cls(TIMER_PREFIX + name, due_ms, CRON_TYPE, value, cron=cron, zone=zone, then=then)

    @property
    def title(self) -> str:
        """Name it in messages."""
        return f"the run of {self.name.removeprefix(TIMER_PREFIX)} by {self.cron!r} ({self.zone}), due {self.due}"

    @property
    def following(self) -> Timer | None:
        """Return the timer that is set in its place when its run is complete."""
        return self.then


class CronSchedule(msgspec.Struct, frozen=True):
    """Runs at the times of a cron text of five fields, by the clock of a zone (Debian's rules)."""

    cron: str
    zone: str
    missed: MissedRuns = MissedRuns.SKIP

    def __post_init__(self) -> None:
        text: object = self.cron  # of any type
        fields = text.split() if isinstance(text, str) else []
        if len(fields) != 5:
            seconds = "; a field of seconds is not taken" if len(fields) == 6 else ""
            raise ConfigError(
                f"cron is {text!r:.80}; it must be a text of five fields: minute, hour, day of the month, month, day "
                f"of the week{seconds}"
            )
        if self.missed not in (MissedRuns.SKIP, MissedRuns.CATCH_UP):
            raise ConfigError(f"missed is {self.missed!r}; with cron it must be MissedRuns.SKIP or CATCH_UP")
        self._check_zone()
        if self.after(_ANY_MS) >= NEVER_MS:
            raise ConfigError(f"cron is {text!r:.80}; such a time never comes")

    def _check_zone(self) -> None:
        zone: object = self.zone  # of any type
        if not isinstance(zone, str) or not zone:
            raise ConfigError(
                f"zone is {zone!r:.80}; cron needs the name of a time zone, as 'Europe/Amsterdam' or 'UTC'"
            )
        try:
            ZoneInfo(zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ConfigError(
                f"zone is {zone!r:.80}, which this machine has no time zone file of. If the name is right: {_EXTRA} "
                "(it brings tzdata), or install the time zones of the system"
            ) from None

    @property
    def title(self) -> str:
        """Return both texts."""
        return f"{self.cron} {self.zone}"

    def after(self, now_ms: int) -> int:
        """Return the first due time behind this moment, both in milliseconds since the epoch. ``NEVER_MS``: there is
        none. Raises ``ConfigError`` for a text that is none, and without the parser."""
        try:
            from cronsim import CronSim, CronSimError
        except ModuleNotFoundError:
            raise ConfigError(f"schedule_interjection(cron=...) needs cronsim: {_EXTRA}") from None
        try:
            now = (_EPOCH + now_ms * _MILLISECOND).astimezone(ZoneInfo(self.zone))
            for found in CronSim(self.cron, now):
                due_ms = (found - _EPOCH) // _MILLISECOND
                if due_ms > now_ms:  # the parser goes by the clock, which shows an hour twice when summer ends
                    return due_ms
        except CronSimError as error:
            raise ConfigError(f"cron is {self.cron!r:.80}, which cannot be read: {error}") from None
        except OverflowError:  # behind the year 9999
            pass
        return NEVER_MS

    def run(self, timer: CronTimer, now_ms: int) -> CronTimer:
        """Return the event of the run that this timer is due for, which begins now."""
        behind = timer.due_ms
        if self.missed is MissedRuns.SKIP:
            behind = max(behind, now_ms - 1)  # one that is due just now was not missed
        then = self.timer(timer.name.removeprefix(TIMER_PREFIX), behind)
        return msgspec.structs.replace(timer, then=then)

    def timer(self, name: str, now_ms: int) -> CronTimer:
        """Return the timer of the first run behind this moment."""
        return CronTimer.of(name, self.cron, self.zone, self.after(now_ms))

    def has_set(self, timer: Timer | None) -> bool:
        """Check for a timer of this schedule: of the same texts."""
        return isinstance(timer, CronTimer) and (timer.cron, timer.zone) == (self.cron, self.zone)


AnySchedule: TypeAlias = Schedule | CronSchedule


def is_cron(name: str) -> bool:
    """Check for the name of a schedule's timer."""
    return name.startswith(TIMER_PREFIX)


def restored(timer: Timer) -> Timer:
    """Return the timer of a schedule as it is in memory, with its due time. One of a newer release stays as it is:
    nothing fires it."""
    try:
        state = _decode(timer.value)
    except msgspec.DecodeError:
        return timer
    if state.v > FORMAT:
        return timer
    return CronTimer.of(timer.name.removeprefix(TIMER_PREFIX), state.cron, state.zone, state.due_ms)


def adopted(schedules: Mapping[str, CronSchedule], timers: Iterable[Timer], now_ms: int) -> dict[str, Timer | None]:
    """Return the changes after which a partition has the timers of these schedules, by their functions' names, and of
    no others. One that has its timer already goes on with it, however late that is."""
    there = {timer.name: timer for timer in timers if is_cron(timer.name)}
    declared = {TIMER_PREFIX + name: schedule for name, schedule in schedules.items()}
    changes: dict[str, Timer | None] = {name: None for name in there if name not in declared}
    for name, schedule in declared.items():
        if not schedule.has_set(there.get(name)):
            changes[name] = schedule.timer(name.removeprefix(TIMER_PREFIX), now_ms)
    return changes


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(CronState).decode
