"""``kes outbox purge``: what is in Kafka is deleted from the tables, nothing is sent; the ways out after a restore.

Each shard is claimed as a relay claims it, which fences the relay that has it (rule O1), and the rows that the ring
names are deleted (O5). Without ``after_restore`` that is all, and relays may run: they claim the shard again.

After the database or the positions topic was set back, the ring is continued up to the greater of the two serials, by
batches without rows in the places that are missing, and the serial is noted: then the two fit again. The deletion comes
first, since a batch takes the place of an older one (O6). Each step may be repeated after a failure at any point.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Final, Literal, NamedTuple, get_args

from streams.clients.settings import ClientSettings
from streams.core.outbox import RING, Ring, SentBatch
from streams.errors import ConfigError, OffsetError, OutboxError, TransactionFailed
from streams.outbox.config import RelayConfig
from streams.outbox.database import DatabaseLost, OutboxAbout, OutboxSession, open_session
from streams.outbox.positions import ShardPositions, other_topic, positions_name
from streams.runtime.claim import Claim

AfterRestore = Literal["no", "send", "drop"]
_CHOICES: Final = get_args(AfterRestore)


class PurgedShard(NamedTuple):
    """``deleted`` rows were in Kafka by the ring, ``dropped`` ones by ``after_restore="drop"``; ``serial`` of the last
    batch, also of those without rows that fill the ring."""

    shard: int
    serial: int
    deleted: int
    dropped: int


def purge(config: RelayConfig, after_restore: AfterRestore = "no") -> list[PurgedShard]:
    """Delete rows that are in Kafka already, shard by shard, and send none. Blocks.

    ``after_restore``, with relays and writers stopped: ``"send"`` has the rows that are left sent, of which some may be
    in Kafka already; ``"drop"`` first deletes what the database had at the time of the ring's last batch, up to its
    highest id (only after the database was set back: rows of transactions that were late are lost with it). Where it
    must refuse one shard, it drops nothing of the others. Raises
    ``OffsetError`` (something was set back), ``OutboxError``, ``TopicError``, ``BrokerUnavailable``, ``ConfigError``.
    """
    if after_restore not in _CHOICES:
        raise ConfigError(f"after_restore is {after_restore!r}; use one of {', '.join(map(repr, _CHOICES))}")
    try:
        with open_session(config.database, config.table) as session:
            about = session.about()
            claimed = [
                _claimed(config, session, about, shard, after_restore) for shard in range(about.shards)
            ]  # each is taken when its block is entered
            if after_restore != "drop":
                return [_entered(one, session, about, shard, after_restore) for shard, one in enumerate(claimed)]
            with ExitStack() as all_of_them:  # before the first one is changed
                stands = [all_of_them.enter_context(one) for one in claimed]
                return [_purged(one, session, about, shard, after_restore) for shard, one in enumerate(stands)]
    except DatabaseLost as error:
        raise OutboxError(f"the database does not answer: {error}") from None
    except TransactionFailed as error:
        raise OutboxError(
            f"another one claims the shard, or the broker fails: {error}. Stop the relays, and repeat"
        ) from error


class _ShardStand(NamedTuple):
    """A shard whose claim was taken. ``noted``: the serial in the database. ``is_other``: the outbox belongs to another
    topic. ``is_set_back``: the database has rows that were sent, and that the ring does not name."""

    claim: Claim
    positions: ShardPositions
    topic_id: str
    ring: Ring
    noted: int
    is_other: bool
    is_set_back: bool


@contextmanager
def _claimed(
    config: RelayConfig, session: OutboxSession, about: OutboxAbout, shard: int, after_restore: AfterRestore
) -> Iterator[_ShardStand]:
    """Claim a shard, and compare ring and database. Raises ``OffsetError``: they do not fit what is to be done."""
    settings = ClientSettings(config.bootstrap_servers, config.client_settings, client_id="kes-outbox")
    with Claim(settings, f"{config.name}.outbox.{shard}", positions_name(config.name), shard) as claim:
        positions = ShardPositions(claim, about.identity)
        topic_id = positions.topic_id(about.shards)
        is_other = about.topic_id not in ("", topic_id)
        if is_other and after_restore == "no":
            raise other_topic(claim.where, topic_id, about.topic_id)
        ring = positions.read(claim.take())
        noted = session.noted_serial(shard)
        if after_restore == "no":
            ring.check_against(noted, claim.where)
        # A batch that is missing, and that the database has not noted, may have rows that come back.
        is_set_back = ring.serial - noted > RING or any(gap > noted for gap in ring.missing(ring.serial))
        if after_restore == "drop" and (is_other or noted > ring.serial or (is_set_back and not ring.rows)):
            raise OffsetError(
                f"{claim.where} ends with batch {ring.serial}, and the database has noted batch {noted}: the topic "
                "was set back, or names no row, and so does not tell which rows may be dropped; use "
                "--after-restore send"
            )
        yield _ShardStand(claim, positions, topic_id, ring, noted, is_other, is_set_back)


def _entered(
    claimed: AbstractContextManager[_ShardStand],
    session: OutboxSession,
    about: OutboxAbout,
    shard: int,
    after_restore: AfterRestore,
) -> PurgedShard:
    with claimed as found:
        return _purged(found, session, about, shard, after_restore)


def _purged(
    found: _ShardStand, session: OutboxSession, about: OutboxAbout, shard: int, after_restore: AfterRestore
) -> PurgedShard:
    ring, positions = found.ring, found.positions
    dropped = 0
    if after_restore == "drop" and found.is_set_back:  # else the ring names all that may come back
        dropped = session.drop_through(shard, max(row.id for row in ring.rows), positions.newest_ms)
    deleted = session.delete(shard, ring.rows, ring.serial)
    serial = max(found.noted, ring.serial)
    if after_restore != "no":
        if gaps := ring.missing(serial):
            found.claim.append([positions.record(SentBatch(gap, ())) for gap in gaps])
        if found.is_other and shard == about.shards - 1:  # the last: until then relays refuse the topic
            session.adopt(found.topic_id, replace=True)
    return PurgedShard(shard, serial, deleted, dropped)
