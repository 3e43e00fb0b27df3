"""The watchdog of the event loop names the place where it stands still, and holds nothing up itself."""

from __future__ import annotations

import subprocess
import sys
from types import FrameType
from typing import Any

import pytest

from streams.runtime import system
from streams.runtime.system import Watchdog
from tests.unit.waiting import give_own

SCRIPT = """
import gc, os, threading, time
from streams.runtime.system import Watchdog, _location

class Cycle:  # garbage whose finalizer gives the GIL away
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(0)

def begin_and_end():
    while True:
        thread = threading.Thread(target=int)  # no garbage: on a quiet machine it came faster than it went
        thread.start()
        thread.join()

threading.Thread(target=begin_and_end, daemon=True).start()
watchdog = Watchdog(1.0)
watchdog._loop_thread = threading.get_ident()
gc.set_threshold(1, 1000, 1000)  # nearly each allocation collects
for _ in range(50):
    Cycle()
    place = _location(watchdog._frame())
assert gc.isenabled()
print(place, flush=True)
os._exit(0)
"""


def test_a_look_at_the_loop_does_not_stop_the_process() -> None:
    """Python before 3.11.9 collects garbage within ``sys._current_frames``, and stood still for good."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "(Watchdog._frame)" in done.stdout, "the place where the thread is"


class Loop:
    """The events on a loop that stands still from second 100 on, and the watchdog's waits."""

    def __init__(self, jumps: list[float]) -> None:
        self.now, self._jumps = 100.0, iter(jumps)
        self.called: list[str] = []

    def wait(self, timeout: float) -> bool:
        jump = next(self._jumps, None)
        self.now += jump or 0.0
        return jump is None

    def check(self) -> None: ...

    def name(self, frame: FrameType | None) -> str:
        self.called.append(f"named at {self.now - 100:.2f}")
        return ""

    def give_up(self, frame: FrameType | None, seconds: float) -> None:
        self.called.append(f"given up at {self.now - 100:.2f}")


@pytest.mark.parametrize(
    ("jumps", "called"),
    [
        pytest.param([0.25] * 40, ["named at 1.25", "given up at 5.25"], id="a handler blocks"),
        pytest.param([0.25, 20.0], ["named at 20.25"], id="the process was frozen"),
        pytest.param([0.25, 20.0, 0.25], ["named at 20.25", "given up at 20.50"], id="frozen, then a handler blocks"),
    ],
)
def test_no_handler_is_to_blame_for_a_process_that_stood_still(
    jumps: list[float], called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop: Any = Loop(jumps)
    give_own(monkeypatch, "time", system, monotonic=lambda: loop.now)
    watchdog: Any = Watchdog(5.0)
    watchdog._events, watchdog._stopped = loop, loop
    watchdog._watch()
    assert loop.called == called
