"""Visits of a ``TestDriver``'s source: requests as a test makes them, and how far runs are."""

from __future__ import annotations

from streams.core.visits import VisitRequest, encode_request, request_headers
from streams.errors import ConfigError
from streams.statistics import VisitStatistics
from streams.testing.driver_base import Driving


class DrivenVisits(Driving):
    """The part of ``TestDriver`` about visits."""

    def start_visit(self, name: str, *, run_id: str = "run", wait: bool = True) -> str:
        """Request a run of a visit in all partitions, as ``EventSource.start_visit``, and run until it is over.
        ``wait=False`` leaves the running to the next call. Returns its id. Raises ``ConfigError`` for a source without
        such a visit; else as ``send``."""
        self._request(VisitRequest(name, run_id), wait=wait)
        return run_id

    def cancel_visit(self, name: str, *, run_id: str = "", wait: bool = True) -> None:
        """Cancel a run, or all runs of a visit, as ``EventSource.cancel_visit``; else as ``start_visit``."""
        self._request(VisitRequest(name, run_id, "cancel"), wait=wait)

    def visits(self, partition: int) -> tuple[VisitStatistics, ...]:
        """Return how far visits are in this partition, on the member that works on it; none without one."""
        self._check_partition(partition)
        for member in self._world.running():
            engine = member.engine
            worker = None if engine is None or member.is_frozen else engine.workers.get(partition)
            if worker is not None and worker.state.value == "active":
                return worker.visits()
        return ()

    def _request(self, request: VisitRequest, *, wait: bool) -> None:
        self._check_open()
        world = self._world
        known = world.visits
        if request.visit not in known:
            raise ConfigError(
                f"this driver's source has no visit {request.visit!r}; it has {', '.join(known) or 'none'}"
            )
        for partition in self._partitions():
            value, headers = encode_request(request), request_headers()
            world.broker.append(world.config.visits_topic, partition, None, value, headers)
        if wait:
            self._settle(balanced=False)
