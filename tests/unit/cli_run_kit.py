"""``kes run`` of dummy sources, as a process whose words are read one after the other, each wait with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 60.0

DUMMY = '''
import json, os, signal, sys, threading, time
from types import SimpleNamespace
from streams.settings.groups import GroupConfig
from streams.errors import BrokerUnavailable, ConfigError, DecodeError, EventFailure, TopicError
from streams.statistics import SourceState

def tell(event, **more):
    line = {"event": event, "worker": os.environ["KES_INSTANCE_ID"], "pid": os.getpid(), **more}
    os.write(1, (json.dumps(line) + "\\n").encode())

class Source:
    """Waits for SIGTERM, drains, and returns as a source does: whoever left needs no removal."""
    drained = False
    def run(self):
        signal.signal(signal.SIGTERM, self.drain)
        tell("ready")
        while not self.drained:
            threading.Event().wait(0.05)  # not signal.pause: a signal right before it would not end it
    def drain(self, *_):
        tell("drained")
        self.drained = True

class Stubborn(Source):
    def drain(self, *_):
        tell("ignored")

class HungOrphan(Stubborn):
    def run(self):
        sys.modules["__main__"].ORPHAN_DRAIN_SECONDS = 0.1
        super().run()

class Finished:
    def run(self):
        tell("finished")

class Crash:
    def run(self):
        raise RuntimeError("the handler's own fault")

class Leaves:
    """What a library with a command line of its own does: nobody has asked this worker to stop."""
    def __init__(self, leave):
        self.run = leave

class SecondCrashes(Source):
    def run(self):
        if os.environ["KES_INSTANCE_ID"].endswith("-1"):
            os._exit(9)
        super().run()

class Joins(Source):
    """In a group from its first moment; its member id has its process id in it."""
    state = SourceState.RUNNING
    config = SimpleNamespace(group=GroupConfig(static_membership=False), instance_id="")
    @property
    def member_id(self):
        return f"member-{os.getpid()}"
    def remove_member(self, member_id, instance, timeout_seconds):
        tell("asked", member=member_id, instance=instance)
        return True

class JoinsStatic(Joins):
    config = SimpleNamespace(group=GroupConfig(static_membership=True), instance_id="")

class Unreachable(Joins):
    """Only a worker's second life reaches the broker."""
    def remove_member(self, member_id, instance, timeout_seconds):
        tell("asked", member=member_id, instance=instance)
        if os.environ["KES_INSTANCE_ID"] == "w-0":
            raise BrokerUnavailable("no broker answers")
        return False

class Babbles(Joins):
    """Speaks another language on the line, then ours."""
    def run(self):
        for fd in range(3, 64):
            try:
                os.write(fd, b"\\xff\\n{}\\n{\\"type\\":\\"member\\"}\\n[1" + b"x" * 70_000)
            except OSError:
                pass
        super().run()

class JoinsAndLeaves(Joins):
    def run(self):
        if os.environ["KES_INSTANCE_ID"].endswith("-1"):
            while not os.path.exists("leave"):  # or it would be gone before it is looked at
                time.sleep(0.01)
        else:
            super().run()

class WrongTopic:
    def run(self):
        error = TopicError("topic 'orders' has 3 partitions, the settings say 4")
        raise ExceptionGroup("a task group wraps it", [error])

def bad_record():
    failure = EventFailure("in[2]@7: not a Deposited")
    failure.__cause__ = DecodeError("in[2]@7: not a Deposited")
    return failure

class BadRecord(Source):
    def run(self):
        if os.environ["KES_INSTANCE_ID"].endswith("-1"):
            raise ExceptionGroup("a task group wraps it", [bad_record()])
        super().run()

source = Source()
bad = BadRecord()
stubborn, hung, finished = Stubborn(), HungOrphan(), Finished()
crash, second, topic = Crash(), SecondCrashes(), WrongTopic()
exits, vanishes = Leaves(lambda: sys.exit()), Leaves(lambda: os._exit(0))
interrupted = Leaves(lambda: signal.raise_signal(2))
joins, static, unreachable, leaves, babbles = Joins(), JoinsStatic(), Unreachable(), JoinsAndLeaves(), Babbles()
'''


class Kes:
    """A running ``kes run --json``, its status lines and what the dummies tell, in order."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        (folder / "dummy.py").write_text(DUMMY)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "streams", "run", "--json", "--instance-prefix", "w", *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "KES_DEBUG": "", "NO_COLOR": "1"},
        )
        self.seen: list[dict[str, Any]] = []
        self.complaints = ""
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._threads = [threading.Thread(target=self._read_answers), threading.Thread(target=self._read_complaints)]
        for thread in self._threads:
            thread.start()

    def _read_answers(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)  # nobody holds the pipe any more: all processes are gone

    def _read_complaints(self) -> None:
        assert self.process.stderr is not None
        self.complaints = self.process.stderr.read().decode()

    def until(self, event: str, worker: str | None = None) -> dict[str, Any]:
        """The next status line of this kind."""
        return self._until(lambda seen: seen["event"] == event and worker in (None, seen.get("worker")))

    def first(self, event: str) -> dict[str, Any]:
        """The first status line of this kind, seen already or to come."""
        return next((seen for seen in self.seen if seen["event"] == event), None) or self.until(event)

    def times(self, event: str, worker: str, count: int) -> None:
        """Wait until it was said so often of this worker, counted from the start."""
        while sum(seen["event"] == event and seen.get("worker") == worker for seen in self.seen) < count:
            self.until(event, worker)

    def until_ready(self, workers: int) -> dict[str, int]:
        """All workers run; their process ids by name."""
        return {ready["worker"]: ready["pid"] for ready in (self.until("ready") for _ in range(workers))}

    def _until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while (line := self._lines.get(timeout=DEADLINE_SECONDS)) is not None:
            self.seen.append(json.loads(line))
            if wanted(self.seen[-1]):
                return self.seen[-1]
        raise AssertionError(f"all processes are gone; seen: {self.seen}; stderr: {self.complaints}")

    def ended(self) -> int:
        """Wait for the end of the supervisor *and* of all workers; its exit code."""
        while (line := self._lines.get(timeout=DEADLINE_SECONDS)) is not None:
            self.seen.append(json.loads(line))
        code = self.process.wait(DEADLINE_SECONDS)
        self._join()
        return code

    def close(self) -> None:
        """End what a failed test left running: the workers notice that their supervisor is gone."""
        if self.process.poll() is None:
            self.process.kill()
        for started in self.seen:
            if started["event"] == "started":
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(started["pid"], signal.SIGKILL)
        self.process.wait(DEADLINE_SECONDS)
        self._join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def close_and_read(self) -> str:
        """Drain, and return what was said on stderr."""
        self.process.terminate()
        self.ended()
        return self.complaints

    def _join(self) -> None:
        for thread in self._threads:
            thread.join(DEADLINE_SECONDS)

    def events(self, worker: str) -> list[str]:
        return [seen["event"] for seen in self.seen if seen.get("worker") == worker]


@pytest.fixture
def kes(tmp_path: Path) -> Iterator[Callable[..., Kes]]:
    started: list[Kes] = []

    def start(*arguments: str) -> Kes:
        started.append(Kes(tmp_path, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.close()


def get(port: int, path: str) -> tuple[int, str]:
    """Status and text; 0: nothing listens there yet."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except urllib.error.URLError as error:
        return 0, str(error)
