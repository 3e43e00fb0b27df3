"""The root of ``kes``: what is loaded, what a failure looks like, how answers and progress are written, and what
commands about a cluster say when nothing listens at its address."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.text import Text

from streams.cli import cluster, commands, console, main
from streams.cli.console import as_json
from streams.cli.failures import escape_unknown_characters
from streams.errors import BrokerUnavailable, ConfigError, StreamsError
from streams.looks import addresses, figures
from tests.unit.cli_kit import Kes


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Register a command ``try`` that raises what it is given."""

    def register(error: BaseException | None) -> None:
        app = typer.Typer()

        @app.command()
        def attempt() -> None:
            if error is not None:
                raise error

        monkeypatch.setattr(commands, "COMMANDS", {"try": commands.Command("streams.cli.run", "Try.", "demo")})
        monkeypatch.setattr(commands, "import_module", lambda name: SimpleNamespace(app=app))

    monkeypatch.delenv("KES_DEBUG", raising=False)
    return register


def interrupted_in_c() -> SystemError:
    """Ctrl-C within a call of a C client, as the interpreter hands it on."""
    error = SystemError("returned a result with an exception set")
    error.__cause__ = KeyboardInterrupt()
    return error


@pytest.mark.parametrize(("typed", "completed"), [("d", "doctor dlq"), ("dlq re", "replay"), ("run --rel", "--reload")])
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_commands_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shell: str, typed: str, completed: str
) -> None:
    words = ["kes", *typed.split()]
    monkeypatch.setenv("_KES_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS" if shell == "bash" else "_TYPER_COMPLETE_ARGS", " ".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    assert main.main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert all(word in out for word in completed.split())
    assert "tail" not in out


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (BrokerUnavailable("nothing answers at localhost:1"), 1, "kes: broker unavailable: nothing answers"),
        (ConfigError("linger_ms [must] be positive"), 1, "kes: config error: linger_ms [must] be"),  # no markup
        (ExceptionGroup("tasks", [ValueError("x"), ConfigError("inner")]), 1, "kes: config error: inner"),
        (ConfigError("key \x1b[2J\u202e"), 1, "kes: config error: key \\x1b[2J\\u202e"),
        (OSError(28, "No space left on device"), 1, "kes: the output cannot be written: No space left on device"),
        (OSError(28, "No space left on device", "/data/x"), 1, "kes: /data/x cannot be written"),
        (RuntimeError("a fault"), 70, "kes: unexpected RuntimeError: a fault"),
        (KeyboardInterrupt(), 130, ""),
        (interrupted_in_c(), 130, ""),
        (None, 0, ""),
    ],
)
def test_a_failure_is_one_message_and_an_exit_code(
    kes: Kes, command: Any, error: BaseException | None, code: int, message: str
) -> None:
    command(error)
    out, err = kes("try", code=code)
    assert message in err
    assert out == ""


def test_a_remedy_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console.complain("a\nb", hint="caused by \x1b[2J")
    assert capsys.readouterr().err == "kes: a\nb\ncaused by \\x1b[2J\n"


def test_closed_and_full_outputs_change_no_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kes", "config", "--json"])
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as exited:
        main.run()
    assert exited.value.code == 0
    sys.stdout.close()
    monkeypatch.setattr(sys, "argv", ["kes", "lag", "nowhere:source"])
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", full)
    with pytest.raises(SystemExit) as exited:
        main.run()
    assert exited.value.code == 1
    with contextlib.suppress(OSError):  # what is left
        full.close()


WORKER = """
import logging, runpy, socket, sys, types
from streams.cli.worker import LogOptions, WorkerOptions, msgspec
from streams.errors import ConfigError

def run():
    print("lost")
    logging.warning("lost")
    {end}

sys.modules["shop"] = types.SimpleNamespace(source=types.SimpleNamespace(run=run))
del sys.modules["streams.cli.worker"]
ours, theirs = socket.socketpair()
options = msgspec.json.encode(WorkerOptions("shop:source", LogOptions())).decode()
sys.argv = ["worker", options, str(theirs.detach())]
runpy.run_module("streams.cli.worker", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["-m", "streams", "--version"], 1),
        (["-m", "streams", "run", "nowhere:source", "--max-crashes", "0"], 1),
        (["-c", WORKER.format(end="return")], 0),
        (["-c", WORKER.format(end="raise ConfigError('no')")], 78),
        (["-c", WORKER.format(end="raise ValueError('no')")], 70),
    ],
    ids=["answer", "problem", "worker done", "problem of a worker", "crash of a worker"],
)
def test_full_outputs_are_no_reason_for_the_interpreters_exit_code(arguments: list[str], code: int) -> None:
    """It would be 120, which the supervisor takes for a crash."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONUNBUFFERED", "KES_DEBUG")}
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, *arguments], stdout=full, stderr=full, env=environment, timeout=60, check=False
        )
    assert ended.returncode == code


