"""``kes run --reload``: workers start again when the user's code has changed. Real processes, no broker."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.cli_kit import Kes as InProcess
from tests.unit.cli_kit import kes_with
from tests.unit.cli_run_kit import Kes, kes

__all__ = ["kes"]  # the fixture

SHOP = """
import dummy
NUMBER = {number}
class Source(dummy.Source):
    def run(self):
        dummy.tell("version", number=NUMBER)
        super().run()
source = Source()
"""


@pytest.fixture
def shop(tmp_path: Path) -> Callable[[object], None]:
    """Write the module of the event source: with a number, or rubbish."""

    def write(number: object) -> None:
        (tmp_path / "shop.py").write_text(SHOP.format(number=number))

    write(1)
    return write


@pytest.fixture
def running(kes: Callable[..., Kes], shop: Callable[[object], None]) -> Kes:
    started = kes("shop:source", "--reload", "--workers", "2")
    assert versions(started) == [1, 1]
    return started


def versions(running: Kes) -> list[int]:
    """Wait until both workers run; return which code they run, as they said meanwhile."""
    before = len(running.seen)
    running.until_ready(2)
    return [seen["number"] for seen in running.seen[before:] if seen["event"] == "version"]


def test_changed_code_runs_once_all_of_the_old_is_drained(
    running: Kes, shop: Callable[[object], None], tmp_path: Path
) -> None:
    for number in (2, 3):  # of the same size, and maybe in the same second
        shop(number)
        assert versions(running) == [number, number]
    assert running.seen[0] == {"event": "watching", "folder": str(tmp_path)}
    assert [seen["files"] for seen in running.seen if seen["event"] == "reloading"] == [["shop.py"]] * 2
    alive: set[str] = set()
    for seen in running.seen:
        if seen["event"] == "started":
            assert seen["worker"] not in alive, "old and new code never run side by side"
            alive.add(seen["worker"])
        if seen["event"] == "exited":
            assert seen["reason"] == "drained"
            alive.remove(seen["worker"])
    running.process.terminate()
    assert running.ended() == 0


def test_a_syntax_error_is_named_and_changes_nothing(running: Kes, shop: Callable[[object], None]) -> None:
    shop("(")
    problem = running.until("not reloading")["problem"]
    assert problem == "shop.py:3: '(' was never closed"
    shop(2)
    assert versions(running) == [2, 2]
    assert [seen["event"] for seen in running.seen].count("reloading") == 1
    assert [seen["event"] for seen in running.seen].count("started") == 4
    assert "never closed" not in running.close_and_read(), "no worker has met it"


def test_code_that_does_not_start_waits_for_a_repair(running: Kes, shop: Callable[[object], None]) -> None:
    shop("missing")
    running.until("waiting")
    shop(2)
    assert versions(running) == [2, 2]
    shop("missing")
    running.until("waiting")
    running.process.send_signal(signal.SIGINT)
    assert running.ended() == 1, "the problem of the last one"
    assert "name 'missing' is not defined" in running.complaints


@pytest.mark.parametrize("by", ["file", "environment"])
def test_it_is_taken_from_the_command_line_only(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file or a variable may get into production with the rest."""
    monkeypatch.chdir(tmp_path)
    if by == "file":
        (tmp_path / "kes.toml").write_text("[commands.run]\nreload = true\n")
    else:
        monkeypatch.setenv("KES_RUN_RELOAD", "1")
    in_process: InProcess = kes_with(capsys)
    assert "belongs on the command line" in in_process("run", "shop:source", code=1).words
