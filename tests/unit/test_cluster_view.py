"""What a cluster's answers say of it: the version of a broker by its requests, and the rights by their bits."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from streams.kafka import permissions
from streams.kafka.questions.cluster_view import ClusterQuestions, kafka_version
from streams.kafka.wire.schemas.metadata import MetadataResponse

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of kafka-python's own
    from kafka.protocol.broker_version_data import BROKER_API_VERSIONS

# Brokers of 3.4 have all that those of 3.3 have for clients, and nothing else.
VERSIONS = {".".join(map(str, number)): keys for number, keys in BROKER_API_VERSIONS.items() if number >= (2, 7)}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_broker_is_as_new_as_its_requests(version: str) -> None:
    newest = {key: last for key, (_, last) in VERSIONS[version].items()}
    assert kafka_version(newest) == {"3.4": "3.3"}.get(version, version)


def test_a_broker_that_tells_nothing_is_an_old_one() -> None:
    assert kafka_version({}) == "2.7"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("code", "operations", "lacks"),
    [
        (0, 1 << 3, False),
        (0, 1 << 4 | 1 << 8, True),
        (0, 0, True),
        (3, -(2**31), False),  # a topic that is still to be made
        (29, -(2**31), True),
    ],
)
async def test_a_right_is_a_bit_of_the_answer(code: int, operations: int, lacks: bool) -> None:
    async def send(request: Any, *_: object, **versions: int) -> MetadataResponse:
        assert (request.include_topic_authorized_operations, request.allow_auto_topic_creation) == (True, False)
        topic = MetadataResponse.MetadataResponseTopic(error_code=code, topic_authorized_operations=operations)
        return MetadataResponse(topics=[topic])

    questions: Any = ClusterQuestions.__new__(ClusterQuestions)
    questions._client = SimpleNamespace(send=send)
    assert await questions._is_lacking(permissions.on_topic("Read", "t"), 1.0) == lacks
