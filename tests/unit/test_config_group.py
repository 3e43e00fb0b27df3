"""Settings in groups: of the group, of moves, and of a source on another cluster."""

from __future__ import annotations

import inspect
import pickle
import re
from typing import Any

import msgspec
import pytest

from streams import EventSourceConfig, GroupConfig, QueueConfig, TimeoutConfig
from streams.errors import ConfigError
from streams.settings.groups import GROUPS
from tests.vocabulary import config_of


def config(**settings: Any) -> EventSourceConfig:
    return config_of(**{"group_id": "g", "topic": "t", "num_partitions": 1, **settings})


def test_secrets_do_not_show_in_a_config() -> None:
    secret = {"sasl.password": "hunter2", "security.protocol": "SASL_SSL"}
    own = config(client_settings=secret, source_bootstrap_servers="a:1", source_client_settings=secret)
    for text in (repr(own), str(own), f"{own}", repr([own]), repr(own.resolved({"KES_BOOTSTRAP_SERVERS": "b:1"}))):
        assert "hunter2" not in text
        assert "sasl.password" in text, "that it is set may be seen"


def test_a_config_is_still_a_value() -> None:
    assert config() == config()
    assert msgspec.structs.replace(config(), topic="u").topic == "u"
    other = config(num_standbys=2, max_poll_records=7)
    assert pickle.loads(pickle.dumps(other)) == other


def test_the_docstrings_explain_each_setting_of_a_group() -> None:
    for kind in GROUPS.values():
        missing = [name for name in kind.__struct_fields__ if f"``{name}``" not in (inspect.getdoc(kind) or "")]
        assert missing == []


@pytest.mark.parametrize(
    ("group", "wrong", "said"),
    [
        (GroupConfig, {"max_moves": 0}, "GroupConfig.max_moves is 0"),
        (GroupConfig, {"strategy": "eager"}, "GroupConfig.strategy names 'eager'"),
        (GroupConfig, {"leave_timeout_seconds": -1}, "GroupConfig.leave_timeout_seconds is -1"),
        (QueueConfig, {"max_queued_bytes": 0}, "QueueConfig.max_queued_bytes is 0"),
        (TimeoutConfig, {"call_timeout_seconds": 0}, "TimeoutConfig.call_timeout_seconds is 0"),
        (TimeoutConfig, {"drain_timeout_seconds": 15}, "TimeoutConfig.drain_timeout_seconds (15) must be smaller"),
        (TimeoutConfig, {"transaction_timeout_seconds": 7}, "TimeoutConfig.transaction_timeout_seconds (7) must be"),
        (TimeoutConfig, {"heartbeat_interval_seconds": 3}, "TimeoutConfig.heartbeat_interval_seconds (3) must be at"),
    ],
)
def test_a_wrong_setting_of_a_group_is_named_with_it(group: Any, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        group(**wrong)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_standbys": -1}, "num_standbys is -1"),
        ({"timeouts": GroupConfig()}, "timeouts is of type GroupConfig; it must be a TimeoutConfig"),
        ({"strategy": ("range", "range")}, "two different ones"),
        ({"strategy": ()}, "name one strategy"),
        ({"membership": "zookeeper"}, "membership is 'zookeeper'"),
        ({"membership": "librdkafka", "strategy": "range"}, "membership 'streams' runs all three"),
        ({"membership": "broker"}, "cannot run the strategy 'incremental'"),
        ({"num_standbys": 1.5}, "whole number"),
        ({"max_move_bytes": 0}, "max_move_bytes is 0"),
        ({"preparation_timeout_seconds": 0}, "preparation_timeout_seconds is 0"),
        ({"source_client_settings": {"a": "b"}}, "without source_bootstrap_servers"),
        ({"strategy": 3}, "strategy is of type int; it must be a name"),
        ({"group_id": None}, "group_id is None"),
        ({"session_timeout_seconds": "6"}, "session_timeout_seconds is '6'; it must be a number"),
        ({"leave_timeout_seconds": None}, "leave_timeout_seconds is None; it must be a number"),
        ({"client_settings": "hunter2"}, "client_settings is of type str; it must be a dictionary"),
        ({"bootstrap_servers": "me:hunter2@host:1"}, "bootstrap_servers must not hold credentials"),
        ({"source_bootstrap_servers": ["a:1"]}, "source_bootstrap_servers is of type list; it must be addresses"),
        ({"error_policy": "skip"}, "error_policy is 'skip'; it must be an error policy"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(**settings)


def test_what_follows_from_settings() -> None:
    assert config().offsets_topic == "t"
    elsewhere = config(source_bootstrap_servers="a:1")
    assert (elsewhere.offsets_topic, elsewhere.source_is_elsewhere) == ("g.t.commit-log", True)
    assert config().group.strategies == ("incremental",)
    assert config(strategy=("range", "incremental")).group.strategies == ("range", "incremental")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: config(num_partition=1),
            "no setting 'num_partition'; did you mean num_partitions",
        ),
        (lambda: EventSourceConfig(num_standbys=1), "did you mean group=GroupConfig(num_standbys=...)?"),  # type: ignore[call-arg]
        (lambda: EventSourceConfig(call_timeout=1), "did you mean timeouts=TimeoutConfig(call_timeout_seconds=...)?"),  # type: ignore[call-arg]
        (lambda: config(xyzzy=1), "no setting 'xyzzy'; its settings are group_id, topic, num_p"),
        (lambda: EventSourceConfig(topic="t"), "EventSourceConfig needs group_id and num_partitions"),  # type: ignore[call-arg]
        (lambda: EventSourceConfig("g", "t", 1), "takes its settings by name: EventSourceConfig(group_id=..., ...)"),  # type: ignore[call-arg,misc]
    ],
)
def test_settings_that_do_not_exist_or_are_missing_are_named(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        make()
