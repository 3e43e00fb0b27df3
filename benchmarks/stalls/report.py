"""The table of silences."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from rich.table import Table

from benchmarks.stalls.group import Stall
from benchmarks.stalls.silences import Silence


def in_short(stall: Stall) -> str:
    """One line about one thing that happened."""
    moved, kept = at_moves([stall]), milliseconds([stall], _kept)
    told = [
        f"{len(times)} {name} up to {max(times):,.0f} ms" for name, times in (("moved", moved), ("kept", kept)) if times
    ]
    if stall.away_ms:
        told.append(f"broker away for {stall.away_ms:,.0f} ms")
    return (
        f"{stall.what}: {', '.join(told)}; {stall.generations} generations, {stall.refused} refused, "
        f"load {stall.load_average:.1f}, {stall.fault or 'exactly once'}"
    )


def milliseconds(stalls: Sequence[Stall], which: Callable[[Silence], bool]) -> list[float]:
    """The longest silence of each partition that counts, in order of size."""
    return sorted(silence.milliseconds for stall in stalls for silence in stall.silences if which(silence))


def at_moves(stalls: Sequence[Stall]) -> list[float]:
    """The longest silence at a change of the writer, of each partition that moved, in order of size."""
    return sorted(silence.at_move for stall in stalls for silence in stall.silences if silence.moves)


def chain_medians(stalls: Sequence[Stall]) -> dict[str, float]:
    """The median of each step of all moves, in the order of the steps."""
    steps: dict[str, list[float]] = {}
    for stall in stalls:
        for silence in stall.silences:
            for name, took in silence.chain.items():
                steps.setdefault(name, []).append(took)
    return {name: statistics.median(times) for name, times in steps.items()}


def stall_table(stalls: Sequence[Stall]) -> Table:
    """By what happened: silences at the moves themselves, then the longest ones in the whole time that was watched, of
    partitions that moved and of those that did not; over all rounds."""
    table = Table(title="Longest silence of an output partition for a reader, ms", title_justify="left")
    table.add_column("what happened", min_width=24)
    columns = ("moved", "at the move", "worst", "any time", "worst", "kept", "worst", "generations", "refused", "load")
    for name in (*columns, "rounds"):
        table.add_column(name, justify="right")
    for what in dict.fromkeys(stall.what for stall in stalls):
        mine = [stall for stall in stalls if stall.what == what and not stall.fault]
        if not mine:
            table.add_row(what, *["-"] * (len(columns) + 1))
            continue
        moved, kept = milliseconds(mine, _moved), milliseconds(mine, _kept)
        table.add_row(
            what,
            _spread([sum(map(_moved, stall.silences)) for stall in mine]),
            *_median_and_worst(at_moves(mine)),
            *_median_and_worst(moved),
            *_median_and_worst(kept),
            _spread([stall.generations for stall in mine]),
            _spread([stall.refused for stall in mine]),
            f"{statistics.median(stall.load_average for stall in mine):.0f}",
            str(len(mine)),
        )
    return table


def outage_table(stalls: Sequence[Stall]) -> Table:
    """What happened to the broker: how long it was away, how long output partitions were silent, and what of that its
    absence does not explain."""
    table = Table(title="The broker goes and comes back, ms: median and worst", title_justify="left")
    table.add_column("what happened", min_width=24)
    for name in ("broker away", "longest silence", "worst", "beyond its absence", "worst", "generations", "rounds"):
        table.add_column(name, justify="right")
    for what in dict.fromkeys(stall.what for stall in stalls):
        mine = [stall for stall in stalls if stall.what == what]
        longest = [max(silence.milliseconds for silence in stall.silences) for stall in mine if stall.silences]
        beyond = [beyond_ms(stall) for stall in mine if stall.silences]
        table.add_row(
            what,
            f"{statistics.median(stall.away_ms for stall in mine):,.0f}",
            *_median_and_worst(longest),
            *_median_and_worst(beyond),
            _spread([stall.generations for stall in mine]),
            str(len(mine)),
        )
    return table


def beyond_ms(stall: Stall) -> float:
    """The longest silence without the time in which there was no broker."""
    return max(silence.milliseconds for silence in stall.silences) - stall.away_ms


def _moved(silence: Silence) -> bool:
    return silence.moves > 0


def _kept(silence: Silence) -> bool:
    return silence.moves == 0


def _median_and_worst(times: Sequence[float]) -> tuple[str, str]:
    return (f"{statistics.median(times):,.0f}", f"{max(times):,.0f}") if times else ("-", "-")


def _spread(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"
