"""Log lines: JSON, floods that are counted, traces that begin in the user's code, and no handler of the package."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from streams import DEAD_LETTER, STOP, EventContext, EventSource, ExecutionState, Record
from streams.errors import EventFailure
from streams.logs import MOST_KINDS, FloodHandler, JsonFormatter, exception_info
from streams.testing import TestDriver
from tests.unit.handlers_kit import config, driven, send
from tests.unit.waiting import wait_until
from tests.vocabulary import KINDS, TOTALS, Added


class Kept(logging.Handler):
    """Keeps the lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.records: list[logging.LogRecord] = []
        self.closed = False

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.records.append(record)

    def close(self) -> None:
        self.closed = True
        super().close()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def line(text: Any, *args: Any, name: str = "shop", level: int = logging.INFO, **extra: Any) -> logging.LogRecord:
    return logging.makeLogRecord({"name": name, "levelno": level, "levelname": logging.getLevelName(level),
                                  "msg": text, "args": args, **extra})  # fmt: skip


@pytest.fixture
def flood() -> Any:
    made = FloodHandler(Kept(), limit=2, window_seconds=10.0, now=Clock())
    yield made
    made.close()


# -- floods ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "passed", "said"),
    [
        (lambda n: line("tick"), 2, "998 more lines like this within 10 s; the last: tick"),
        (lambda n: line("order %d paid", n), 1000, None),  # the user's lines differ
        (lambda n: line("%s; skip", f"in[0]@{n} failed", name="streams.runtime", level=logging.WARNING), 2,
         "998 more lines like this within 10 s; the last: in[0]@999 failed; skip"),
        (lambda n: line("%s: handed over", n, name="streams.runtime"), 1000, None),
        (lambda n: line("all is lost", name="streams.x", level=logging.CRITICAL), 1000, None),
        (lambda n: line("%s: handed over", n, name="streamsapp", level=logging.WARNING), 1000, None),
        (lambda n: line({"a": "dictionary"}), 2, "998 more lines like this within 10 s; the last: {'a': 'dictionary'}"),
    ],
    ids=["equal", "other arguments", "our warnings by template", "our information", "critical", "not ours", "no text"],
)  # fmt: skip
def test_a_flood_is_counted(
    flood: Any, make: Callable[[int], logging.LogRecord], passed: int, said: str | None
) -> None:
    for number in range(1000):
        flood.handle(make(number))
    assert len(flood.target.lines) == passed
    flood._now.now = 10.0
    flood.handle(line("another"))
    assert flood.target.lines[passed:] == ([said] if said else []) + ["another"]
    if said:
        assert flood.target.records[passed].repeats == 998
    flood.handle(make(0))
    assert len(flood.target.lines) == passed + bool(said) + 2, "a new window begins"


def test_the_memory_of_floods_is_bounded(flood: Any) -> None:
    for number in range(20 * MOST_KINDS):
        for _ in range(3):
            flood.handle(line(f"{number} " + "x" * 100))
    assert len(flood._floods) == MOST_KINDS
    counted = [text for text in flood.target.lines if "more lines" in text]
    assert len(counted) == 19 * MOST_KINDS, "what had to go was written"
    flood.flush()
    assert len([text for text in flood.target.lines if "more lines" in text]) == 20 * MOST_KINDS
    assert not flood._floods


def test_a_count_is_written_although_no_line_comes_any_more() -> None:
    clock = [0.0]  # the window stays open, however long the next lines take
    handler = FloodHandler(Kept(), limit=1, window_seconds=0.05, now=lambda: clock[0])
    for _ in range(5):
        handler.handle(line("tick"))
    clock[0] = 1.0
    wait_until(lambda: len(handler.target.lines) == 2, "the count")  # type: ignore[attr-defined]
    for _ in range(3):
        handler.handle(line("tock"))
    handler.close()
    assert handler.target.lines[2:] == ["tock", "2 more lines like this within 0.05 s; the last: tock"]  # type: ignore[attr-defined]
    assert handler.target.closed  # type: ignore[attr-defined]


def test_a_line_whose_format_does_not_fit_is_the_targets_problem(capsys: pytest.CaptureFixture[str]) -> None:
    handler = FloodHandler(logging.StreamHandler())
    handler.handle(line("%d", "no number"))
    handler.handle(line("good"))
    assert "--- Logging error ---" in (said := capsys.readouterr().err)
    assert said.endswith("good\n")
    handler.close()


# -- JSON --------------------------------------------------------------------------------------------------------------


