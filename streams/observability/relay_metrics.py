"""``RelayMetrics``: what a relay of an outbox does, and what waits in its shards, as metrics of Prometheus."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric

from streams.errors import StreamsError
from streams.observability.catalogue import Instrument, Kind, Labels
from streams.observability.health import Verdict
from streams.observability.http_server import HttpServer, metrics_application
from streams.observability.prometheus import add_sample, family_of
from streams.outbox.database import DatabaseLost, ShardStatus
from streams.outbox.positions import positions_name
from streams.outbox.relay import Relay
from streams.outbox.sessions import open_session
from streams.outbox.shard import (
    BatchRelayed,
    RelayEvent,
    RowParked,
    ShardAcquired,
    ShardInterrupted,
    ShardReleased,
)
from streams.statistics import SourceState

_log = logging.getLogger(__name__)

_SHARD: Final = ("shard",)
ROWS = Instrument("kes_outbox_rows", Kind.COUNTER, "Rows that are in Kafka, and deleted", _SHARD, ())
BATCHES = Instrument("kes_outbox_batches", Kind.COUNTER, "Transactions of rows that are committed", _SHARD, ())
PARKED = Instrument("kes_outbox_refusals", Kind.COUNTER, "Times that Kafka refused a row, which was parked", _SHARD, ())
INTERRUPTIONS = Instrument("kes_outbox_interruptions", Kind.COUNTER, "Times that a shard was claimed again", _SHARD, ())
OWNED = Instrument("kes_outbox_shards", Kind.GAUGE, "Shards that this relay has claimed")
WAITING = Instrument("kes_outbox_waiting_rows", Kind.GAUGE, "Rows that wait, counted up to 100,000", _SHARD, ())
WAITING_PARKED = Instrument("kes_outbox_parked_rows", Kind.GAUGE, "Rows that are parked", _SHARD, ())
OLDEST = Instrument("kes_outbox_oldest_seconds", Kind.GAUGE, "Age of the oldest row that waits; 0: none", _SHARD, ())
DATABASE_UP = Instrument("kes_outbox_database_up", Kind.GAUGE, "1: the database has answered this scrape")
OF_RELAYS: Final = (
    ROWS,
    BATCHES,
    PARKED,
    INTERRUPTIONS,
    OWNED,
    WAITING,
    WAITING_PARKED,
    OLDEST,
    DATABASE_UP,
)


class RelayMetrics:
    """The metrics of one relay, and its probes. Make it before the relay starts. Each metric has the label ``group``,
    which is ``<name>.outbox``.

    Events are counted as they come; a scrape, on a thread of the server's, looks at the tables by a session of its
    own. Only shards that this relay owns are shown, so several relays do not show one twice.
    """

    def __init__(self, relay: Relay) -> None:
        self.registry = CollectorRegistry()
        self._relay = relay
        self._group = positions_name(relay.config.name)
        self._lock = threading.Lock()
        self._counts: Counter[tuple[Instrument, Labels]] = Counter()
        self._owned: set[int] = set()
        relay.on_event(self._note)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def serve(self, address: str, secret: str = "") -> HttpServer:
        """Serve ``/metrics``, ``/live`` and ``/ready``, as ``PrometheusMetrics.serve``. Raises ``ConfigError``."""
        probes = {"/live": self.live, "/ready": self.ready}
        return HttpServer(address, metrics_application(self.registry), probes, secret)

    def live(self, query: dict[str, str]) -> Verdict:
        """Check that the relay has not failed, and is not stopped."""
        state = self._relay.state
        return Verdict(state is not SourceState.STOPPING, f"{self._group}: {state.value}")

    def ready(self, query: dict[str, str]) -> Verdict:
        """Check that the relay is in its group; it may own no shard, when there are more relays than shards."""
        is_joined = self._relay.state is SourceState.RUNNING and bool(self._relay.member_id)
        with self._lock:
            owned = len(self._owned)
        return Verdict(is_joined, f"{self._group}: {f'{owned} shards' if is_joined else 'not in the group'}")

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, for the registry. Any thread."""
        with self._lock:
            counts, owned = dict(self._counts), set(self._owned)
        values: dict[Instrument, dict[Labels, float]] = {instrument: {} for instrument in OF_RELAYS}
        for (instrument, labels), count in counts.items():
            values[instrument][labels] = count
        values[OWNED][()] = len(owned)
        found = self._status()
        values[DATABASE_UP][()] = found is not None
        for status in found or ():
            if status.shard in owned:
                labels = (str(status.shard),)
                values[WAITING][labels] = status.waiting
                values[WAITING_PARKED][labels] = status.parked
                values[OLDEST][labels] = status.oldest_seconds
        for instrument, samples in values.items():
            family = family_of(instrument)
            for labels, value in samples.items():
                add_sample(family, instrument, (self._group, *labels), float(value))
            yield family

    def _status(self) -> list[ShardStatus] | None:
        try:
            with open_session(self._relay.config.database, self._relay.config.table) as session:
                return session.status(session.about())
        except (DatabaseLost, StreamsError):  # the relay says it, too
            return None
        except Exception:  # whatever it is, a scrape has the counters, and says that the database does not answer
            _log.exception("%s: the tables cannot be looked at", self._group)
            return None

    def _note(self, event: RelayEvent) -> None:
        labels = (str(event.shard),)
        with self._lock:
            match event:
                case ShardAcquired():
                    self._owned.add(event.shard)
                    for instrument in (ROWS, BATCHES, PARKED, INTERRUPTIONS):  # so that the first time is an increase
                        self._counts[instrument, labels] += 0
                case ShardReleased():
                    self._owned.discard(event.shard)
                case BatchRelayed():
                    self._counts[ROWS, labels] += event.rows
                    self._counts[BATCHES, labels] += 1
                case RowParked():
                    self._counts[PARKED, labels] += 1
                case ShardInterrupted():
                    self._owned.discard(event.shard)
                    self._counts[INTERRUPTIONS, labels] += 1
