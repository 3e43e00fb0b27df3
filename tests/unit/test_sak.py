from __future__ import annotations

import random

import pytest

from streams.sak import murmur2 as murmur2_module
from streams.sak.backoff import backoff_seconds
from streams.sak.murmur2 import murmur2, partition_of
from tests.property.leaves_kit import plain


@pytest.mark.parametrize(
    ("data", "signed"),  # the vectors of Kafka's own UtilsTest.testMurmur2
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_is_javas(data: bytes, signed: int) -> None:
    assert murmur2(data) == signed % 2**32


@pytest.mark.parametrize("seed", range(3))
def test_murmur2_is_the_same_compiled_and_in_plain_python(seed: int) -> None:
    chance, as_it_stands = random.Random(seed), plain(murmur2_module)
    for length in [*range(20), *(chance.randrange(300) for _ in range(200))]:
        data, count = chance.randbytes(length), chance.randrange(1, 1 << 20)
        assert murmur2(data) == as_it_stands.murmur2(data)
        assert partition_of(data, count) == as_it_stands.partition_of(data, count)
    for module in (murmur2_module, as_it_stands):
        with pytest.raises(ZeroDivisionError):
            module.partition_of(b"key", 0)
        for wrong in (None, 7, "text"):
            with pytest.raises((TypeError, AttributeError)):
                module.murmur2(wrong)


def test_backoff_doubles_up_to_its_limit() -> None:
    waits = [backoff_seconds(failures, 0.1, 1.0, jitter=0.0) for failures in range(7)]
    assert waits == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert backoff_seconds(10**9, 0.1, 5.0, jitter=0.0) == 5.0


def test_backoff_is_spread_around_its_mean() -> None:
    rng = random.Random(1)
    waits = [backoff_seconds(3, 1.0, 60.0, rng=rng) for _ in range(1000)]
    assert 3.0 <= min(waits) < 3.1
    assert 4.9 < max(waits) <= 5.0
