"""How much is measured of work ahead of its turn."""

from __future__ import annotations

import msgspec

PARTS = ("throughputs", "latencies", "gaps", "batches", "prices")


class Sizes(msgspec.Struct, frozen=True):
    """``concurrencies``: the first one is that of the latency runs; ``rates`` are of those, in events a second, and
    quixstreams takes part in the first only. ``pauses_ms``: what one event takes when gaps are measured, at
    ``gap_rate``. ``parts``: of ``PARTS``."""

    concurrencies: tuple[int, ...] = (64, 16, 256)
    seconds: float = 6
    rates: tuple[float, ...] = (40, 1_000)
    latency_seconds: float = 12
    pauses_ms: tuple[int, ...] = (5, 500, 5_000)
    gap_rate: float = 100
    gap_seconds: float = 12
    repeats: int = 3
    price_events: int = 20_000
    parts: tuple[str, ...] = PARTS


def quick(sizes: Sizes) -> Sizes:
    """One short round."""
    return msgspec.structs.replace(
        sizes,
        concurrencies=sizes.concurrencies[:1],
        seconds=2,
        rates=sizes.rates[:1],
        latency_seconds=3,
        pauses_ms=(5, 500),
        gap_seconds=4,
        repeats=1,
        price_events=2_000,
    )
