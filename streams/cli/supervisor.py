"""Keeps worker processes alive: the supervisor behind ``kes run``.

One thread waits for five things: a signal, the end of a worker, a word of one, the time of a restart, the end of the
patience with a drain. Signals arrive through the wakeup descriptor, so nothing happens inside a handler.

A channel joins it with each worker (``streams.cli.supervisor_channel``). When the supervisor is gone, however it went,
the channels end and the workers drain and leave. When a worker is gone without having left its group, the supervisor
has the others remove it, and those that it starts later until one of them did: a death that was seen is not waited out.
Only a death counts (``waitpid`` reported it): a frozen or silent worker is left to the group.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, Protocol

import msgspec

from streams.cli.supervisor_channel import Channel, Done, GroupIdentity, Message, Remove, Removed, Serving
from streams.cli.worker import EXIT_BAD_RECORD, WorkerOptions
from streams.cli.worker import EXIT_PROBLEM as WORKER_PROBLEM
from streams.sak.restarts import RestartPolicy, Restarts

EXIT_DONE = 0
EXIT_PROBLEM = 1
EXIT_GAVE_UP = 70
DRAINS_ALL = {
    WORKER_PROBLEM: "a problem that a restart does not solve",
    EXIT_BAD_RECORD: "a record that fails at every start, and in every worker",
}
"""Exit codes of workers after which all of them are drained, and why."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FIRST_PROCESS = 1
"""Process id in a container: whatever loses its parent becomes a child of this one."""

_FRESH = {"PYTHONDONTWRITEBYTECODE": "1"}
"""With code that changes: Python takes a ``.pyc`` for that of another source of the same second and size."""
_REMEMBERED = 100
"""Dead members that are to be removed; more are not remembered."""

Status = dict[str, Any]


@dataclass
class _Worker:
    instance_id: str
    restarts: Restarts
    process: subprocess.Popen[bytes] | None = None
    channel: Channel | None = None  # while it runs
    member: GroupIdentity | None = None  # the name by which the group knows the worker, once reported
    start_at: float | None = 0.0  # when to start it; None: it runs, or it is done
    is_done: bool = False  # it has reported that its source has ended well
    starts: int = 0

    def hang_up(self) -> None:
        """Close the channel, if it is open: its process is gone, or is to go."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None


class CodeChange(NamedTuple):
    """Files that have changed, and what keeps them from running: nothing, or the place of a syntax error."""

    files: tuple[str, ...]
    problem: str


class CodeChanges(Protocol):
    """The user's code, watched."""

    def fileno(self) -> int:
        """Return a descriptor that can be read once the code has changed."""
        ...

    def taken(self) -> CodeChange | None:
        """Return what has changed since the last call."""
        ...


@dataclass
class _Dead:
    """A member that has to be removed from the group, until a worker reports that it is."""

    worker: _Worker
    request: Remove
    since: float


