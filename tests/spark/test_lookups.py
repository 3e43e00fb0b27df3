"""Questions to a cluster that does not answer, or late: asked again, with another client. No Spark, no Kafka."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from streams.errors import BrokerUnavailable, ConfigError
from streams.spark import kafka, topic_logs
from streams.spark.planning import Bounds, TopicLog
from streams.spark.read_options import read_options
from streams.spark.topic_logs import LogView

pytestmark = pytest.mark.spark


def answered(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


class Admin:
    """A client whose answers come from ``script``: ``None`` never comes, an error code is raised."""

    def __init__(self, script: Iterator[int | None]) -> None:
        self._script = script

    def __len__(self) -> int:
        return 0  # as the real one has it: a client with nothing to do counts as false

    def describe_topics(self, topics: Any, request_timeout: float) -> dict[str, Future[Any]]:
        step = next(self._script)
        if step is None:
            return {"t": Future()}
        if step:
            return {"t": answered(KafkaException(KafkaError(step)))}
        return {"t": answered(SimpleNamespace(topic_id="x", is_internal=False, partitions=[SimpleNamespace(id=0)]))}

    def list_offsets(self, wanted: Any, isolation_level: Any, request_timeout: float) -> dict[Any, Future[Any]]:
        return {place: answered(SimpleNamespace(offset=7)) for place in wanted}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int | None], list[Admin]]:
    """What the clients answer, in order, and the clients that were made."""
    steps: list[int | None] = []
    made: list[Admin] = []
    answers = iter(lambda: steps.pop(0) if steps else 0, "never")

    def client(kind: Any, settings: Any, more: Any = None) -> Admin:
        made.append(Admin(answers))
        return made[-1]

    for module in (kafka, topic_logs):
        monkeypatch.setattr(module, "client", client)
        monkeypatch.setattr(module, "ASK_SECONDS", 0.05)
        monkeypatch.setattr(module, "GRACE_SECONDS", 0.05)
    return steps, made


OPTIONS = {"subscribe": "t", "kafka.bootstrap.servers": "b:1", "stallSeconds": "1"}
LOGS = {"t": TopicLog("x", {0: Bounds(7, 7, 7)})}


@pytest.mark.parametrize(
    "steps",
    [
        [None],
        [KafkaError._TIMED_OUT],
        [KafkaError._TRANSPORT, None, KafkaError.NOT_LEADER_FOR_PARTITION],
    ],
)
def test_what_passes_is_asked_again_with_another_client(
    script: tuple[list[int | None], list[Admin]], steps: list[int | None]
) -> None:
    script[0].extend(steps)
    assert LogView(read_options(OPTIONS)).logs() == LOGS
    assert len(script[1]) == len(steps) + 1


def test_one_client_serves_all_questions(script: tuple[list[int | None], list[Admin]]) -> None:
    """A client that is dropped while it is asked never answers."""
    view = LogView(read_options(OPTIONS))
    assert view.logs() == view.logs() == LOGS
    assert len(script[1]) == 1


def test_silence_is_told_and_ends_after_stall_seconds(
    script: tuple[list[int | None], list[Admin]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(topic_logs, "_QUIET_SECONDS", 0.3)
    script[0].extend([None] * 100)
    with pytest.raises(BrokerUnavailable, match=r"no answer from b:1 for 1 s \(option stallSeconds\)"):
        LogView(read_options(OPTIONS)).logs()
    (told,) = [record.message for record in caplog.records if "no answer from b:1 yet" in record.message]
    assert "up to 1 s (option stallSeconds)" in told


def test_what_does_not_pass_is_told_at_once(script: tuple[list[int | None], list[Admin]]) -> None:
    script[0].append(KafkaError.SASL_AUTHENTICATION_FAILED)
    with pytest.raises(ConfigError, match=r"refuses the credentials"):
        LogView(read_options(OPTIONS)).logs()


def test_a_topic_that_is_not_there_is_left_out(script: tuple[list[int | None], list[Admin]]) -> None:
    script[0].append(KafkaError.UNKNOWN_TOPIC_OR_PART)
    assert LogView(read_options(OPTIONS)).logs() == {}


def test_the_number_of_partitions_survives_a_stuck_client(script: tuple[list[int | None], list[Admin]]) -> None:
    script[0].append(None)
    first: Any = Admin(iter([None]))
    assert kafka.partitions_of(first, ["t"], {"bootstrap.servers": "b:1"}) == {"t": 1}
