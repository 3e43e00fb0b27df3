"""Settings of the group, of moves, and of a source on another cluster."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from streams import EventSourceConfig
from streams.errors import ConfigError


def config(**settings: Any) -> EventSourceConfig:
    return EventSourceConfig(**{"group_id": "g", "topic": "t", "num_partitions": 1, **settings})


def test_secrets_do_not_show_in_a_config() -> None:
    secret = {"sasl.password": "hunter2", "security.protocol": "SASL_SSL"}
    shown = config(client_settings=secret, source_bootstrap_servers="a:1", source_client_settings=secret)
    for text in (
        repr(shown),
        str(shown),
        f"{shown}",
        repr([shown]),
        repr(shown.resolved({"KES_BOOTSTRAP_SERVERS": "b:1"})),
    ):
        assert "hunter2" not in text
        assert "sasl.password" in text, "that it is set may be seen"


def test_a_config_is_still_a_value() -> None:
    assert config() == config()
    assert msgspec.structs.replace(config(), topic="u").topic == "u"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy": "eager"}, "strategy names 'eager'"),
        ({"strategy": ("range", "range")}, "two different ones"),
        ({"strategy": ()}, "name one strategy"),
        ({"membership": "zookeeper"}, "membership is 'zookeeper'"),
        ({"membership": "librdkafka"}, "cannot run the strategy 'incremental'"),
        ({"membership": "broker"}, "cannot run the strategy 'incremental'"),
        ({"num_standbys": 1.5}, "whole number"),
        ({"num_standbys": -1}, "num_standbys is -1"),
        ({"max_moves": 0}, "max_moves is 0"),
        ({"max_move_bytes": 0}, "max_move_bytes is 0"),
        ({"leave_timeout_seconds": -1}, "leave_timeout_seconds is -1"),
        ({"preparation_timeout_seconds": 0}, "preparation_timeout_seconds is 0"),
        ({"source_client_settings": {"a": "b"}}, "without source_bootstrap_servers"),
        ({"strategy": 3}, "strategy is of type int; it must be a name"),
        ({"group_id": None}, "group_id is None"),
        ({"session_timeout_seconds": "6"}, "session_timeout_seconds is '6'; it must be a number"),
        ({"leave_timeout_seconds": None}, "leave_timeout_seconds is None; it must be a number"),
        ({"client_settings": "hunter2"}, "client_settings is of type str; it must be a dictionary"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(**settings)


def test_where_offsets_are_committed() -> None:
    assert config().offsets_topic == "t"
    elsewhere = config(source_bootstrap_servers="a:1")
    assert (elsewhere.offsets_topic, elsewhere.source_is_elsewhere) == ("g.t.commit-log", True)


def test_strategies_in_order_of_preference() -> None:
    assert config().strategies == ("incremental",)
    assert config(strategy=("range", "incremental")).strategies == ("range", "incremental")
