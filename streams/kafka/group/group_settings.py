"""The settings of one group member."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from streams.errors import ConfigError
from streams.kafka.wire import group_bytes
from streams.model.group import Assignor


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """Settings of one member. Raises ``ConfigError`` for what cannot work, by the setting's name.

    ``instance`` is the member's stable name. ``assignors``: strategy name -> how it shares the ``partitions`` of
    ``topic``, the preferred one first; or ``server_assignor``: the broker shares them, by this assignor of its own.
    ``static``: the instance is its group instance id too.
    """

    group_id: str
    topic: str
    partitions: int
    instance: str
    assignors: Mapping[str, Assignor] = field(default_factory=dict)
    server_assignor: str = ""
    session_timeout_ms: int = 6000
    heartbeat_interval_ms: int = 300
    rebalance_timeout_ms: int = 15000
    static: bool = False

    def __post_init__(self) -> None:
        group_bytes.checked_name("group.id", self.group_id)
        group_bytes.checked_name("instance", self.instance, dots=False)
        if self.partitions < 1:
            raise ConfigError(f"topic {self.topic!r} has {self.partitions} partitions, at least 1 is needed")
        if not 0 < self.heartbeat_interval_ms < self.session_timeout_ms:
            raise ConfigError(
                f"heartbeat interval of {self.heartbeat_interval_ms} ms: it must be above 0 and below the session "
                f"timeout of {self.session_timeout_ms} ms"
            )
        if self.rebalance_timeout_ms < 1:
            raise ConfigError(f"rebalance timeout of {self.rebalance_timeout_ms} ms: it must be above 0")
        if not self.assignors and not self.server_assignor:
            raise ConfigError("strategy: at least one is needed")
        for strategy in self.assignors:
            group_bytes.protocol(strategy)

    @property
    def static_id(self) -> str | None:
        """The group instance id, if it has one."""
        return self.instance if self.static else None
