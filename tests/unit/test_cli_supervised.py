"""``kes run`` removes the members that it saw die. Real processes of dummy sources, no broker (that is
``tests/broker/test_supervised.py``)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.unit.cli_run_kit import DEADLINE_SECONDS, Kes, kes

__all__ = ["kes"]  # the fixture


def joined(running: Kes, workers: int) -> dict[str, int]:
    """All workers are in the group, and the supervisor knows; their process ids by name."""
    pids: dict[str, int] = {}
    while len(pids) < workers:
        seen = running._until(lambda seen: seen["event"] == "joining")
        pids[seen["worker"]] = int(seen["member_id"].removeprefix("member-"))
    return pids


@pytest.mark.parametrize(("source", "instance"), [("dummy:joins", ""), ("dummy:static", "w-1"), ("dummy:babbles", "")])
def test_the_survivors_remove_a_member_that_was_killed(kes: Callable[..., Kes], source: str, instance: str) -> None:
    running = kes(source, "--workers", "3")
    pids = joined(running, 3)
    os.kill(pids["w-1"], signal.SIGKILL)
    asked = [running.until("asked") for _ in range(2)]
    assert {seen["worker"] for seen in asked} == {"w-0", "w-2"}
    assert {(seen["member"], seen["instance"]) for seen in asked} == {(f"member-{pids['w-1']}", instance)}
    removed = running.first("removed")
    assert removed["worker"] == "w-1"
    assert removed["by"] in ("w-0", "w-2")
    assert removed["after_seconds"] < DEADLINE_SECONDS
    running.times("ready", "w-1", 2)
    running.process.terminate()
    assert running.ended() == 0
    assert {seen["member"] for seen in running.seen if seen["event"] == "asked"} == {f"member-{pids['w-1']}"}
    assert [seen["event"] for seen in running.seen].count("removed") == 1


def test_without_survivors_the_one_started_anew_removes_its_predecessor(kes: Callable[..., Kes]) -> None:
    running = kes("dummy:joins")
    pid = joined(running, 1)["w-0"]
    os.kill(pid, signal.SIGKILL)
    asked = running.until("asked")
    assert asked["member"] == f"member-{pid}"
    assert asked["pid"] != pid
    assert running.first("removed")["by"] == "w-0"
    running.process.terminate()
    assert running.ended() == 0


def test_a_member_that_could_not_be_removed_is_removed_by_the_next_worker(kes: Callable[..., Kes]) -> None:
    running = kes("dummy:unreachable", "--workers", "2")
    pids = joined(running, 2)
    os.kill(pids["w-1"], signal.SIGKILL)
    assert [running.until("asked")["worker"] for _ in range(2)] == ["w-0", "w-1"]
    assert "no broker answers" in running.close_and_read()
    assert "removed" not in running.events("w-1")  # it was not there any more: nothing to tell


def test_the_frozen_are_not_dead(kes: Callable[..., Kes]) -> None:
    running = kes("dummy:joins", "--workers", "3")
    pids = joined(running, 3)
    os.kill(pids["w-1"], signal.SIGSTOP)
    os.kill(pids["w-2"], signal.SIGKILL)  # later: when the supervisor has seen this one, it has seen the other
    assert running.until("asked")["member"] == f"member-{pids['w-2']}"
    running.times("joining", "w-2", 2)
    os.kill(pids["w-1"], signal.SIGCONT)
    running.process.terminate()
    assert running.ended() == 0
    assert {seen["member"] for seen in running.seen if seen["event"] == "asked"} == {f"member-{pids['w-2']}"}


def test_who_left_by_itself_needs_no_removal(kes: Callable[..., Kes]) -> None:
    running = kes("dummy:leaves", "--workers", "3")
    pids = joined(running, 3)
    running.times("exited", "w-1", 1)
    os.kill(pids["w-2"], signal.SIGKILL)
    running.times("joining", "w-2", 2)
    running.process.terminate()
    assert running.ended() == 0
    assert {seen["member"] for seen in running.seen if seen["event"] == "asked"} == {f"member-{pids['w-2']}"}
