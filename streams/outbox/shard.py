"""The rows of one shard on their way to Kafka: claimed, sent, deleted, exactly once.

Words: the *claim* of a shard is its transactional id ``<name>.outbox.<shard>`` (``streams.runtime.claim``);
the *ring* is in ``streams.core.outbox``. A group gives shards to relays (``streams.runtime.ownership.tenure``), which
only says who should try. The order of the steps is the protocol. Each rule below is one of the model in
``tests/model/outbox_rules.py``, which finds a lost, doubled or misplaced row when a rule is left out.

O1  The id is taken before the ring is read: nothing that a predecessor has begun can be committed behind the ring.
O2  The rows and the record that names them are sent in one transaction.
O3  Rows are deleted only after a commit that is known.
O4  Without a clear answer nothing is guessed: the shard is claimed again, which ends the transaction, and the ring
    tells which way.
O5  With each claim, and each session of the database, the rows that the ring names are deleted first: a failover of
    the database may have brought them back.
O6  A place of the ring is used again only when the deletion of its rows is known.
O7  Writers lock a key before they get an id (``streams.outbox.schema``): ids of a key are in the order of the commits.
O8  Rows are deleted by id and tag: after a failover the database may use an id again.

Whatever fails, everything in hand is dropped, session and transactional id too, and the shard is claimed again. Nothing
is patched.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from streams.core.outbox import SentBatch
from streams.errors import BrokerUnavailable, RecordsRefused, TransactionFailed
from streams.kafka.settings import ClientSettings
from streams.outbox.config import RelayConfig
from streams.outbox.database import DatabaseLost, OutboxAbout, OutboxSession, StashedRow
from streams.outbox.positions import ShardPositions, other_topic, positions_name
from streams.outbox.sessions import open_session
from streams.records import RefusedRecord
from streams.runtime.claim import Claim
from streams.runtime.ownership.tenure import Tenure
from streams.sak.backoff import backoff_seconds

_log = logging.getLogger(__name__)

_BUSY_SECONDS, _IDLE_SECONDS, _ASLEEP_SECONDS = 0.005, 0.025, 1.0
"""Between two looks for rows: after some came, after none came for a second, and while writers send wake-ups."""
_AWAKE_SECONDS: Final = 0.2
"""After the last row, before falling asleep."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
_RETRY_SECONDS: Final = 1.0


class ShardAcquired(NamedTuple):
    """This relay has claimed a shard; ``serial`` is that of its last batch."""

    shard: int
    serial: int


class ShardInterrupted(NamedTuple):
    """Broker or database do not answer, or another relay has claimed the shard: it is claimed again, if the group still
    gives it to this relay."""

    shard: int
    reason: str


class ShardReleased(NamedTuple):
    """This relay has let go of a shard, for another one, or because it stops."""

    shard: int
    reason: str


class BatchRelayed(NamedTuple):
    """A batch of so many rows is in Kafka, and deleted."""

    shard: int
    rows: int
    serial: int


class RowParked(NamedTuple):
    """Kafka refuses a row: it is set aside, with the later ones of its key behind it."""

    shard: int
    id: int
    topic: str
    error: str


RelayEvent = ShardAcquired | ShardInterrupted | ShardReleased | BatchRelayed | RowParked


def described(event: RelayEvent) -> str:
    """Say an event in a line."""
    match event:
        case ShardAcquired():
            return f"shard {event.shard}: acquired, last batch {event.serial}"
        case ShardInterrupted():
            return f"shard {event.shard}: claimed again: {event.reason}"
        case ShardReleased():
            return f"shard {event.shard}: released: {event.reason}"
        case BatchRelayed():
            return f"shard {event.shard}: batch {event.serial} of {event.rows} rows"
        case RowParked():
            return f"shard {event.shard}: row {event.id} for {event.topic} is parked: {event.error}"


