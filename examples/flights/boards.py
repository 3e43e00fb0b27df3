"""The second event source: one board per airline and per airport, published every second if it changed.

Facts arrive keyed by board, so all facts of a board meet in one partition. Sums, counts and a minimum: the board is
the same in whatever order the facts of different aircraft come in, which is why the demo can check it to the last
minute.

    kes run examples.flights.boards:source
"""

from __future__ import annotations

import msgspec

from examples.flights.events import (
    BOARDS_GROUP,
    BOARDS_TOPIC,
    FACTS_PARTITIONS,
    FACTS_TOPIC,
    BoardPublished,
    DelayRecovered,
    Turnaround,
)
from examples.flights.report import reporter
from streams import EventContext, EventSource, EventSourceConfig, Table

PUBLISH_EVERY_SECONDS = 1.0


class Board(msgspec.Struct):
    """The sums behind one line. ``published`` says whether the boards topic has seen them already."""

    turnarounds: int = 0
    turnaround_minutes: int = 0
    fastest_turnaround: int | None = None
    recovered: int = 0
    recovered_minutes: int = 0
    published: bool = True


def add_turnaround(board: Board, event: Turnaround) -> None:
    """Count a turnaround."""
    board.turnarounds += 1
    board.turnaround_minutes += event.minutes
    if board.fastest_turnaround is None or event.minutes < board.fastest_turnaround:
        board.fastest_turnaround = event.minutes
    board.published = False


def add_recovered(board: Board, event: DelayRecovered) -> None:
    """Count a delay that was made up in the air."""
    board.recovered += 1
    board.recovered_minutes += event.minutes
    board.published = False


def publish(name: str, board: Board) -> BoardPublished | None:
    """The line to publish, or ``None`` if nothing changed since the last time. Marks the board as published."""
    if board.published:
        return None
    board.published = True
    return BoardPublished(
        board=name,
        turnarounds=board.turnarounds,
        turnaround_minutes=board.turnaround_minutes,
        fastest_turnaround=board.fastest_turnaround,
        recovered=board.recovered,
        recovered_minutes=board.recovered_minutes,
    )


source = EventSource(
    EventSourceConfig(
        group_id=BOARDS_GROUP, topic=FACTS_TOPIC, num_partitions=FACTS_PARTITIONS, metrics_handler=reporter()
    ),
    store=Table.factory(key=str, value=Board),
)
Context = EventContext[Table[str, Board]]


def board_of(ctx: Context) -> str:
    """The board that the fact at hand belongs to: the key it travelled under."""
    if ctx.input is None or ctx.input.key is None:
        raise ValueError("a fact without a key belongs to no board")
    return ctx.input.key.decode()


@source.on
def on_turnaround(ctx: Context, event: Turnaround) -> None:
    name = board_of(ctx)
    board = ctx.store.get(name) or Board()
    add_turnaround(board, event)
    ctx.store.put(name, board)


@source.on
def on_recovered(ctx: Context, event: DelayRecovered) -> None:
    name = board_of(ctx)
    board = ctx.store.get(name) or Board()
    add_recovered(board, event)
    ctx.store.put(name, board)


@source.schedule_interjection(every=PUBLISH_EVERY_SECONDS)
def publish_boards(ctx: Context) -> None:
    """Every second, in each partition: what changed is published, and marked, in one transaction."""
    for name, board in list(ctx.store.items()):
        line = publish(name, board)
        if line is not None:
            ctx.store.put(name, board)
            ctx.forward(BOARDS_TOPIC, line, key=name)


if __name__ == "__main__":
    source.run()
