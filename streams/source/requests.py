"""Requests to a running event source: queries of its state, and runs of visits."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from streams.core.visits import VisitRequest
from streams.errors import ConfigError, RegistrationError
from streams.model.answers import Answer
from streams.records import Delivery, TopicPartition
from streams.source.declarations import Declarations
from streams.source.running import SourceRun, connected
from streams.source.visits import check_visit_name

T = TypeVar("T")


class SourceRequests:
    """The requests to one event source."""

    def __init__(self, declared: Declarations, run: SourceRun) -> None:
        self._declared = declared
        self._run = run

    async def start_visit(self, name: str, run_id: str | None) -> str:
        """See ``EventSource.start_visit``."""
        run = uuid.uuid4().hex if run_id is None else run_id
        await self._request_visit(VisitRequest(name, run))
        return run

    async def cancel_visit(self, name: str, run_id: str | None) -> None:
        """See ``EventSource.cancel_visit``."""
        if run_id == "":
            raise ConfigError("run_id is empty; leave it out to cancel all runs")
        await self._request_visit(VisitRequest(name, run_id or "", "cancel"))

    async def _request_visit(self, request: VisitRequest) -> None:
        from streams.runtime.visit_requests import send_request

        visits = self._declared.router.visits
        if request.visit not in visits:
            known = ", ".join(visits) or "none"
            raise RegistrationError(f"this source has no visit {request.visit!r}; it has {known}")
        if request.run or request.action == "start":
            check_visit_name("run_id", request.run)
        # Without a run there are no connections of one: the request is a record that any process may write.
        engine = self._run.engine
        config = self._declared.config.resolved() if engine is None else engine.config
        connections = connected(config) if engine is None else engine.connections
        await send_request(config, connections, request)

    async def query(
        self,
        key: str | bytes | None,
        read: Callable[[Any], T],
        *,
        partition: int | None,
        at_least: Delivery | Mapping[TopicPartition, int] | None,
        confirm: bool,
        timeout_seconds: float,
    ) -> Answer[T]:
        """See ``EventSource.query``."""
        from streams.runtime.queries.local import partition_of_key

        queries = self._run.queries()
        if asyncio.get_running_loop() is not self._run.loop:
            raise RegistrationError(
                "query was called on another event loop than the event source's; use query_threadsafe"
            )
        number = partition_of_key(self._declared.config, key, partition)
        named = key.encode() if isinstance(key, str) else key
        return await queries.query(
            number, read, key=named, at_least=at_least, confirm=confirm, timeout_seconds=timeout_seconds
        )
