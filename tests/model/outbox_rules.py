"""The relay of one shard of an outbox as a model: ``streams/outbox/shard.py`` step by step, with each rule a switch.

A world has two relay processes, of which either may claim the shard at any time (so the lock in the database, which
is a hint only, is not in it), rows of two transactions of one key and of other keys, and luck: deaths anywhere, a
request to commit that arrives late or never, answers that are lost, a failover of the database that loses deletes, or
a row whose id is used again, and a row that Kafka refuses for a while.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from tests.model.search import Broken, Steps, put

UNBORN, WAITING, PARKED, GONE, LOST = range(5)
"""States of a row: not committed yet, in the table, set aside, deleted, lost by the failover."""


class Row(NamedTuple):
    id: int
    key: str


ROWS = (Row(1, "A"), Row(2, "B"), Row(3, "A"), Row(2, "C"))
"""By their tags. Row 2 is committed after row 0, of the same key. Row 3 has the id of row 1, after that is lost."""
LOSABLE, AGAIN = 1, 3


class OutboxConfig(NamedTuple):
    """``ring``: batches that it names. ``claims``: transactional ids that are taken in all."""

    name: str
    rows: int = 4
    ring: int = 2
    batch: int = 2
    claims: int = 3
    failovers: int = 0
    refusals: int = 0


PLAIN = OutboxConfig("plain", rows=3)
FAILOVER = OutboxConfig("failover", failovers=1)
REFUSAL = OutboxConfig("refusal", rows=3, refusals=1)
STANDARD = (PLAIN, FAILOVER, REFUSAL)
DEEP = (
    OutboxConfig("four claims, failover", claims=4, failovers=1),
    OutboxConfig("failover and refusal", claims=3, failovers=1, refusals=1),
)


class OutboxRule(Enum):
    """A rule of the protocol: what happens when it is out, and the world where it is missed."""

    O1_CLAIM_THEN_READ = ("the ring is read before the id is taken", PLAIN)
    O2_ONE_TRANSACTION = ("the record of the batch is written after the transaction of the rows", PLAIN)
    O3_DELETE_AFTER_COMMIT = ("rows are deleted when they are sent, before the commit", PLAIN)
    O4_NEVER_GUESS = ("a commit without an answer is taken for an abort: the relay goes on", PLAIN)
    O5_DELETE_AT_CLAIM = ("what the ring names is not deleted at the claim", PLAIN)
    O5_SESSION_IS_CLAIM = ("a new session of the database goes on, without deleting what the ring names", FAILOVER)
    O6_DELETE_THEN_NEXT = ("the next batch is begun before the deletion of this one is known", PLAIN)
    O7_KEY_LOCK = ("ids of a key may be in another order than the commits", PLAIN)
    O8_TAG = ("rows are deleted by their ids alone", FAILOVER)
    GUARD = ("a ring that is further ahead of the noted serial than it has batches is taken", FAILOVER)
    PARKED_ARE_DELETED_TOO = ("what is in Kafka is deleted from the table, not from the parked rows", REFUSAL)
    KEY_WAITS = ("later rows of a parked row's key go on", REFUSAL)


Batch = tuple[int, ...]


class Owner(NamedTuple):
    """A relay process. ``session``: its session of the database lives."""

    phase: str = "none"
    epoch: int = 0
    ring: tuple[tuple[int, Batch], ...] = ()
    batch: Batch = ()
    session: bool = True


class World(NamedTuple):
    """``open``: epoch, rows and serial of the open transaction; ``late``: epochs whose requests to commit are still on
    their way."""

    rows: tuple[int, ...]
    log: Batch = ()
    ring: tuple[tuple[int, Batch], ...] = ()
    epoch: int = 0
    open: tuple[int, Batch, int] | None = None
    late: frozenset[int] = frozenset()
    owners: tuple[Owner, ...] = (Owner(), Owner())
    claims: int = 0
    failovers: int = 0
    refusals: int = 0
    noted: int = 0
    """The serial in the database, written in the transaction that deletes."""


class OutboxModel:
    """The protocol without the rules that are ``out``."""

    def __init__(self, config: OutboxConfig, out: frozenset[OutboxRule] = frozenset()) -> None:
        self._config, self._out = config, out

    def initial(self) -> World:
        return World((UNBORN,) * self._config.rows)

    def done(self, world: World) -> bool:
        return all(
            state in (GONE, LOST) or (row == AGAIN and world.rows[LOSABLE] != LOST)
            for row, state in enumerate(world.rows)
        )

    def stalled(self, world: World) -> str:
        return "" if world.claims == self._config.claims else "nothing can happen any more"

    def successors(self, world: World) -> tuple[Steps[World], Steps[World]]:
        _check(world)
        steps: Steps[World] = []
        for row, state in enumerate(world.rows):
            if state == UNBORN and self._may_commit(world, row):
                steps.append((f"row {row} is committed", world._replace(rows=put(world.rows, row, WAITING))))
        luck: Steps[World] = list(self._failovers(world))
        for epoch in world.late:
            arrived = world._replace(late=world.late - {epoch})
            luck.append((f"the late commit of epoch {epoch} arrives", self._end(arrived, epoch) or arrived))
        for index, owner in enumerate(world.owners):
            name = "AB"[index]
            if owner.phase != "none":
                luck.append((f"{name} dies", _with(world, index, Owner())))
            for text, after in self._owner_steps(world, index, owner):
                (luck if text.startswith("!") else steps).append((f"{name} {text.lstrip('!')}", after))
        return steps, luck

    def _may_commit(self, world: World, row: int) -> bool:
        if row == AGAIN:
            return world.rows[LOSABLE] == LOST
        return row != 2 or world.rows[0] != UNBORN or OutboxRule.O7_KEY_LOCK in self._out

    def _failovers(self, world: World) -> Steps[World]:
        if world.failovers == self._config.failovers:
            return []
        owners = tuple(owner._replace(session=False) if owner.phase != "none" else owner for owner in world.owners)
        oldest = min((serial for serial, _ in world.ring), default=1)
        found = []
        for noted in range(min(oldest - 1, world.noted), world.noted + 1):
            named = {row for serial, rows in world.ring if serial > noted for row in rows}
            back = tuple(WAITING if state == GONE and row in named else state for row, state in enumerate(world.rows))
            after = world._replace(rows=back, owners=owners, failovers=world.failovers + 1, noted=noted)
            found.append((f"a failover loses the deletes behind batch {noted}", after))
            if world.rows[LOSABLE] == WAITING:
                lost = after._replace(rows=put(back, LOSABLE, LOST))
                found.append((f"a failover loses row 1, and the deletes behind batch {noted}", lost))
        return found

    def _end(self, world: World, epoch: int) -> World | None:
        """Commit the open transaction of this epoch, if it is open and not fenced."""
        if world.open is None or world.open[0] != epoch or epoch != world.epoch:
            return None
        _, rows, serial = world.open
        ring = world.ring if OutboxRule.O2_ONE_TRANSACTION in self._out else self._noted(world.ring, serial, rows)
        return world._replace(log=world.log + rows, open=None, ring=ring)

    def _noted(self, ring: tuple[tuple[int, Batch], ...], serial: int, rows: Batch) -> tuple[tuple[int, Batch], ...]:
        kept = tuple(batch for batch in ring if batch[0] % self._config.ring != serial % self._config.ring)
        return tuple(sorted((*kept, (serial, rows))))

    def _deleted(self, world: World, rows: Batch, serial: int) -> World:
        states = list(world.rows)
        ids = {ROWS[row].id for row in rows}
        for row, state in enumerate(states):
            meant = row in rows or (OutboxRule.O8_TAG in self._out and ROWS[row].id in ids)
            parked = state == PARKED and OutboxRule.PARKED_ARE_DELETED_TOO not in self._out
            if meant and (state == WAITING or parked):
                states[row] = GONE
        return world._replace(rows=tuple(states), noted=max(world.noted, serial))

    def _claimed(self, world: World) -> World:
        return world._replace(epoch=world.epoch + 1, open=None, claims=world.claims + 1)

    def _owner_steps(self, world: World, index: int, owner: Owner) -> Steps[World]:
        """Return what a process may do; a text with ``!`` in front is luck."""
        known = tuple(row for _, rows in owner.ring for row in rows)
        serial = max((number for number, _ in owner.ring), default=0)
        may_claim = world.claims < self._config.claims

        def to(world: World, **changes: object) -> World:
            return _with(world, index, owner._replace(**changes))  # type: ignore[arg-type]

        def drop(world: World) -> World:
            return _with(world, index, Owner())

        if owner.phase == "none" and may_claim:
            if OutboxRule.O1_CLAIM_THEN_READ in self._out:
                return [("reads the ring before its claim", to(world, phase="early", ring=world.ring))]
            after = self._claimed(world)
            return [("claims", to(after, phase="claimed", epoch=after.epoch))]
        if owner.phase == "early" and may_claim:
            after = self._claimed(world)
            return [("claims", to(after, phase="read", epoch=after.epoch))]
        if owner.phase == "claimed":
            return [("reads the ring", to(world, phase="read", ring=world.ring))]
        if owner.phase in ("read", "idle", "refused", "committed") and not owner.session:
            if OutboxRule.O5_SESSION_IS_CLAIM in self._out:
                return [("has a new session", to(world, session=True))]
            return [("finds its session gone", drop(world))]
        if owner.phase == "read":
            if serial - world.noted > self._config.ring and OutboxRule.GUARD not in self._out:
                return [("refuses a database that was set back", drop(world._replace(claims=self._config.claims)))]
            out = OutboxRule.O5_DELETE_AT_CLAIM in self._out
            after = world if out else self._deleted(world, known, serial)
            return [("deletes what the ring names", to(after, phase="idle"))]
        if owner.phase == "idle":
            exclude = known if OutboxRule.O6_DELETE_THEN_NEXT in self._out else ()
            return self._fetches(world, index, owner, exclude) + [
                (f"takes row {row} back", world._replace(rows=put(world.rows, row, WAITING)))
                for row, state in enumerate(world.rows)
                if state == PARKED
            ]
        if owner.phase == "fetched":
            return self._sends(world, index, owner, serial + 1)
        if owner.phase == "refused":
            row = owner.batch[0]
            parked = world
            if world.rows[row] == WAITING:
                parked = world._replace(rows=put(world.rows, row, PARKED))
            return [(f"parks row {row}, and drops the rest", drop(parked))]
        if owner.phase == "sent":
            return self._commits(world, index, owner, serial + 1)
        if owner.phase == "committed":
            after = self._deleted(world, owner.batch, serial)
            if OutboxRule.O2_ONE_TRANSACTION in self._out:
                after = after._replace(ring=self._noted(after.ring, serial, owner.batch))
            found = [("deletes the rows", to(after, phase="idle", batch=()))]
            if OutboxRule.O6_DELETE_THEN_NEXT in self._out:
                found.append(("leaves their deletion for later", to(world, phase="idle", batch=())))
            return found
        return []

    def _fetches(self, world: World, index: int, owner: Owner, exclude: Batch) -> Steps[World]:
        waits = {ROWS[row].key for row, state in enumerate(world.rows) if state == PARKED}
        if OutboxRule.KEY_WAITS in self._out:
            waits = set()
        there = sorted(
            (
                row
                for row, state in enumerate(world.rows)
                if state == WAITING and ROWS[row].key not in waits and row not in exclude
            ),
            key=lambda row: (ROWS[row].id, row),
        )[: self._config.batch]
        return [
            (
                f"fetches {there[:count]}",
                _with(world, index, owner._replace(phase="fetched", batch=tuple(there[:count]))),
            )
            for count in range(1, len(there) + 1)
        ]

    def _sends(self, world: World, index: int, owner: Owner, serial: int) -> Steps[World]:
        if world.epoch != owner.epoch:
            return [("is fenced", _with(world, index, Owner()))]
        if world.open is not None:
            return []
        after = world._replace(open=(owner.epoch, owner.batch, serial))
        if OutboxRule.O3_DELETE_AFTER_COMMIT in self._out:
            after = self._deleted(after, owner.batch, serial)
        found: Steps[World] = [(f"sends {list(owner.batch)}", _with(after, index, owner._replace(phase="sent")))]
        if world.refusals < self._config.refusals:
            for row in owner.batch:
                refused = owner._replace(phase="refused", batch=(row,))
                found.append(
                    (f"!gets row {row} refused", _with(world._replace(refusals=world.refusals + 1), index, refused))
                )
        return found

    def _commits(self, world: World, index: int, owner: Owner, serial: int) -> Steps[World]:
        found: Steps[World] = []
        if world.epoch != owner.epoch:
            found.append(("is fenced", _with(world, index, Owner())))
        after = self._end(world, owner.epoch)
        ring = self._noted(owner.ring, serial, owner.batch)
        unanswered = Owner()
        if OutboxRule.O4_NEVER_GUESS in self._out:
            unanswered = owner._replace(phase="idle", batch=())
        if after is not None:
            found.append(("commits", _with(after, index, owner._replace(phase="committed", ring=ring))))
            found.append(("!commits, and gets no answer", _with(after, index, unanswered)))
        found.append(
            (
                "!requests a commit that is late",
                _with(world._replace(late=world.late | {owner.epoch}), index, unanswered),
            )
        )
        return found


def _with(world: World, index: int, owner: Owner) -> World:
    return world._replace(owners=put(world.owners, index, owner))


def _check(world: World) -> None:
    if len(set(world.log)) != len(world.log):
        raise Broken(f"a row is in Kafka twice: {world.log}")
    for row, state in enumerate(world.rows):
        if state == GONE and row not in world.log:
            raise Broken(f"row {row} is deleted, and not in Kafka")
    of_one_key = [row for row in world.log if ROWS[row].key == "A"]
    if of_one_key != sorted(of_one_key):
        raise Broken(f"a key is out of order: {world.log}")
