"""``kes run``: real worker processes of dummy sources, no broker. Every wait is for an event, with a deadline."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streams.cli import worker
from streams.cli.run import StatusLines, sentence
from streams.errors import ConfigError
from streams.sak.restarts import RestartPolicy, Restarts
from tests.unit.cli_kit import kes_with
from tests.unit.cli_run_kit import DEADLINE_SECONDS, ROOT, Kes, kes

__all__ = ["kes"]  # the fixture

# -- policy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "crashes", "pauses"),
    [
        ({"max_delay_seconds": 5.0, "max_crashes": 9}, [0.0] * 5, [1.0, 2.0, 4.0, 5.0, 5.0]),
        ({"max_crashes": 3, "window_seconds": 10.0}, [0.0, 3.0, 6.0, 9.9], [1.0, 2.0, 4.0, None]),
        ({"max_crashes": 2, "window_seconds": 10.0}, [0.0, 5.0, 11.0, 22.0], [1.0, 2.0, 2.0, 1.0]),
    ],
    ids=["pauses double up to the cap", "too many in the window end it", "those before the window are forgotten"],
)
def test_how_long_a_crashed_worker_waits(
    policy: dict[str, Any], crashes: list[float], pauses: list[float | None]
) -> None:
    restarts = Restarts(RestartPolicy(first_delay_seconds=1.0, **policy))
    assert [restarts.crashed(now) for now in crashes] == pauses


# -- supervisor --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "number", "code", "events"),
    [
        *(("source", number, 0, "started ready drained exited") for number in ("SIGTERM", "SIGINT", "SIGHUP")),
        ("stubborn", "SIGTERM", 143, "started ready ignored killed exited"),
        ("source", "SIGKILL", -9, "started ready drained"),  # the supervisor tells nothing any more
        ("hung", "SIGKILL", -9, "started ready ignored"),
    ],
)
def test_a_signal_drains_all_workers_and_none_outlives_its_supervisor(
    kes: Callable[..., Kes], source: str, number: str, code: int, events: str
) -> None:
    running = kes(f"dummy:{source}", "--workers", "2", *(["--drain-seconds", "0.2"] if source == "stubborn" else []))
    assert set(running.until_ready(2)) == {"w-0", "w-1"}
    running.process.send_signal(signal.Signals[number])
    assert running.ended() == code  # returns when the last process has let go of stdout
    assert running.events("w-0") == running.events("w-1") == events.split()


def test_the_second_signal_kills(kes: Callable[..., Kes]) -> None:
    running = kes("dummy:stubborn")
    running.until_ready(1)
    running.process.terminate()
    running.until("ignored")
    running.process.send_signal(signal.SIGINT)
    assert running.ended() == 130
    assert running.seen[-1]["reason"] == "killed by SIGKILL"


def test_a_killed_worker_comes_back_under_its_name_and_the_other_stays(kes: Callable[..., Kes]) -> None:
    """Before its session would have timed out (10 s)."""
    running = kes("dummy:source", "--workers", "2")
    pids = running.until_ready(2)
    os.kill(pids["w-1"], signal.SIGKILL)
    assert running.until("restarting")["in_seconds"] <= 1.0
    again = running.until("ready")
    assert again["worker"] == "w-1"
    assert again["pid"] != pids["w-1"]
    running.process.terminate()
    assert running.ended() == 0
    assert running.events("w-0") == ["started", "ready", "drained", "exited"]
    assert running.events("w-1") == [
        "started",
        "ready",
        "exited",
        "restarting",
        "started",
        "ready",
        "drained",
        "exited",
    ]


def test_a_worker_that_cannot_live_ends_the_run_and_the_others_drain(kes: Callable[..., Kes]) -> None:
    running = kes("dummy:second", "--workers", "2", "--max-crashes", "1")
    assert running.ended() == 70
    assert running.events("w-1") == ["started", "exited", "restarting", "started", "exited", "gave up"]
    assert running.events("w-0")[-1] == "exited"
    assert [seen["event"] for seen in running.seen].count("stopping") == 1


def test_a_record_that_nobody_can_read_drains_all_and_is_no_reason_to_restart(kes: Callable[..., Kes]) -> None:
    running = kes("dummy:bad", "--workers", "2")
    assert running.ended() == 1
    assert running.events("w-1") == ["started", "exited"]
    assert running.events("w-0")[-2:] == ["drained", "exited"] or running.events("w-0") == ["started", "exited"]
    exited = next(seen for seen in running.seen if seen["event"] == "exited" and seen["worker"] == "w-1")
    assert (exited["code"], exited["reason"]) == (65, "a record that fails at every start, and in every worker")
    assert "in[2]@7" not in running.complaints  # the engine has logged it


@pytest.mark.parametrize(
    ("source", "code", "events", "message"),
    [
        ("dummy:finished", 0, "started finished exited", ""),
        ("dummy:crash", 70, "started exited gave up", "RuntimeError: the handler's own fault"),
        ("dummy:exits", 70, "started exited gave up", "the worker ends without a drain: SystemExit()"),
        ("dummy:vanishes", 70, "started exited gave up", ""),
        ("dummy:interrupted", 70, "started exited gave up", ""),
        ("dummy:topic", 1, "started exited", "topic 'orders' has 3 partitions"),
        (
            "dummy:finishd",
            1,
            "",
            "'dummy' has no 'finishd': name the event source as module:name; did you mean 'finished'?",
        ),
        ("dummy:source.it", 1, "started exited", "has no 'source.it'"),
        ("nowhere:source", 1, "", "No module named 'nowhere'"),
        ("dummy:tell", 1, "started exited", "cannot be called without arguments"),
        ("dummy:json", 1, "started exited", "neither an event source nor makes one"),
    ],
)
def test_a_run_that_ends_by_itself_says_why(
    kes: Callable[..., Kes], source: str, code: int, events: str, message: str
) -> None:
    """A user's problem is no reason to restart, and has no stack trace; a fault has."""
    running = kes(source, "--max-crashes", "0")
    assert running.ended() == code
    assert " ".join(running.events("w-0")) == events
    assert message in " ".join(running.complaints.replace("│", " ").split())
    has_trace = code == 70 and bool(message)
    assert ("Traceback" in running.complaints) == has_trace
    assert not has_trace or "dummy.py" in running.complaints


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("dummy.py", "did you mean dummy:source?"),
        ("dummy.source", "did you mean dummy:source?"),
        ("dummy.make", "did you mean dummy:make?"),
        ("dummy.py:bad", "did you mean dummy:bad?"),
        ("./dummy.py:bad", "did you mean dummy:bad?"),
        ("shop/orders.py", "did you mean shop.orders:source?"),
        ("a dummy", "as in bank:source"),
    ],
)
def test_a_name_that_is_none_is_told_before_there_is_a_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, message: str
) -> None:
    (tmp_path / "dummy.py").touch()
    monkeypatch.chdir(tmp_path)
    assert message in kes_with(capsys)("run", source, code=2).words


