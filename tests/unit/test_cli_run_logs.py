"""Logs of ``kes run``: the user's loggers beside the package's, with level, format, worker; a file that decides."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streams.cli import logging_setup
from tests.unit.cli_kit import kes_with
from tests.unit.cli_run_kit import ROOT, Kes, kes

__all__ = ["kes"]  # the fixture

TALKER = """
import logging

log = logging.getLogger("shop")

class Source:
    def run(self):
        log.debug("a detail of %s", "\\x1b[2J")
        log.info("order %s paid", "o1", extra={"order": 7})
        log.warning("order %s is late", "o2")
        logging.getLogger("streams.runtime.engine").info("joined")
        for _ in range(500):
            log.info("tick")

class Crash:
    def run(self):
        log.info("before")
        self.deeper()
    def deeper(self):
        raise RuntimeError("the handler's own fault: \\x1b[2J")

class Configures(Source):
    \"\"\"Has a configuration of its own, as applications do when they are imported.\"\"\"
    def run(self):
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False,
            "handlers": {"own": {"class": "logging.StreamHandler", "formatter": "own"}},
            "formatters": {"own": {"format": "OWN %(worker)s %(message)s"}},
            "root": {"level": "WARNING", "handlers": ["own"]}})
        super().run()

import logging.config
source, crash, configures = Source(), Crash(), Configures()
"""


@pytest.fixture
def talk(kes: Callable[..., Kes], tmp_path: Path) -> Callable[..., list[str]]:
    """The lines on stderr of a run of the talker that ends by itself."""
    (tmp_path / "talker.py").write_text(TALKER)

    def run(source: str, *options: str, code: int = 0) -> list[str]:
        running = kes(f"talker:{source}", "--max-crashes", "0", *options)
        assert running.ended() == code, running.complaints
        return running.complaints.splitlines()

    return run


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ([], ["INFO    w-0 shop: order o1 paid", "WARNING w-0 shop: order o2 is late",
              "INFO    w-0 streams.runtime.engine: joined"]),
        (["--log-level", "debug"], [r"DEBUG   w-0 shop: a detail of \x1b[2J", "INFO    w-0 shop: order o1 paid",
                                    "WARNING w-0 shop: order o2 is late",
                                    "INFO    w-0 streams.runtime.engine: joined"]),
        (["--log-level", "WARNING"], ["WARNING w-0 shop: order o2 is late"]),
        (["--quiet"], ["WARNING w-0 shop: order o2 is late"]),
        (["--quiet", "--log-level", "info"], ["INFO    w-0 shop: order o1 paid", "WARNING w-0 shop: order o2 is late",
                                              "INFO    w-0 streams.runtime.engine: joined"]),
    ],
    ids=["info is the default", "debug", "warning", "quiet", "quiet about workers only"],
)  # fmt: skip
def test_the_users_loggers_work_and_name_the_worker(
    talk: Callable[..., list[str]], options: list[str], lines: list[str]
) -> None:
    found = [line.split(" ", 2)[2] for line in talk("source", *options)]
    ticks = [line for line in found if line.endswith(": tick")]
    said = [line for line in found if "tick" not in line]
    assert said == lines
    if "INFO    w-0 shop: order o1 paid" in lines:
        assert len(ticks) == 11, "ten, and their number"
        assert found[-1] == "INFO    w-0 shop: 490 more lines like this within 10 s; the last: tick"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("paid \x1b[31mred\x1b[0m\r", r"paid \x1b[31mred\x1b[0m\r"),
        ("key \u202ek1\u2066\u200b\u2028", r"key \u202ek1\u2066\u200b\u2028"),
        ("größer\tals 1 \N{EURO SIGN}", "größer\tals 1 \N{EURO SIGN}"),
        ("1\u202f234\xa0€ 東京\u3000都 می\u200cخواهم 👩\u200d💻",) * 2,
        ("two\nWARNING shop: lines\n", "two\n    WARNING shop: lines\n    "),
    ],
    ids=["terminal", "direction", "letters", "spaces", "lines"],
)
def test_a_text_line_cannot_steer_a_terminal_or_look_like_another_record(message: str, shown: str) -> None:
    text = logging_setup._TextFormatter("%(levelname)s %(name)s: %(message)s")
    assert text.format(logging.LogRecord("shop", logging.INFO, "", 0, message, (), None)) == f"INFO shop: {shown}"


def test_json_lines_have_the_users_fields_and_the_crash(talk: Callable[..., list[str]]) -> None:
    lines = [json.loads(line) for line in talk("source", "--log-format", "json")]
    assert {line["worker"] for line in lines} == {"w-0"}
    (paid,) = [line for line in lines if line["message"] == "order o1 paid"]
    assert (paid["order"], paid["level"], paid["logger"]) == (7, "INFO", "shop")
    lines = [json.loads(line) for line in talk("crash", "--log-format", "json", code=70)]
    (crash,) = [line for line in lines if line["level"] == "CRITICAL"]
    assert "the handler's own fault" in crash["message"]
    assert crash["exception"].count("File ") == 2, "both of the user's"
    assert "deeper" in crash["exception"]


def test_without_json_on_stdout_the_workers_starts_are_log_lines_too(tmp_path: Path) -> None:
    (tmp_path / "talker.py").write_text(TALKER)
    ended = subprocess.run(
        [sys.executable, "-m", "streams", "run", "talker:crash", "--max-crashes", "0", "--instance-prefix", "w",
         "--log-format", "json"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "KES_DEBUG": ""}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    told = [(line["level"], line["message"]) for line in lines if line["logger"] == "streams.cli.run"]
    assert [level for level, _ in told] == ["INFO", "WARNING", "ERROR"]
    assert told[2] == ("ERROR", "gave up: 1 crashes within 60 s, and --max-crashes is 0")
    assert ended.stdout == ""


def test_a_crash_in_text_shows_the_users_frames_only(talk: Callable[..., list[str]]) -> None:
    lines = talk("crash", code=70)
    assert sum(line.strip().startswith("File ") for line in lines) == 2
    traced = lines.index("Traceback (most recent call last):")
    assert r"    RuntimeError: the handler's own fault: \x1b[2J" in lines[traced:]
    assert not any("streams" in line for line in lines if "File" in line)


def test_an_application_may_configure_logging_itself(talk: Callable[..., list[str]]) -> None:
    assert talk("configures") == ["OWN w-0 order o2 is late"]


JSON_CONFIG: dict[str, Any] = {
    "version": 1,
    "formatters": {"f": {"format": "%(levelname)s|%(worker)s|%(name)s|%(message)s"}},
    "handlers": {"h": {"class": "logging.FileHandler", "filename": "out.log", "formatter": "f"}},
    "loggers": {"shop": {"level": "WARNING"}},
    "root": {"level": "INFO", "handlers": ["h"]},
}
TOML_CONFIG = """
version = 1
formatters.f.format = "%(levelname)s|%(worker)s|%(name)s|%(message)s"
handlers.h = {class = "logging.FileHandler", filename = "out.log", formatter = "f"}
loggers.shop.level = "WARNING"
root = {level = "INFO", handlers = ["h"]}
"""
INI_CONFIG = """
[loggers]
keys = root,shop
[handlers]
keys = h
[formatters]
keys = f
[logger_root]
level = INFO
handlers = h
[logger_shop]
level = WARNING
handlers =
qualname = shop
[handler_h]
class = FileHandler
args = ("out.log",)
formatter = f
[formatter_f]
format = %(levelname)s|%(worker)s|%(name)s|%(message)s
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [("l.json", json.dumps(JSON_CONFIG)), ("l.toml", TOML_CONFIG), ("l.ini", INI_CONFIG)],
    ids=["json", "toml", "ini"],
)
def test_a_configuration_file_decides(talk: Callable[..., list[str]], tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert talk("source", "--log-config", name) == []
    lines = (tmp_path / "out.log").read_text().splitlines()
    assert lines == ["WARNING|w-0|shop|order o2 is late", "INFO|w-0|streams.runtime.engine|joined"]


def test_a_crash_goes_where_the_configuration_sends_it(talk: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "l.json").write_text(json.dumps(JSON_CONFIG))
    talk("crash", "--log-config", "l.json", code=70)
    assert "CRITICAL|w-0|streams.cli.worker|the worker fails: RuntimeError" in (
        tmp_path / "out.log"
    ).read_text().replace("|__main__|", "|streams.cli.worker|")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--log-config", "nowhere.json"], 1, "--log-config nowhere.json: No such file or directory"),
        (["--log-config", "."], 1, "--log-config .: Is a directory"),
        (["--log-config", "l.yaml"], 1, "the name must end with .json, .toml, .ini, .conf or .cfg"),
        (["--log-config", "half.json"], 1, "half.json cannot be read as JSON: Expecting"),
        (["--log-config", "half.toml"], 1, "half.toml cannot be read as TOML: "),
        (["--log-config", "half.ini"], 1, "half.ini cannot be read as INI: "),
        (["--log-config", "latin.json"], 1, "latin.json cannot be read as JSON: 'utf-8' codec"),
        (["--log-config", "list.json"], 1, "list.json is not a configuration for logging.config.dictConfig"),
        (["--log-config", "class.json"], 1, "cannot be applied: Unable to configure handler 'h': Cannot resolve"),
        (["--log-config", "empty.ini"], 1, "empty.ini cannot be applied: "),
        (["--log-config", "class.json", "--log-level", "info"], 2, "leave out --log-level and --log-format"),
        (["--log-level", "loud"], 2, "'loud' is not one of 'debug', 'info'"),
        (["--log-format", "xml"], 2, "'xml' is not one of 'text', 'json'"),
    ],
)
def test_a_wrong_configuration_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    options: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    files: dict[str, bytes] = {
        "l.yaml": b"version: 1", "half.json": b'{"version": 1', "half.toml": b"version = ", "half.ini": b"no section",
        "latin.json": b'{"version": "\xe9"}', "list.json": b"[1]", "empty.ini": b"", "talker.py": b"source = None",
        "class.json": json.dumps({"version": 1, "handlers": {"h": {"class": "nowhere.Handler"}}}).encode(),
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert message in kes_with(capfd)("run", "talker:source", *options, code=code).words