def failed() -> Any:
    try:
        raise KeyError("no\nsuch key")
    except KeyError as error:
        return exception_info(error)


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        (line("%s is %d", "a", 1), {"level": "INFO", "logger": "shop", "message": "a is 1"}),
        (line("two\nlines \x1b[31m"), {"message": "two\nlines \x1b[31m"}),
        (line("a", worker="w-0", repeats=3), {"worker": "w-0", "repeats": 3}),
        (line("a", order=7, when={"x": [1]}), {"order": 7, "when": {"x": [1]}}),
        (line("a", level=logging.ERROR, message="theirs", time=0), {"message": "a", "level": "ERROR"}),
        (line("a", much=math.nan), {"much": "nan"}),
        (line("a", raw=b"\xff", odd={(1, 2): 3}), {"raw": "b'\\xff'", "odd": "{(1, 2): 3}"}),
        (line("lone \ud800"), {"message": "lone \ud800"}),
        (line("a", stack_info="Stack"), {"stack": "Stack"}),
    ],
)
def test_a_record_is_one_line_of_json(record: logging.LogRecord, fields: dict[str, Any]) -> None:
    text = JsonFormatter().format(record)
    assert "\n" not in text
    found = json.loads(text, parse_constant=pytest.fail)
    assert {name: found.get(name) for name in fields} == fields
    assert found["time"].endswith("+00:00")


def test_an_exception_is_a_field_and_what_holds_itself_is_a_text() -> None:
    loop: list[Any] = []
    loop.append(loop)
    found = json.loads(JsonFormatter().format(line("a", exc_info=failed(), loop=loop)))
    assert found["exception"].endswith("KeyError: 'no\\nsuch key'")
    assert found["loop"] == "[[...]]"


# -- traces ------------------------------------------------------------------------------------------------------------


def handler(ctx: EventContext[Any], event: Added) -> Any:
    return fail_deep_down(ctx, event.deed)


def fail_deep_down(ctx: EventContext[Any], deed: str) -> Any:
    if deed == "ctx.fail":
        return ctx.fail(KeyError("the reason"))
    if deed == "forward":  # a function of ours raises
        ctx.forward("out", object())
    raise KeyError("the reason")


def traces(caplog: pytest.LogCaptureFixture) -> list[list[str]]:
    """The files of each trace."""
    infos = [record.exc_info for record in caplog.records if record.exc_info and record.exc_info[1]]
    return [[frame.filename for frame in traceback.extract_tb(info[2])] for info in infos]


@pytest.mark.parametrize("policy", [DEAD_LETTER, STOP], ids=["dead letter", "stop"])
@pytest.mark.parametrize("kind", [*KINDS, "batch"])
def test_a_failing_handlers_trace_begins_in_it(kind: str, policy: Any, caplog: pytest.LogCaptureFixture) -> None:
    if kind == "batch":
        source = EventSource(config(), TOTALS)
        source.register_event_type(
            Added, lambda ctx, events: [handler(ctx, event) for event in events][-1], batch=True, on_error=policy
        )
        driver = TestDriver(source, topics={"out": 1})
    else:
        driver = driven(handler, kind, policy)
    with driver:
        if policy is STOP:
            with pytest.raises(EventFailure):
                send(driver, "bad", deed="raise")
        else:
            send(driver, "bad", deed="raise")
    (*_, found) = traces(caplog)
    assert len(found) >= 2
    assert all("/tests/" in file for file in found), found


def test_what_the_handler_called_stays_and_an_answer_has_no_frames(caplog: pytest.LogCaptureFixture) -> None:
    with driven(handler, "plain", DEAD_LETTER) as driver:
        send(driver, "bad", deed="forward")
        send(driver, "worse", deed="ctx.fail")
    forward, answer = traces(caplog)
    assert forward[0] == __file__
    assert "/streams/" in forward[-1]
    assert answer == []
    assert "Answered" not in caplog.text


def test_an_error_without_a_frame_of_the_user_keeps_its_trace() -> None:
    with pytest.raises(ValueError, match="Expecting value") as caught:
        json.loads("")
    assert exception_info(caught.value)[2] is caught.value.__traceback__, "it is the user's from the first frame on"
    names = {"__name__": "asyncio.made_up"}
    exec(compile("def run(): raise OSError('x')", "made_up.py", "exec"), names)
    with pytest.raises(OSError, match="x") as raised:
        names["run"]()  # type: ignore[operator]
    inner = raised.value.__traceback__.tb_next  # type: ignore[union-attr]
    assert exception_info(raised.value.with_traceback(inner))[2] is inner


def test_a_record_that_cannot_be_read_has_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    with driven(handler, "plain", DEAD_LETTER, decode_policy=DEAD_LETTER) as driver:
        driver.send_record(Record("in", b"{", b"k"))
    assert "the record cannot be read" in caplog.text
    assert traces(caplog) == []


def test_it_says_where_it_joined(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with driven(lambda ctx, event: ExecutionState.COMPLETE, partitions=4, instance_id="i-7") as driver:
        send(driver, "a")
    (joined,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("joined: ")]
    assert joined.startswith("joined: group g as i-7-0, topic in, brokers "), "the driver numbers its members"
    assert joined.endswith("partitions 0-3 of 4")


def test_the_package_has_no_handler_and_propagates() -> None:
    """With everything of it imported that needs no extra."""
    script = """
import logging, pkgutil, importlib, streams
for module in pkgutil.walk_packages(streams.__path__, "streams."):
    try:
        importlib.import_module(module.name)
    except ImportError:
        pass
ours = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.partition(".")[0] == "streams"]
assert len(ours) > 20
assert [logger.name for logger in ours if logger.handlers or not logger.propagate or logger.level] == []
assert not logging.root.handlers
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
