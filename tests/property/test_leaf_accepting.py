"""Messages made into records by compiled code and in plain Python: the same records, positions and places."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, Message
from hypothesis import given
from hypothesis import strategies as st

from streams.kafka.reading import accepting
from tests.property.leaves_kit import needs_compiled, outcome, plain

pytestmark = needs_compiled
PLAIN = plain(accepting)
PARTITIONS = (0, 1, 300, 1_000)

contents: Any = st.one_of(st.none(), st.binary(max_size=3))
headers: Any = st.sampled_from([None, [], [("__grt__", b"A")], [("__grt__", b"B")], [("h", None), ("h", b"v")]])


def message(number: int, offset: int, key: Any, value: Any, listed: Any, failed: bool) -> Message:
    partition = int(str(number))  # another object than in ``positions``, if it is large
    error = KafkaError(KafkaError._PARTITION_EOF) if failed else None
    return Message("t", partition, offset, key, value, listed, error, (1, 1_000 + offset))


messages = st.builds(
    message,
    st.sampled_from([*PARTITIONS, 7]),
    st.integers(0, 9),
    contents,
    contents,
    headers,
    st.sampled_from([False] * 7 + [True]),
)


def taken(module: Any, given_messages: list[Any], start: int) -> Any:
    """The answer, and all that was changed."""
    positions, at_end = {0: -1, 1: 3, 300: 0, 1_000: 5}, {0, 300}
    batches: dict[int, Any] = {1: ["before"]}
    left = [*given_messages]
    found = outcome(module.accept, left, start, "t", positions, batches, at_end)
    return found, positions, batches, at_end, [one is None for one in left]


@given(st.lists(messages, max_size=12), st.integers(0, 3))
def test_messages_become_the_same_records(found: list[Message], start: int) -> None:
    assert taken(accepting, found, start) == taken(PLAIN, found, start)


@pytest.mark.parametrize("foreign", [None, 7, object()], ids=["none", "number", "object"])
def test_what_is_no_message_is_refused_alike(foreign: Any) -> None:
    before = message(0, 1, b"k", b"v", None, False)
    assert taken(accepting, [before, foreign], 0) == taken(PLAIN, [before, foreign], 0)