NOTES = """
import os, signal, threading
from pathlib import Path

class Source:
    drained = False
    def run(self):
        signal.signal(signal.SIGTERM, self.drain)
        Path("ready-" + os.environ["KES_INSTANCE_ID"]).touch()
        while not self.drained:
            threading.Event().wait(0.05)
        Path("drained-" + os.environ["KES_INSTANCE_ID"]).touch()
    def drain(self, *_):
        self.drained = True

source = Source()
"""


@pytest.mark.parametrize("form", [["--json"], []])
def test_workers_drain_when_nobody_reads_the_status_any_more(tmp_path: Path, form: list[str]) -> None:
    """As in ``kes run ... | tee log``: Ctrl-C ends both sides of the pipe."""
    (tmp_path / "notes.py").write_text(NOTES)
    command = [sys.executable, "-m", "streams", "run", "notes:source", "-n", "2", "--instance-prefix", "w", *form]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    kes = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(list(tmp_path.glob("ready-*"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert kes.stdout is not None
        kes.stdout.close()
        kes.send_signal(signal.SIGINT)
        assert kes.wait(DEADLINE_SECONDS) == 0
    finally:
        kes.kill()
    assert sorted(path.name for path in tmp_path.glob("drained-*")) == ["drained-w-0", "drained-w-1"]


def test_a_full_disk_below_the_log_stops_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", full)
    StatusLines(quiet=False)({"event": "started", "worker": "w-0", "pid": 1, "starts": 1})
    with contextlib.suppress(OSError):  # what is left
        full.close()


@pytest.mark.parametrize(
    ("status", "line"),
    [
        ({"event": "started", "worker": "w\x1b[2J-0", "pid": 1, "starts": 1}, r"w\x1b[2J-0: started (process 1)"),
        ({"event": "reloading", "files": ["a\x1b[2J.py", "b\n.py"]},
         r"all workers: reloading: a\x1b[2J.py, b\n.py changed"),
        ({"event": "not reloading", "problem": "a\x1b[2J.py:1: no"},
         r"all workers: not reloading, what runs goes on: a\x1b[2J.py:1: no"),
    ],
    ids=lambda value: value["event"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_status_line_cannot_steer_a_terminal(
    capsys: pytest.CaptureFixture[str], status: dict[str, Any], line: str
) -> None:
    StatusLines(quiet=False)(status)
    assert capsys.readouterr().err == f"{line}\n"


def test_what_happens_to_workers_is_told_in_sentences() -> None:
    told: list[tuple[dict[str, Any], str]] = [
        ({"event": "started", "pid": 7, "starts": 1}, "started (process 7)"),
        ({"event": "started", "pid": 8, "starts": 2}, "started (process 8, start 2)"),
        ({"event": "joining", "member_id": "vm-0-5f4f"}, "the group knows it as vm-0-5f4f"),
        ({"event": "exited", "pid": 7, "code": -9, "reason": "killed by SIGKILL"},
         "ended: killed by SIGKILL (process 7)"),
        ({"event": "restarting", "in_seconds": 0.5}, "restarting in 0.5 s"),
        ({"event": "removed", "by": "vm-1", "after_seconds": 0.021}, "removed from the group by vm-1 after 0.02 s"),
        ({"event": "gave up", "crashes": 6, "max_crashes": 5, "within_seconds": 60.0},
         "gave up: 6 crashes within 60 s, and --max-crashes is 5"),
        ({"event": "stopping", "drain_seconds": 60.0}, "stopping; they have 60 s to drain"),
        ({"event": "killed", "pid": 7, "reason": "it did not drain in time"},
         "killed, because it did not drain in time (process 7)"),
    ]  # fmt: skip
    assert [sentence(status) for status, _ in told] == [words for _, words in told]


# -- worker ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    runs = SimpleNamespace(run=lambda: None)
    made = SimpleNamespace(
        source=runs, deep=SimpleNamespace(inner=runs), make=lambda: runs, number=3, none=lambda: None
    )
    monkeypatch.setitem(sys.modules, "made_up_module", made)
    return made


@pytest.mark.parametrize("name", ["", ":source", ":deep.inner", ":make"])
def test_a_source_is_an_object_with_run_or_made_by_a_function(module: SimpleNamespace, name: str) -> None:
    assert worker.load(f"made_up_module{name}") is module.source


@pytest.mark.parametrize("name", [":number", ":none", ":deep.nothing"])
def test_what_cannot_be_run_is_refused_by_name(module: SimpleNamespace, name: str) -> None:
    with pytest.raises(ConfigError, match=f"made_up_module.*{name.rpartition('.')[2].lstrip(':')}"):
        worker.load(f"made_up_module{name}")


def test_modules_are_frozen_and_new_objects_looked_at_rarely() -> None:
    before, fresh = (gc.get_threshold(), gc.get_freeze_count()), [[number] for number in range(1_000)]
    try:
        worker.collect_rarely(0)
        assert (gc.get_threshold(), gc.get_freeze_count()) == before
        worker.collect_rarely(5_000)
        assert gc.get_threshold() == (5_000, *before[0][1:])
        assert gc.get_freeze_count() >= before[1] + len(fresh)
        assert gc.isenabled()
    finally:
        # They stay frozen, with all that ``conftest`` has frozen: else each full collection of the tests behind this
        # one goes through every module and every collected test, for a second at a time.
        gc.set_threshold(*before[0])


FREEZES = """
import gc
from streams import EventSource, EventSourceConfig

class Source(EventSource):
    def run(self):
        from streams.runtime.engine import Engine
        assert gc.get_freeze_count() > 1_000
        assert not any(each is Engine for each in gc.get_objects())

source = Source(EventSourceConfig(group_id="g", topic="t", num_partitions=1))
"""


def test_the_engine_is_among_what_a_worker_freezes(kes: Callable[..., Kes], tmp_path: Path) -> None:
    (tmp_path / "freezes.py").write_text(FREEZES)
    running = kes("freezes:source", "--max-crashes", "0")
    assert running.ended() == 0, running.complaints


# -- members that the supervisor saw die (with a broker: tests/broker/test_supervised.py) ------------------------------


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


@pytest.mark.parametrize("source", ["joins", "leaves"])
def test_the_frozen_are_not_dead_and_who_left_by_itself_needs_no_removal(
    kes: Callable[..., Kes], tmp_path: Path, source: str
) -> None:
    running = kes(f"dummy:{source}", "--workers", "3")
    pids = joined(running, 3)
    if source == "joins":
        os.kill(pids["w-1"], signal.SIGSTOP)
    else:
        (tmp_path / "leave").touch()
        running.times("exited", "w-1", 1)
    os.kill(pids["w-2"], signal.SIGKILL)  # later: when the supervisor has seen this one, it has seen the other
    running.times("joining", "w-2", 2)
    if source == "joins":
        os.kill(pids["w-1"], signal.SIGCONT)
    running.process.terminate()
    assert running.ended() == 0
    assert {seen["member"] for seen in running.seen if seen["event"] == "asked"} == {f"member-{pids['w-2']}"}
