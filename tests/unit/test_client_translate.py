from __future__ import annotations

import ast
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException

import streams
from streams.kafka.translate import NO_SUCH_TOPIC, NOT_AUTHORIZED, REFUSED, broker_unavailable, error_of
from streams.kafka.wire.answers import GROUP, PRODUCE, Meaning

STREAMS = Path(streams.__file__).parent
E = KafkaError


def test_the_tables_do_not_contradict_each_other() -> None:
    assert not GROUP.keys() & REFUSED
    assert not REFUSED & NO_SUCH_TOPIC
    assert {meaning for code, meaning in PRODUCE.items() if code in NO_SUCH_TOPIC} == {Meaning.AGAIN_LEADER}
    assert set(GROUP.values()) == {Meaning.STALE, Meaning.LOST}


def test_the_tables_that_follow_from_others() -> None:
    assert {
        *(E.MSG_SIZE_TOO_LARGE, E.RECORD_LIST_TOO_LARGE, E.INVALID_MSG_SIZE, E.INVALID_RECORD, E.TOPIC_EXCEPTION),
        *(E.TOPIC_AUTHORIZATION_FAILED, E.POLICY_VIOLATION, E.INVALID_TIMESTAMP),
    } == REFUSED
    assert {E.UNKNOWN_TOPIC_OR_PART, E.UNKNOWN_TOPIC_ID, E._UNKNOWN_TOPIC, E._UNKNOWN_PARTITION} == NO_SUCH_TOPIC
    assert len(NOT_AUTHORIZED) == 4


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


def test_an_exception_without_an_error_has_one() -> None:
    assert error_of(KafkaException()).code() == KafkaError._FAIL


@pytest.mark.parametrize(
    ("reason", "there"),
    [
        ("a:1/bootstrap: Connect to ipv4#10.0.0.1:1 failed: Connection refused", False),
        ("_TRANSPORT: a:1: Connection refused", False),
        ("b:2/1: Connect to ipv4#10.0.0.5:2 failed: Connection refused", True),  # the address that broker 1 advertises
    ],
)
def test_a_broker_that_advertises_a_wrong_address_is_not_called_down(reason: str, there: bool) -> None:
    text = str(broker_unavailable("x", "a:1", reason))
    assert ("b:2/1" in text, "nothing listens at a:1" in text) == (there, not there)
