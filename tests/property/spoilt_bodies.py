"""Bodies of record batches, some of their bits changed, and bytes that are none."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from tests.unit.fetch_kit import encoded, random_rows


@st.composite
def spoilt_bodies(draw: st.DrawFn) -> bytes:
    """The records of a batch without its head, spoilt in up to three places, or any bytes."""
    number, count = draw(st.integers(0, 1 << 30)), draw(st.integers(1, 5))
    body = encoded(random_rows(random.Random(number), count))[0]
    spoilt = bytearray(draw(st.one_of(st.just(body), st.binary(max_size=60))))
    for place in draw(st.lists(st.integers(0, max(0, len(spoilt) - 1)), max_size=3)):
        if spoilt:
            spoilt[place] ^= draw(st.sampled_from([1, 2, 0x40, 0x80, 0xFF]))
    return bytes(spoilt)
