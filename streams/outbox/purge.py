"""``kes outbox purge``: what is in Kafka is deleted from the tables, nothing is sent; the ways out after a restore.

Each shard is claimed as a relay claims it, which fences the relay that has it (rule O1), and the rows that the ring
names are deleted (O5). Without ``after_restore`` that is all, and relays may run: they claim the shard again.

After the database or the positions topic was set back, the ring is continued up to the greater of the two serials, by
batches without rows in the places that are missing, and the serial is noted: then the two fit again. The deletion comes
first, since a batch takes the place of an older one (O6). Each step may be repeated after a failure at any point.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Final, Literal, NamedTuple, get_args

from streams.core.outbox import RING, Ring, SentBatch
from streams.errors import ConfigError, OffsetError, OutboxError, TransactionFailed
from streams.kafka.settings import ClientSettings
from streams.outbox.config import RelayConfig
from streams.outbox.database import DatabaseLost, OutboxAbout, OutboxSession
from streams.outbox.positions import ShardPositions, other_topic, positions_name
from streams.outbox.sessions import open_session
from streams.runtime.claim import Claim

AfterRestore = Literal["no", "send", "drop"]
_CHOICES: Final = get_args(AfterRestore)
_MOST_AT_ONCE: Final = 16
"""Claims that are taken at a time: each has threads and connections of its own."""


class PurgedShard(NamedTuple):
    """``deleted`` rows were in Kafka by the ring, ``dropped`` ones by ``after_restore="drop"``; ``serial`` of the last
    batch, also of those without rows that fill the ring."""

    shard: int
    serial: int
    deleted: int
    dropped: int


def purge(config: RelayConfig, after_restore: AfterRestore = "no") -> list[PurgedShard]:
    """Delete rows that are in Kafka already, and send none. Blocks.

    All shards are claimed, and compared with the tables, before a row of any is deleted: where one is refused, nothing
    is changed. ``after_restore``, with relays and writers stopped: ``"send"`` has the rows that are left sent,
    of which some may be in Kafka already; ``"drop"`` first deletes what the database had at the time of the ring's last
    batch, up to its highest id (only after the database was set back: rows of transactions that were late are lost with
    it). Raises ``OffsetError`` (something was set back), ``OutboxError``, ``TopicError``, ``BrokerUnavailable``,
    ``ConfigError``.
    """
    if after_restore not in _CHOICES:
        raise ConfigError(f"after_restore is {after_restore!r}; use one of {', '.join(map(repr, _CHOICES))}")
    try:
        with open_session(config.database, config.table) as session:
            about = session.about()
            before = [session.noted_serial(shard) for shard in range(about.shards)]
        # Another session for the rest: PostgreSQL ends one that is idle for as long as slow brokers make a claim take.
        with _claimed(config, about, after_restore) as claimed, open_session(config.database, config.table) as session:
            pairs = zip(claimed, before, strict=True)
            stands = [_compared(session, one, noted, after_restore) for one, noted in pairs]
            return [_purged(session, about, stand, after_restore) for stand in stands]
    except DatabaseLost as error:
        raise OutboxError(f"the database does not answer: {error}") from None
    except TransactionFailed as error:
        raise OutboxError(
            f"another one claims the shard, or the broker fails: {error}. Stop the relays, and repeat"
        ) from error


class _ClaimedShard(NamedTuple):
    """A shard whose claim was taken, and its ring as it was then. ``is_other``: the outbox belongs to another topic."""

    claim: Claim
    positions: ShardPositions
    topic_id: str
    ring: Ring
    is_other: bool


class _ShardStand(NamedTuple):
    """A shard beside its tables. ``noted``: the serial in the database. ``is_set_back``: the database has rows that
    were sent, and that the ring does not name."""

    claimed: _ClaimedShard
    noted: int
    is_set_back: bool


@contextmanager
def _claimed(config: RelayConfig, about: OutboxAbout, after_restore: AfterRestore) -> Iterator[list[_ClaimedShard]]:
    """Claim all shards, each on a thread: a claim waits for brokers most of its time. They are kept where rings may be
    filled; else each is closed once its ring is read, since all that follows may be repeated at any time."""
    settings = ClientSettings(config.bootstrap_servers, config.client_settings, client_id="kes-outbox")
    claims: dict[int, Claim] = {}

    def claim(shard: int) -> _ClaimedShard:
        one = claims[shard] = Claim(settings, f"{config.name}.outbox.{shard}", positions_name(config.name), shard)
        positions = ShardPositions(one, about.identity)
        topic_id = positions.topic_id(about.shards)
        is_other = about.topic_id not in ("", topic_id)
        if is_other and after_restore == "no":
            raise other_topic(one.where, topic_id, about.topic_id)
        found = _ClaimedShard(one, positions, topic_id, positions.read(one.take()), is_other)
        if after_restore == "no":
            one.close()
        return found

    with ThreadPoolExecutor(min(about.shards, _MOST_AT_ONCE), "kes-purge") as threads:
        pending = [threads.submit(claim, shard) for shard in range(about.shards)]
        try:
            yield [one.result() for one in pending]
        finally:
            for one in pending:
                one.cancel()  # those that have not begun
            wait(pending)  # also after the refusal of one: a claim is closed when its thread has left it
            list(threads.map(lambda one: one.close(), claims.values()))


def _compared(session: OutboxSession, found: _ClaimedShard, before: int, after_restore: AfterRestore) -> _ShardStand:
    """Compare ring and database, which had noted a serial ``before`` the claim. Raises ``OffsetError``: they do not fit
    what is to be done."""
    claim, ring = found.claim, found.ring
    # What was noted before the claim is in the ring. What was noted since may not be: a relay has claimed the shard
    # again, and goes on.
    noted = max(before, min(session.noted_serial(claim.partition), ring.serial))
    if after_restore == "no":
        ring.check_against(noted, claim.where)
    # A batch that is missing, and that the database has not noted, may have rows that come back.
    is_set_back = ring.serial - noted > RING or any(gap > noted for gap in ring.missing(ring.serial))
    if after_restore == "drop" and (found.is_other or noted > ring.serial or (is_set_back and not ring.rows)):
        raise OffsetError(
            f"{claim.where} ends with batch {ring.serial}, and the database has noted batch {noted}: the topic "
            "was set back, or names no row, and so does not tell which rows may be dropped; use "
            "--after-restore send"
        )
    return _ShardStand(found, noted, is_set_back)


def _purged(session: OutboxSession, about: OutboxAbout, stand: _ShardStand, after_restore: AfterRestore) -> PurgedShard:
    claim, positions, topic_id, ring, is_other = stand.claimed
    shard, dropped = claim.partition, 0
    if after_restore == "drop" and stand.is_set_back:  # else the ring names all that may come back
        dropped = session.drop_through(shard, max(row.id for row in ring.rows), positions.newest_ms)
    deleted = session.delete(shard, ring.rows, ring.serial)
    serial = max(stand.noted, ring.serial)
    if after_restore != "no":
        if gaps := ring.missing(serial):
            claim.append([positions.record(SentBatch(gap, ())) for gap in gaps])
        if is_other and shard == about.shards - 1:  # the last: until then relays refuse the topic
            session.adopt(topic_id, replace=True)
    return PurgedShard(shard, serial, deleted, dropped)