def test_the_stack_trace_is_there_for_the_asking(kes: Kes, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    command(StreamsError("why"))
    monkeypatch.setenv("KES_DEBUG", "1")
    assert "Traceback" in kes("try", code=1).err


def test_a_missing_optional_package_is_named_with_its_extra(
    kes: Kes, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(None)

    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'pyspark'", name="pyspark.sql")

    monkeypatch.setattr(commands, "import_module", missing)
    assert "pip install 'kafka-event-source[demo]'" in kes("try", code=1).err


def test_without_the_packages_of_the_command_line_their_extra_is_named() -> None:
    script = "import sys; sys.modules['typer'] = None; from streams.__main__ import run; run()"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "kes: the package 'typer' is not installed: pip install 'kafka-event-source[cli]'\n"


INTERRUPTED = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[2]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from streams.__main__ import run
run()
"""


@pytest.mark.parametrize("module", ["typer", "confluent_kafka", "rich.live"])
def test_an_interrupt_while_the_command_is_imported_is_no_stack_trace(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, "lag", module]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["--help"], 0), ([], 2), (["nothing"], 2)])
def test_exit_codes_of_the_root(kes: Kes, arguments: list[str], code: int) -> None:
    assert kes(*arguments, code=code) != ("", "")


def test_help_lists_every_present_command_and_loads_none() -> None:
    script = (
        "import sys; from streams.cli.main import main; code = main(['--help']);"
        "loaded = [name.rpartition('.')[2] for name in sys.modules if name.startswith('streams.cli.')];"
        "sys.exit(f'{code} {sorted(loaded)}')"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stderr.strip() == "0 ['commands', 'failures', 'interrupts', 'main']"
    assert "run " in ended.stdout


def test_answers_are_json_or_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    console.emit({"lag": [1, 2], "text": "a b"}, True, lambda: pytest.fail("no table is made for JSON"))
    assert capsys.readouterr().out == '{"lag":[1,2],"text":"a b"}\n'
    console.emit({}, False, lambda: Text("the table"))
    assert capsys.readouterr().out == "the table\n"


def test_without_a_terminal_progress_is_a_line_now_and_then() -> None:
    now, lines = [0.0], list[str]()
    shown = figures.LogLines("events", lambda: now[0], lines.append)
    for second in range(11):
        now[0] = float(second)
        shown("folding", second * 100, 1000)
    assert lines == [
        "folding: 0 of 1,000 events (0 %)",
        "folding: 500 of 1,000 events (50 %), 100/s, 5 s left",
        "folding: 1,000 of 1,000 events (100 %), 100/s",
    ]


@pytest.mark.parametrize(
    ("done", "total", "rate", "unit", "text"),
    [
        (0, 0, 0.0, "", "0"),
        (1234567, 0, 1000.0, "events", "1,234,567 events, 1,000/s"),
        (45_000_000, 90_000_000, 1_500_000.0, "bytes", "45.0 MB of 90.0 MB (50 %), 1.5 MB/s, 30 s left"),
        (999, 0, 0.0, "bytes", "999 B"),
        (2, 3, 0.1, "", "2 of 3 (66 %), 10 s left"),
        (1, 7201, 1.0, "rows", "1 of 7,201 rows (0 %), 1/s, 2 h 00 min left"),
    ],
)
def test_figures(done: int, total: int, rate: float, unit: str, text: str) -> None:
    assert figures.figures(done, total, rate, unit) == text


# -- a cluster that is not there ---------------------------------------------------------------------------------------

NOBODY = "nothing listens at 127.0.0.1:1: is it running? (kes broker start)"


@pytest.mark.parametrize(
    "command",
    [
        "topics plan examples.bank:source",
        "lag examples.bank:source",
        "offsets accept examples.bank:source",
        "group demo",
        "txn abort examples.bank:source --topic t --partition 1 --start-offset 40 --yes",
    ],
)
def test_nobody_at_the_address_is_said_in_time(kes: Kes, command: str) -> None:
    """Port 1 refuses, and the wait is bounded."""
    assert (
        kes(*command.split(), "--bootstrap-servers", "127.0.0.1:1", "--timeout", "0.5", code=1).err
        == f"kes: broker unavailable: {NOBODY}\n"
    )


def test_the_first_refusal_is_told_at_once_and_a_broker_that_starts_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    refusals = iter([True, True, False])

    def refuses(servers: str) -> bool:
        said.append(capsys.readouterr().err)
        return next(refusals)

    monkeypatch.setattr(addresses, "_all_refuse", refuses)
    cluster.await_listener("127.0.0.1:1", 30.0)
    assert said == ["", f"kes: {NOBODY}; waiting 30 s for it\n", ""]


def test_only_brokers_that_all_refuse_are_known_to_be_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
        assert not addresses._all_refuse(f"127.0.0.1:1, {there}")
    assert addresses._all_refuse("127.0.0.1:1, 127.0.0.1:2")
    assert not addresses._all_refuse("127.0.0.1")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_what_the_output_has_no_character_for_is_escaped_as_json_has_it(encoding: str) -> None:
    """``kes state scan > file`` under such a locale ended in a UnicodeEncodeError."""
    value = {"a": "\u00e9\u2026\U0001f600"}
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding)
    escape_unknown_characters(stream)
    stream.write(as_json(value) + "\udcff")
    stream.flush()
    text = written.getvalue().decode(encoding)
    assert (json.loads(text.removesuffix("\\udcff")), text[-6:]) == (value, "\\udcff")