class ShardLoop:
    """One shard, for the time of a tenure, on a thread of its own. ``emit`` gets the events, on this thread."""

    def __init__(
        self,
        config: RelayConfig,
        tenure: Tenure,
        emit: Callable[[RelayEvent], None],
        *,
        session: Callable[[str, str], OutboxSession] = open_session,
        claim: Callable[..., Claim] = Claim,
    ) -> None:
        self.tenure, self.shard = tenure, tenure.partition
        self.database_lost_at: float | None = None
        """When the database began not to answer (``time.monotonic``). Any thread may read it."""
        self._config, self._emit = config, emit
        self._open_session, self._new_claim = session, claim
        self._settings = ClientSettings(config.bootstrap_servers, config.client_settings, client_id="kes-outbox")
        self._id = f"{config.name}.outbox.{self.shard}"
        self._limit = config.batch_rows
        self._failures = 0
        self._nudged = threading.Event()
        self._session: OutboxSession | None = None

    def run(self) -> None:
        """Relay until the tenure is over. What passes (brokers, database, another owner) is tried again, with growing
        pauses; other errors are raised: ``OutboxError``, ``OffsetError``, ``TopicError``, ``ConfigError``."""
        while not self.tenure.is_over:
            try:
                with self._open_session(self._config.database, self._config.table) as session:
                    self._session = session
                    about = session.about()
                    self.database_lost_at = None
                    self._own(session, about)
            except (DatabaseLost, TransactionFailed, BrokerUnavailable) as error:
                if isinstance(error, DatabaseLost) and self.database_lost_at is None:
                    self.database_lost_at = time.monotonic()
                self._failed(error)
            finally:
                self._session = None
        self._emit(ShardReleased(self.shard, self.tenure.reason))

    def wake(self) -> None:
        """Look for rows, and at the tenure, at once. Any thread."""
        self._nudged.set()
        session = self._session
        if session is not None:
            session.rouse()

    def interrupt(self) -> None:
        """End a call of the database that hangs. Any thread."""
        session = self._session
        if session is not None:
            session.close()

    def _failed(self, error: Exception) -> None:
        """Pause. The claim may have been taken by one whom the group has given the shard: it is taken back only when
        the group says so after that. Else two relays would take it from each other."""
        self._failures += 1
        self._limit = max(1, self._limit // 2)  # it may have been too large for its time, or for a batch of its topic
        _log.warning("%s: claimed again: %s", self._id, error)
        self._emit(ShardInterrupted(self.shard, str(error)))
        while not self.tenure.wait(backoff_seconds(self._failures, _FIRST_PAUSE, _LONGEST_PAUSE)):
            if self.tenure.is_confirmed():
                return

    def _own(self, session: OutboxSession, about: OutboxAbout) -> None:
        claim = self._new_claim(self._settings, self._id, positions_name(self._config.name), self.shard)
        with claim:
            positions = ShardPositions(claim, about.identity)
            topic_id = positions.topic_id(about.shards)
            if (known := session.adopt(topic_id)) != topic_id:
                raise other_topic(claim.where, topic_id, known)
            ring = positions.read(claim.take())  # O1: ends the predecessor's transaction, and the predecessor, first
            # Before anything is deleted: what was set back is refused while all rows are still there.
            ring.check_against(session.noted_serial(self.shard), claim.where)
            session.delete(self.shard, ring.rows, ring.serial)  # O5: once per session, since each makes a claim
            # Before the first fetch: what is committed later wakes the loop, what was committed earlier is fetched.
            session.listen()
            session.show_owner(about.lock_class, self.shard)
            self._emit(ShardAcquired(self.shard, ring.serial))
            pace = _Pace(session, about.lock_class, self.shard, self._nudged)
            serial = ring.serial
            while not self.tenure.is_over:
                rows = session.fetch(self.shard, self._limit, self._config.batch_bytes)
                if rows:
                    serial += 1
                    self._relay(session, claim, positions, rows, serial)
                pace.after(len(rows))

    def _relay(
        self,
        session: OutboxSession,
        claim: Claim,
        positions: ShardPositions,
        rows: list[StashedRow],
        serial: int,
    ) -> None:
        batch = SentBatch(serial, tuple(row.row for row in rows))
        reason = f"a foreign record in {claim.topic}, which has the positions, would stop all relays of the outbox"
        outputs = [row.output for row in rows]
        strays = [RefusedRecord(one.topic, "REFUSED", reason, True, one) for one in outputs if one.topic == claim.topic]
        try:
            if strays:
                raise RecordsRefused("produce", strays)
            claim.append([*outputs, positions.record(batch)])  # O2; O4: a failure leaves this loop
        except RecordsRefused as refused:
            if self._park(session, rows, refused.refused) or len(rows) > 1:
                self._limit, self._failures = len(rows), 0  # no outage; without a culprit, fewer rows find it
            raise
        # O3, O6: the next batch is not begun before this is known.
        session.delete(self.shard, batch.rows, serial)
        self._failures = 0
        self._limit = min(self._config.batch_rows, self._limit * 2)
        self._emit(BatchRelayed(self.shard, len(rows), serial))

    def _park(self, session: OutboxSession, rows: list[StashedRow], refused: Sequence[RefusedRecord]) -> int:
        """Set aside the rows that are refused, by their place in the batch, or all that the topic has in it; return
        their number."""
        errors: dict[int, str] = {}
        for record in refused:
            if record.output is not None and record.output.origin >= 0:
                errors.setdefault(record.output.origin, record.reason)
            elif record.output is None and not record.is_batch_only:
                of_topic = (index for index, row in enumerate(rows) if row.output.topic == record.topic)
                errors.update((index, record.reason) for index in of_topic if index not in errors)
        for index, error in sorted(errors.items()):
            row, output = rows[index]
            session.park(self.shard, row, error, self._config.backoff_seconds, self._config.max_backoff_seconds)
            _log.error("%s: row %d for %s is parked: %s", self._id, row.id, output.topic, error)
            self._emit(RowParked(self.shard, row.id, output.topic, error))
        return len(errors)


class _Pace:
    """Waits between two fetches, and sleeps when no rows come. One thread, with its session."""

    def __init__(self, session: OutboxSession, lock_class: int, shard: int, nudged: threading.Event) -> None:
        self._session, self._lock_class, self._shard, self._nudged = session, lock_class, shard, nudged
        self._last_row = time.monotonic()
        self._next_retry = 0.0
        self._is_asleep = False

    def after(self, rows: int) -> None:
        """Wait as long as it fits what the last fetch has brought; take back parked rows whose time has come."""
        now = time.monotonic()
        if now >= self._next_retry:
            self._next_retry = now + _RETRY_SECONDS
            rows += self._session.retry_parked(self._shard)
        if rows:
            self._last_row = now
            if self._is_asleep:
                self._session.wake(self._lock_class, self._shard)
                self._is_asleep = False
            return
        if self._is_asleep:
            if not self._nudged.is_set():
                self._session.sleep(self._shard, _ASLEEP_SECONDS)
        elif now - self._last_row > _AWAKE_SECONDS and self._session.fall_asleep(self._lock_class, self._shard):
            self._is_asleep = True  # and look once more: what was committed before sent no wake-up
        else:
            self._nudged.wait(_BUSY_SECONDS if now - self._last_row < _RETRY_SECONDS else _IDLE_SECONDS)
        # In front of the next fetch, which sees what the nudge was for.
        self._nudged.clear()
