"""The machine under a run of the engine, besides its connections: the time of day, randomness, and the watch over its
loop. Tests give it a simulated one."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol

from streams.runtime.watchdog import Watchdog


class LoopWatch(Protocol):
    """Watches whether the event loop goes on (``watchdog.Watchdog``, which documents the methods)."""

    def alive(self) -> bool: ...
    async def run(self) -> None: ...
    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Environment:
    """The system interface of a run. ``rng``: makes the generator of one run. ``wall_seconds``: seconds since 1970.
    ``watchdog``: called with the seconds for which the loop may stand still. ``look_up_records``: a look-up begins so
    many records before what one transaction of ours can have written. ``topic_look_seconds``: between two looks whether
    source and changelog are still the same topics. ``exit``: ends the process at once."""

    rng: Callable[[], random.Random] = random.Random
    wall_seconds: Callable[[], float] = time.time
    watchdog: Callable[[float], LoopWatch] = Watchdog
    look_up_records: int = 1_000
    topic_look_seconds: float = 10.0
    exit: Callable[[int], NoReturn] = os._exit


MACHINE = Environment()
"""The real one."""
