from __future__ import annotations

import ast
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException

import streams
from streams.errors import BrokerUnavailable, ConfigError, TopicError
from streams.kafka.translate import (
    BAD_OFFSET,
    BLOCKED,
    FENCED,
    NO_ANSWER,
    NO_SUCH_TOPIC,
    REFUSED,
    broker_unavailable,
    error_of,
    request_failed,
)
from streams.kafka.wire.answers import GROUP, Meaning

STREAMS = Path(streams.__file__).parent
E = KafkaError


def test_the_tables_do_not_contradict_each_other() -> None:
    assert not FENCED & GROUP.keys()
    assert not FENCED & REFUSED
    assert not GROUP.keys() & REFUSED
    assert not NO_ANSWER & (REFUSED | FENCED | BAD_OFFSET | GROUP.keys())
    assert not BLOCKED.keys() & (REFUSED | FENCED | GROUP.keys() | NO_ANSWER)
    assert REFUSED | BLOCKED.keys() >= NO_SUCH_TOPIC
    assert set(GROUP.values()) == {Meaning.STALE, Meaning.LOST}


def test_lists_of_codes_are_here_only() -> None:
    paths = [path for package in ("spark", "broker", "testing") for path in (STREAMS / package).rglob("*.py")]
    listed = [
        f"{path.relative_to(STREAMS)}:{node.lineno}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict)
        if any(ast.unparse(each).startswith("KafkaError.") for each in ast.iter_child_nodes(node))
    ]
    assert listed == []


@pytest.mark.parametrize(
    ("error", "kind", "named"),
    [
        (KafkaError(E._TIMED_OUT, "late"), BrokerUnavailable, ("a:1", "refused by a:1", "_TIMED_OUT")),
        (KafkaError(E.SASL_AUTHENTICATION_FAILED, "bad password"), ConfigError, ()),
        (KafkaError(E.TOPIC_AUTHORIZATION_FAILED), TopicError, ("ACL",)),
        (KafkaError(E.INVALID_CONFIG, "no such"), TopicError, ("describing topic x: INVALID_CONFIG: no such",)),
    ],
)
def test_a_request_fails_for_want_of_an_answer_of_permission_or_of_sense(
    error: KafkaError, kind: type[Exception], named: tuple[str, ...]
) -> None:
    failed = request_failed("describing topic x", "a:1", error, "refused by a:1")
    assert isinstance(failed, kind)
    assert [text for text in named if text not in str(failed)] == []


def test_an_exception_without_an_error_has_one() -> None:
    assert error_of(KafkaException()).code() == KafkaError._FAIL


def test_a_cause_is_told_once() -> None:
    text = str(broker_unavailable("x", "a:1", KafkaError(E._TRANSPORT, "refused"), "_TRANSPORT: refused"))
    assert text.count("refused") == 1


@pytest.mark.parametrize(
    ("reason", "there"),
    [
        ("a:1/bootstrap: Connect to ipv4#10.0.0.1:1 failed: Connection refused", False),
        ("b:2/1: Connect to ipv4#10.0.0.5:2 failed: Connection refused", True),  # the address that broker 1 advertises
    ],
)
def test_a_broker_that_advertises_a_wrong_address_is_not_called_down(reason: str, there: bool) -> None:
    text = str(broker_unavailable("x", "a:1", None, reason))
    assert ("b:2/1" in text, "nothing listens at a:1" in text) == (there, not there)
