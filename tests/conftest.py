from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import signal
import traceback
import tracemalloc  # noqa: F401  # pytest asks it about warnings from finalizers, and one of those may run in its import
import uuid
from collections.abc import Callable, Generator, Iterator
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from hypothesis import HealthCheck, settings

from streams.logs import FloodHandler
from tests.unit.waiting import wait_until

if TYPE_CHECKING:
    from streams.testing.fixtures import BrokerAddress

# A run in the background of a shell ignores Ctrl-C, and so would the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A Spark of a test lives for minutes at most: its second compiler never pays back, and costs half of the time.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1")

# Python 3.11 parses the source line of each frame that it prints, and its parser counts its depth for all threads
# together: two at a time, or a finalizer that logs in the middle of one, end in a SystemError (gh-106905; once in some
# hundred runs), also in a test that has its own source parsed meanwhile. So no traceback parses: a line without carets
# will do.
if hasattr(traceback, "_extract_caret_anchors_from_line_segment"):
    setattr(traceback, "_extract_caret_anchors_from_line_segment", lambda _: None)  # noqa: B010  # types of newer ones

# A change is judged by the same examples each time; new ones are looked for by `--hypothesis-profile=search`.
# Nothing is judged by the time that it takes: a machine may stand still.
UNTIMED: Any = {"print_blob": True, "deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **UNTIMED)
settings.register_profile("search", **UNTIMED)
settings.load_profile("repeatable")

pytest_plugins = ["streams.testing.fixtures", "streams.testing.plugin", "tests.durations"]

HICCUPS = (
    r"^EmbeddedBrokerError: the broker did not serve within",  # the machine was too busy for its start
    r"^EmbeddedBrokerError: formatting a log folder took more than",
    r"^EmbeddedBrokerError: no node of the cluster answers",
    r"^\w+: .*\b(COORDINATOR_LOAD_IN_PROGRESS|COORDINATOR_NOT_AVAILABLE|NOT_COORDINATOR)\b",
)
"""Errors that are the broker's own, and pass: exactly these have a second try."""
AT_THE_START = (r"^ConnectionRefusedError: ", r"^BrokerUnavailable: .*nothing listens at ")
"""The same in a fixture, which starts the broker; in a test a refused connection may be the very thing that fails."""


def is_hiccup(error: BaseException | None) -> bool:
    """Check for an error of the broker's own. A comparison or a condition that was waited for in vain is none, whatever
    it quotes."""
    if error is None or isinstance(error, AssertionError | TimeoutError | pytest.fail.Exception):
        return False
    in_fixture = any(frame.f_code.co_name == "pytest_fixture_setup" for frame, _ in walk_tb(error.__traceback__))
    text = f"{type(error).__name__}: {error}"
    return any(re.search(hiccup, text) for hiccup in (HICCUPS + AT_THE_START if in_fixture else HICCUPS))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give a second try to hiccups of the broker under tests beside a real one, and under those of Spark. Any other
    failure is final. ``--fail-on-flaky`` makes the first try count, ``--force-reruns=0`` takes the second one away."""
    for item in items:
        if item.get_closest_marker("broker") or item.get_closest_marker("spark"):
            item.add_marker(pytest.mark.flaky(reruns=1, condition=is_hiccup))


def pytest_collection_finish() -> None:
    """Leave modules and collected tests to no garbage collector: to go through them cost a quarter of the processor
    time of simulated worlds."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count and list the reruns, each with its error; then print the first tries in full."""
    reruns = terminalreporter.stats.get("rerun", [])
    if reruns:
        terminalreporter.write_sep("=", f"hiccups of the broker, tried again: {len(reruns)}", yellow=True)
    for report in reruns:
        crash = getattr(report.longrepr, "reprcrash", None)
        terminalreporter.write_line(f"{report.nodeid}: {crash.message.splitlines()[0] if crash else '?'}")
    for report in reruns:
        terminalreporter.write_sep("=", f"first try of {report.nodeid}", yellow=True)
        terminalreporter.write_line(report.longreprtext)
        for name, text in report.sections:
            terminalreporter.write_sep("-", name)
            terminalreporter.write_line(text)


@pytest.fixture(scope="session")
def kafka_broker(kafka_broker: BrokerAddress) -> BrokerAddress:
    """The broker of the session, when both of its coordinators have loaded: the first test that asked one met that."""
    client: dict[str, Any] = {"bootstrap.servers": kafka_broker.bootstrap_servers}
    name = f"first-question-{uuid.uuid4().hex[:8]}"
    producer, consumer = Producer({**client, "transactional.id": name}), Consumer({**client, "group.id": name})
    with contextlib.closing(consumer):
        wait_until(lambda: _answers(lambda: producer.init_transactions(5.0)), "it keeps transactions", 60.0, 0.05)
        place = [TopicPartition(name, 0)]
        wait_until(lambda: _answers(lambda: consumer.committed(place, 5.0)), "it keeps groups", 60.0, 0.05)
    # That was one part of their topic. A list of groups is without an error when all are loaded.
    groups = AdminClient(client).list_consumer_groups
    wait_until(lambda: not groups(request_timeout=30.0).result().errors, "it keeps all groups", 60.0, 0.05)
    return kafka_broker


_NOT_YET = (KafkaError._TIMED_OUT, KafkaError.NOT_COORDINATOR)


def _answers(question: Callable[[], Any]) -> bool:
    try:
        question()
    except KafkaException as error:
        # The client does not call it retriable that a coordinator has not taken over its part of the offsets yet.
        if not error.args[0].retriable() and error.args[0].code() not in _NOT_YET:
            raise
        return False
    return True


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """The command line configures the root logger; the test after it must not hear by it."""
    root = logging.getLogger()
    before, level, factory = root.handlers[:], root.level, logging.getLogRecordFactory()
    yield
    for handler in [
        handler for handler in root.handlers if handler not in before and isinstance(handler, FloodHandler)
    ]:
        root.removeHandler(handler)
    root.setLevel(level)
    logging.setLogRecordFactory(factory)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Faults on purpose are no news: the engine warns about each."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test wrote may be no proper text, on purpose; a report has to get from one process to another."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode("utf-8")) for name, text in report.sections
    ]
    return report
