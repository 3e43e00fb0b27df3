"""The loop of one shard over a database and a claim that are not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from streams import RelayConfig
from streams.core.outbox import RowId
from streams.kafka.questions.admin import Watermarks
from streams.outbox.database import OutboxAbout, StashedRow
from streams.outbox.shard import RowParked, ShardLoop
from streams.records import Output

CONFIG = RelayConfig(name="bank", database="sqlite:nowhere", bootstrap_servers="nowhere:1")


class Shard:
    """Session, claim and tenure of one shard. ``rows``: topics of its rows, by id. It is over when nothing is left."""

    partition, reason, topic, where = 0, "", "bank.outbox", "bank.outbox[0]"

    def __init__(self, *topics: str) -> None:
        self.rows = dict(enumerate(topics, 1))
        self.parked: list[int] = []
        self.sent: list[str] = []  # topics of its rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    # -- the tenure

    @property
    def is_over(self) -> bool:
        return not self.rows

    def wait(self, seconds: float) -> bool:
        return self.is_over

    def is_confirmed(self) -> bool:
        return True

    # -- the session

    def about(self) -> OutboxAbout:
        return OutboxAbout("outbox", 1, 1, "id", 0)

    def adopt(self, topic_id: str) -> str:
        return topic_id

    def noted_serial(self, shard: int) -> int:
        return 0

    def listen(self) -> None: ...

    def show_owner(self, lock_class: int, shard: int) -> None: ...

    def retry_parked(self, shard: int) -> int:
        return 0

    def fetch(self, shard: int, rows: int, size: int) -> list[StashedRow]:
        found = list(self.rows.items())[:rows]
        return [
            StashedRow(RowId(number, 5), Output(topic, b"v", b"k", None, -1, 1, 0, index))
            for index, (number, topic) in enumerate(found)
        ]

    def delete(self, shard: int, rows: Sequence[RowId], serial: int) -> int:
        return len([self.rows.pop(row.id) for row in rows])

    def park(self, shard: int, row: RowId, error: str, first_seconds: float, longest_seconds: float) -> None:
        self.parked.append(row.id)
        del self.rows[row.id]

    # -- the claim

    def identity(self) -> tuple[str, int]:
        return "id", 1

    def take(self) -> Watermarks:
        return Watermarks(0, 0, 0)

    def read(self, start: int, end: int) -> list[Any]:
        return []

    def append(self, outputs: Sequence[Output]) -> int:
        *rows, _ = outputs  # the last one names the rows
        self.sent += [row.topic for row in rows]
        return 1


def relayed(*topics: str) -> tuple[Shard, list[Any]]:
    shard, events = Shard(*topics), list[Any]()
    double: Any = shard
    ShardLoop(CONFIG, double, events.append, session=lambda *_: double, claim=lambda *_: double).run()
    return shard, events


def test_a_row_for_the_positions_topic_is_parked_and_not_among_the_positions() -> None:
    """There it would be read as a batch of another program: every relay of the outbox would stop for good."""
    shard, events = relayed("orders", "bank.outbox", "orders")
    assert shard.parked == [2]
    assert shard.sent == ["orders", "orders"]
    (parked,) = [event for event in events if isinstance(event, RowParked)]
    assert (parked.id, parked.topic) == (2, "bank.outbox")
