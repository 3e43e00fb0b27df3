from __future__ import annotations

from typing import Never

import pytest

from streams.clients.admin import TopicAdmin, TopicDescription, _gather, differences
from streams.clients.settings import ClientSettings
from streams.errors import BrokerUnavailable
from streams.topics import TopicSpec

SPEC = TopicSpec(name="t", partitions=10, replication_factor=3, configs={"cleanup.policy": "compact"})


def found(**changes: object) -> TopicDescription:
    values: dict[str, object] = {
        "name": "t",
        "topic_id": "id",
        "partitions": 10,
        "replication_factor": 3,
        "configs": {"cleanup.policy": "compact", "retention.ms": "5"},
    }
    return TopicDescription(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("topic", "sentences"),
    [
        (found(), []),
        (None, ["topic t does not exist"]),
        (found(partitions=3), ["topic t has 3 partitions, settings say 10"]),
        (found(replication_factor=1), ["topic t has replication factor 1, settings say 3"]),
        (found(configs={"cleanup.policy": "delete"}), ["topic t has cleanup.policy=delete, settings say compact"]),
        (found(configs={}), ["topic t has cleanup.policy=None, settings say compact"]),
    ],
)
def test_differences(topic: TopicDescription | None, sentences: list[str]) -> None:
    assert differences(SPEC, topic) == sentences


def test_lists_have_no_order_and_minus_one_means_the_brokers_default() -> None:
    spec = TopicSpec(name="t", partitions=10, replication_factor=-1, configs={"cleanup.policy": "delete,compact"})
    assert differences(spec, found(configs={"cleanup.policy": "compact, delete"})) == []


def test_nobody_at_the_address_is_said_in_time() -> None:
    admin = TopicAdmin(ClientSettings("127.0.0.1:1"))
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1") as caught:
        admin.describe(["t"], timeout_seconds=0.5)
    assert "topic t" in str(caught.value)
    admin.close()


def test_a_signal_within_the_c_client_is_the_signal() -> None:
    """Seen as ``SystemError: list_offsets returned a result with an exception set``, on Ctrl-C at the wrong moment."""

    def interrupted(*_: object) -> Never:
        error = SystemError("list_offsets returned a result with an exception set")
        raise error from KeyboardInterrupt()

    with pytest.raises(KeyboardInterrupt):
        _gather(interrupted, None, 1.0)  # type: ignore[arg-type]

    def broken(*_: object) -> Never:
        raise SystemError("something else")

    with pytest.raises(SystemError, match="something else"):
        _gather(broken, None, 1.0)  # type: ignore[arg-type]
