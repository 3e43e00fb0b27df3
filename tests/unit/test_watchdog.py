"""The watchdog of the event loop names the place where it stands still, and holds nothing up itself."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, os, threading, time
from streams.runtime.system import Watchdog

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
    place = watchdog._where()
assert gc.isenabled()
print(place, flush=True)
os._exit(0)
"""


def test_a_look_at_the_loop_does_not_stop_the_process() -> None:
    """Python before 3.11.9 collects garbage within ``sys._current_frames``, and stood still for good."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "(Watchdog._where)" in done.stdout, "the place where the thread is"