class Supervisor:
    """Starts ``workers`` processes of ``command`` and stays until all of them are done.

    ``command`` gets the descriptor of its end of the channel as its last argument. Worker ``n`` finds its name,
    ``<instance_prefix>-<n>``, in ``KES_INSTANCE_ID``: the same name after each restart, so that transactional ids
    stay what they were. ``status`` is called with what happens, for people or programs to see. With ``code``, workers
    drain and start again when it has changed, and a run without workers waits for that until a signal ends it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        workers: int,
        instance_prefix: str,
        policy: RestartPolicy,
        drain_seconds: float,
        status: Callable[[Status], None],
        code: CodeChanges | None = None,
    ) -> None:
        self._command = list(command)
        self._workers = [_Worker(name, Restarts(policy)) for name in worker_names(instance_prefix, workers)]
        self._policy = policy
        self._drain_seconds = drain_seconds
        self._status = status
        self._code = code
        self._changed = self._waiting = False
        self._exit_code = EXIT_DONE
        self._stop_signal: int | None = None
        self._stopping = False
        self._drain_until: float | None = None
        self._dead: dict[str, _Dead] = {}  # by member id

    def run(self) -> int:
        """Supervise until every worker is done; return the exit code. Main thread only: it takes the signals."""
        wake_read, wake_write = os.pipe()
        for end in (wake_read, wake_write):
            os.set_blocking(end, False)
        old_wakeup = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        old_handlers = {number: signal.signal(number, _taken) for number in (*STOP_SIGNALS, signal.SIGCHLD)}
        try:
            self._loop(wake_read)
        finally:
            self._kill()
            signal.set_wakeup_fd(old_wakeup)
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
            for end in (wake_read, wake_write):
                os.close(end)
        return self._exit_code

    def _loop(self, wake_read: int) -> None:
        while True:
            now = time.monotonic()
            self._start_due(now)
            self._reap(now)
            if self._drain_until is not None and now >= self._drain_until:
                self._give_up_draining()
            gone = all(worker.process is None and worker.start_at is None for worker in self._workers)
            if gone and not self._goes_on():
                return
            channels = [worker.channel for worker in self._workers if worker.channel is not None]
            others: list[Channel | CodeChanges] = [*channels]
            if self._code is not None:
                others.append(self._code)
            for number in _signals(wake_read, others, self._wait_seconds(time.monotonic())):
                if number in STOP_SIGNALS:
                    self._signalled(number)
            self._receive()
            self._check_code()

    def _check_code(self) -> None:
        """Drain the workers if the code has changed and can be run. ``_goes_on`` starts them once all are gone, so old
        and new code never run side by side."""
        change = None if self._code is None or self._stop_signal is not None else self._code.taken()
        if change is None:
            return
        if change.problem:
            self._status({"event": "not reloading", "problem": change.problem})
            return
        self._status({"event": "reloading", "files": change.files})
        self._changed = True
        self._stop_all(EXIT_DONE)

    def _goes_on(self) -> bool:
        """Start the workers, all of which are gone, if the code has changed; without a change, wait for it. ``False``:
        it is the end."""
        if self._code is None or self._stop_signal is not None:
            return False
        if self._changed:
            self._changed = self._waiting = self._stopping = False
            self._drain_until, self._exit_code = None, EXIT_DONE
            for worker in self._workers:
                worker.start_at, worker.restarts = 0.0, Restarts(self._policy)
        elif not self._waiting:
            self._waiting, self._drain_until = True, None
            self._status({"event": "waiting"})
        return True

    def _wait_seconds(self, now: float) -> float | None:
        due = [worker.start_at for worker in self._workers if worker.start_at is not None]
        if self._drain_until is not None:
            due.append(self._drain_until)
        return max(0.0, min(due) - now) if due else None

    def _start_due(self, now: float) -> None:
        for worker in self._workers:
            if worker.start_at is None or worker.start_at > now:
                continue
            worker.start_at, worker.is_done = None, False
            worker.starts += 1
            ours, theirs = socket.socketpair()
            worker.channel = Channel(ours)
            with theirs:
                worker.process = subprocess.Popen(
                    [*self._command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # Ctrl-C on the terminal is for the supervisor, which passes it on once
                    env={**os.environ, "KES_INSTANCE_ID": worker.instance_id, **({} if self._code is None else _FRESH)},
                )
            self._report("started", worker, pid=worker.process.pid, starts=worker.starts)
            for dead in self._dead.values():
                worker.channel.send(dead.request)

    def _reap(self, now: float) -> None:
        for worker in self._workers:
            if worker.process is None or (code := worker.process.poll()) is None:
                continue
            pid, worker.process = worker.process.pid, None
            self._bury(worker, now)
            self._report("exited", worker, pid=pid, code=code, reason=_reason(code, worker.is_done))
            is_well = code == 0 and worker.is_done
            if self._stopping:
                # SIGTERM itself ends a worker only before it has begun: there was nothing to drain.
                if not is_well and code != -signal.SIGTERM and self._exit_code == EXIT_DONE:
                    self._exit_code = EXIT_PROBLEM if code in DRAINS_ALL else EXIT_GAVE_UP
            elif code in DRAINS_ALL:
                self._stop_all(EXIT_PROBLEM)
            elif not is_well:
                self._crashed(worker, now)
        if os.getpid() == FIRST_PROCESS:
            self._reap_adopted()

    def _reap_adopted(self) -> None:
        """Reap what dead workers left behind: orphans become children of a container's first process. A worker's own
        end is only looked at here; the next ``_reap``, for which its SIGCHLD wakes the loop, takes it."""
        own = {worker.process.pid for worker in self._workers if worker.process is not None}
        with contextlib.suppress(ChildProcessError):  # there is no child
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in own:
                    return
                os.waitpid(ended.si_pid, 0)

    def _receive(self) -> None:
        for worker in self._workers:
            for message in self._messages_of(worker):
                match message:
                    case GroupIdentity():
                        worker.member = message
                        if message.member_id:
                            self._report("joining", worker, member_id=message.member_id)
                    case Done():
                        worker.is_done = True
                    case Serving():
                        self._report("serving", worker, port=message.port, secret=message.secret)
                    case Removed():
                        dead = self._dead.pop(message.member_id, None)
                        if dead is not None and message.found:
                            after = round(time.monotonic() - dead.since, 3)
                            self._report("removed", dead.worker, by=worker.instance_id, after_seconds=after)
                    case _:
                        pass

    @staticmethod
    def _messages_of(worker: _Worker) -> list[Message]:
        received = None if worker.channel is None else worker.channel.receive()
        if received is None:  # closed by the worker, or with it
            worker.hang_up()
        return received or []

    def _bury(self, worker: _Worker, now: float) -> None:
        """Note a dead worker. If it was in a group, and did not report that it left, the others shall remove it."""
        self._receive()  # its last messages
        worker.hang_up()
        member, worker.member = worker.member, None
        if member is None or not member.member_id:
            return
        request = Remove(member.member_id, member.group_instance)
        self._dead[member.member_id] = _Dead(worker, request, now)
        while len(self._dead) > _REMEMBERED:  # their sessions have expired long ago
            del self._dead[next(iter(self._dead))]
        for other in self._workers:  # all of them: any may be frozen, or on its way out; repeating is harmless
            if other.channel is not None:
                other.channel.send(request)

    def _crashed(self, worker: _Worker, now: float) -> None:
        delay = worker.restarts.crashed(now)
        if delay is None:
            allowed, window = self._policy.max_crashes, self._policy.window_seconds
            self._report("gave up", worker, crashes=allowed + 1, max_crashes=allowed, within_seconds=window)
            self._stop_all(EXIT_GAVE_UP)
        else:
            worker.start_at = now + delay
            self._report("restarting", worker, in_seconds=delay)

    def _signalled(self, number: int) -> None:
        if self._stop_signal is None:
            self._stop_signal = number
            self._stop_all(self._exit_code)
        else:
            self._exit_code = 128 + number
            self._kill()

    def _stop_all(self, exit_code: int) -> None:
        """Ask every worker to drain; the first reason decides the exit code."""
        if self._stopping:
            return
        self._stopping = True
        self._exit_code = exit_code
        self._drain_until = time.monotonic() + self._drain_seconds
        running = [worker.process for worker in self._workers if worker.process is not None]
        if running:
            self._status({"event": "stopping", "drain_seconds": self._drain_seconds})
        for worker in self._workers:
            worker.start_at = None
        for process in running:
            process.send_signal(signal.SIGTERM)

    def _give_up_draining(self) -> None:
        self._drain_until = None
        if self._exit_code == EXIT_DONE:
            self._exit_code = 128 + (self._stop_signal or signal.SIGTERM)
        for worker in self._workers:
            if worker.process is not None:
                self._report("killed", worker, pid=worker.process.pid, reason="it did not drain in time")
        self._kill()

    def _kill(self) -> None:
        for worker in self._workers:
            worker.start_at = None
            if worker.process is not None:
                with contextlib.suppress(ProcessLookupError):  # its own children too: each worker leads a process group
                    os.killpg(worker.process.pid, signal.SIGKILL)
                code = worker.process.wait()
                self._report("exited", worker, pid=worker.process.pid, code=code, reason=_reason(code, worker.is_done))
                worker.process = None
            worker.hang_up()

    def _report(self, event: str, worker: _Worker, **more: Any) -> None:
        self._status({"event": event, "worker": worker.instance_id, **more})


def worker_names(prefix: str, workers: int) -> list[str]:
    """Return the names of so many workers: ``KES_INSTANCE_ID`` of each."""
    return [f"{prefix}-{number}" for number in range(workers)]


def worker_command(options: WorkerOptions) -> list[str]:
    """The command line of one worker process, but for its last argument (its end of the channel)."""
    return [sys.executable, "-m", "streams.cli.worker", msgspec.json.encode(options).decode()]


def _reason(code: int, is_done: bool) -> str:
    if code == 0:
        return "drained" if is_done else "left by itself, with exit code 0 and without a drain: that is a crash"
    if code > 0:
        return DRAINS_ALL.get(code, f"failed with exit code {code}")
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _signals(wake_read: int, others: Sequence[Channel | CodeChanges], wait_seconds: float | None) -> bytes:
    """Wait for signals, for a message on a channel, or for a change of the code; return the signals' numbers, in the
    order of arrival."""
    select.select([wake_read, *(other.fileno() for other in others)], [], [], wait_seconds)
    with contextlib.suppress(BlockingIOError):
        return os.read(wake_read, 4096)
    return b""


def _taken(number: int, frame: FrameType | None) -> None:
    """Do nothing: that it is a handler makes Python write the signal's number to the wakeup descriptor."""
