"""Only the broker's own hiccups have a second try: the rule of ``tests/conftest.py``, as pytest carries it out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException

from streams.broker.diagnosis import timed_out
from streams.clients.translate import broker_unavailable
from streams.errors import EmbeddedBrokerError, TransactionFailed
from streams.testing.oracle import Report
from tests.conftest import is_hiccup

HICCUPS = [
    timed_out(60, "a line of its log"),
    EmbeddedBrokerError("formatting a log folder took more than 60 s; is the machine overloaded?"),
    EmbeddedBrokerError("no node of the cluster answers who keeps group g within 30 s"),
    TransactionFailed("send_offsets", "COORDINATOR_LOAD_IN_PROGRESS", "unknown", "still loading"),
    KafkaException(KafkaError(KafkaError.COORDINATOR_NOT_AVAILABLE, "not yet")),
    broker_unavailable("asking", "a:1", KafkaError(KafkaError.NOT_COORDINATOR)),
]
FINAL = [
    AssertionError("waited 60 s in vain: the others have everything"),
    AssertionError("the log says COORDINATOR_LOAD_IN_PROGRESS"),
    AssertionError(f"{Report(1, 1, 1, ('out[0], key k: 1 record is not there',))}"),
    TimeoutError(),
    ConnectionRefusedError("refused"),  # outside of a fixture
    broker_unavailable("asking", "localhost:1", None, "localhost:1/1: Connection refused"),
    EmbeddedBrokerError("the broker ended while it started"),
    KafkaException(KafkaError(KafkaError._TIMED_OUT, "late")),
    TransactionFailed("commit_transaction", "PRODUCER_FENCED", "fenced", "another one"),
]

MODULE = """
import pytest
from streams.broker.diagnosis import timed_out

tries = []

def attempt(name, error):
    tries.append(name)
    if tries.count(name) == 1:
        raise error

@pytest.fixture
def start():
    attempt("start", ConnectionRefusedError("nobody yet"))

def test_starts_late(start): pass
def test_hiccup(): attempt("hiccup", timed_out(60, ""))
def test_refused(): attempt("refused", ConnectionRefusedError("gone"))
def test_wrong():
    tries.append("wrong")
    assert tries.count("wrong") == 2
def test_unmarked(): attempt("unmarked", timed_out(60, ""))

for marked in (test_starts_late, test_hiccup, test_refused, test_wrong):
    marked.pytestmark = [pytest.mark.broker]
"""


def test_hiccups_are_known_by_their_texts() -> None:
    assert [error for error in HICCUPS if not is_hiccup(error)] == []
    assert [error for error in FINAL if is_hiccup(error)] == []


def test_hiccups_are_tried_again_counted_and_listed(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    (tmp_path / "test_made.py").write_text(MODULE)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.conftest", "-c", "made.ini"]
    (tmp_path / "made.ini").write_text("[pytest]\nmarkers = broker\n")
    done = subprocess.run(
        [*command, "-q", "test_made.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    out = done.stdout
    assert "3 failed, 2 passed, 2 rerun" in out, out + done.stderr
    assert "hiccups of the broker, tried again: 2" in out
    assert "test_made.py::test_starts_late: ConnectionRefusedError: nobody yet" in out
    assert "test_made.py::test_hiccup: streams.errors.EmbeddedBrokerError: the broker did not serve within 60 s" in out
    failed = {line.split("::")[1].split()[0] for line in out.splitlines() if line.startswith("FAILED")}
    assert failed == {"test_refused", "test_wrong", "test_unmarked"}


def test_only_what_runs_beside_real_parts_has_one(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("flaky") is None
    assert pytestconfig.getoption("max_suite_reruns") == 4
