"""Processes on threads that take turns: the world lets one run up to its next step, in an order from a seed.

At each step a process may be killed, or frozen (by not being chosen); the group elects another one, and the one before
may not notice. A world adds what its processes share: a broker, a database, and what goes wrong with them.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from typing import Any


class Killed(BaseException):
    """The process is dead: nothing of it goes on."""


class Process:
    """A loop of the engine on a thread that waits for its turn at each step. It is its own tenure."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.is_killed = self.is_done = self.is_over = False
        self.error: BaseException | None = None
        self.partition, self.reason = 0, ""
        self._turn = threading.Semaphore(0)
        self._loop = world.loop_of(self)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self.is_killed:
                self._loop.run()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.is_done = True
        self.world.turn.release()

    def go(self) -> None:
        """Let it run up to its next step; on the world's thread."""
        self._turn.release()
        self.world.turn.acquire()

    def step(self) -> None:
        """Wait for the next turn; on its own thread."""
        self.world.turn.release()
        self._turn.acquire()
        if self.is_killed:
            raise Killed

    def wait(self, seconds: float) -> bool:
        self.step()
        return self.is_over

    def is_confirmed(self) -> bool:
        self.step()
        return self.world.elected is self and not self.is_over


class TurnWorld:
    """Everything but the processes. ``without``: rules that are taken out. ``faults``: how much may still go wrong."""

    most_steps: int
    bad_luck: float
    """The chance of a fault at a step."""

    def __init__(self, seed: int, without: Iterable[str], faults: int) -> None:
        self.rng = random.Random(seed)
        self.without = frozenset(without)
        self.turn = threading.Semaphore(0)
        self.faults, self.steps = faults, 0
        self.processes: list[Process] = []
        self.elected: Process | None = None

    def loop_of(self, process: Process) -> Any:
        """Make what runs in a process."""
        raise NotImplementedError

    def actions(self) -> list[tuple[float, Callable[[], None]]]:
        """Return what may happen at a step, each with the sum of the chances up to its own."""
        raise NotImplementedError

    def is_quiet(self) -> bool:
        """Return whether all is done, and the world ends."""
        raise NotImplementedError

    def judge(self) -> None:
        """Raise ``AssertionError`` for what is wrong at the end."""
        raise NotImplementedError

    def may_fail(self) -> bool:
        """Return whether a process may be replaced or killed now."""
        return self.faults > 0

    def luck(self) -> bool:
        """Decide whether something goes wrong now."""
        if self.faults <= 0 or self.rng.random() > self.bad_luck:
            return False
        self.faults -= 1
        return True

    def run(self) -> None:
        """Run until all is done; raises ``AssertionError`` for what went wrong."""
        self.elect()
        actions = self.actions()
        try:
            for step in range(self.most_steps):
                self.steps = step
                if self.is_quiet():
                    break
                number = self.rng.random()
                next(action for limit, action in actions if number < limit)()
                for process in self.processes:
                    if process.error is not None:
                        raise AssertionError(f"a process ends: {process.error!r}") from process.error
            else:
                raise AssertionError(f"the world does not come to an end: {self.__dict__}")
        finally:
            for process in self.processes:
                process.is_killed = True
                while not process.is_done:
                    process.go()
        self.judge()

    def let_one_run(self) -> None:
        """Let a process run up to its next step."""
        alive = [process for process in self.processes if not process.is_done]
        if not alive:
            self.elect()
            return
        self.rng.choice(alive[-3:]).go()

    def elect(self) -> None:
        """Elect a new process."""
        self.elected = Process(self)
        self.processes.append(self.elected)

    def elect_another(self) -> None:
        """Elect a new process beside those that run. One that is cut off does not notice; its group does not confirm it
        any more."""
        if self.may_fail():
            self.faults -= 1
            for process in self.processes:
                process.is_over = process.is_over or self.rng.random() < 0.5
            self.elect()

    def kill(self) -> None:
        """Kill a process."""
        alive = [process for process in self.processes if not process.is_done]
        if self.may_fail() and alive:
            self.faults -= 1
            victim = self.rng.choice(alive)
            victim.is_killed = True
            victim.go()
            if victim is self.elected:
                self.elect()
