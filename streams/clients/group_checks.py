"""Whether a group stands still and has no past: asked before somebody else writes what only its members write."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

from streams.clients import kafka_python_settings
from streams.clients.admin import TopicAdmin
from streams.clients.group_view import GroupQuestions
from streams.clients.kafka_python_client import KafkaPythonClient
from streams.clients.reader import PartitionReader
from streams.clients.settings import ClientSettings
from streams.clients.source_log import SourceLog
from streams.clients.takeover import KafkaPythonTakeOver
from streams.config import EventSourceConfig
from streams.errors import OffsetError, Stopped, TopicError
from streams.records import IncomingRecord
from streams.topics import TopicSpec

_SECONDS: Final = 30.0
_CLOSE_SECONDS: Final = 2.0
_AT_REST: Final = ("Empty", "Dead", "")


class GroupChecks:
    """Questions about one event source's group and logs. Blocks; one thread. ``with GroupChecks(config) as checks``."""

    def __init__(self, config: EventSourceConfig) -> None:
        self._config = config
        security = kafka_python_settings.translate(kafka_python_settings.security_only(config.client_settings))
        self._settings = ClientSettings(config.bootstrap_servers, config.client_settings, client_id="kes-bootstrap")
        self._client = KafkaPythonClient(config.bootstrap_servers, "kes-bootstrap", security)
        self._client.start()
        self._questions = GroupQuestions(config.bootstrap_servers, security)
        self._group_log = KafkaPythonTakeOver(self._client, config.group_id, config.offsets_topic)
        self._elsewhere = _source_log(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._elsewhere is not None:
            self._elsewhere.close()
        self._questions.close()
        self._client.close(_CLOSE_SECONDS)

    def source(self) -> tuple[dict[int, tuple[int, int]], str]:
        """(log start, high watermark) of each partition of the source topic, and the topic's id. Raises
        ``TopicError``."""
        log: Any = self._elsewhere or self._group_log
        topic, deadline = self._config.topic, _deadline()
        return log.log_range(topic, range(self._config.num_partitions), deadline), log.topic_id(topic, deadline)

    def create(self, specs: list[TopicSpec]) -> None:
        """Create topics that are missing; ``TopicError`` for those that are not as they must be."""
        admin = TopicAdmin(self._settings)
        try:
            admin.create(specs)
            differences = admin.differences(specs)
        finally:
            admin.close()
        if differences:
            raise TopicError("; ".join(differences))

    def refuse_unless_at_rest(self) -> None:
        """Raises ``OffsetError`` when the group has members, or committed offsets. What departed members left open is
        ended first, so that it cannot be committed any more."""
        config = self._config
        group = self._questions.look(config.group_id, _SECONDS)
        if group.state not in _AT_REST or group.members:
            names = ", ".join(member.instance for member in group.members[:5]) or group.state
            raise OffsetError(f"group {config.group_id} is alive ({names}): stop all members of the event source first")
        self._group_log.fence_departed((), _deadline())
        group = self._questions.look(config.group_id, _SECONDS)
        if committed := group.committed.get(config.offsets_topic):
            number, offset = min(committed.items())
            raise OffsetError(
                f"group {config.group_id} has a position already ({config.topic}[{number}] at offset {offset}): "
                "delete the group's offsets and the changelog to begin anew, or use another group_id"
            )

    def refuse_unless_empty(self, topic: str) -> None:
        """Raises ``OffsetError`` when a changelog holds anything committed: state, or a position."""
        ranges = self._group_log.log_range(topic, range(self._config.num_partitions), _deadline())
        ranges = {number: span for number, span in ranges.items() if span[0] < span[1]}
        found: list[IncomingRecord] = []
        reader = PartitionReader(self._settings)
        try:
            with contextlib.suppress(Stopped):
                reader.read(
                    topic,
                    ranges,
                    lambda _, records: found.extend(record for record in records if record.value is not None),
                    stalled_after_seconds=_SECONDS,
                    cancelled=lambda: bool(found),
                )
        finally:
            reader.close()
        if found:
            raise OffsetError(
                f"{found[0].where} holds state or a position already: delete the group's offsets and the changelog to "
                "begin anew, or use another group_id"
            )


def _source_log(config: EventSourceConfig) -> SourceLog | None:
    if not config.source_is_elsewhere:
        return None
    security: Mapping[str, Any] = kafka_python_settings.security_only(config.source_client_settings)
    return SourceLog(config.source_bootstrap_servers, "kes-bootstrap", kafka_python_settings.translate(security))


def _deadline() -> float:
    return time.monotonic() + _SECONDS
