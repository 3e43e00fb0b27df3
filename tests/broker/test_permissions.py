"""Each row of the table of least rights on a broker with ACLs: enough; and with one less an error names it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator

import pytest

from streams.broker import KafkaBroker
from tests.broker.permissions_kit import FEATURES, USER, Heard, Kes, Office

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def strict() -> Iterator[KafkaBroker]:
    """Users with passwords may do what ACLs allow."""
    with KafkaBroker(sasl="PLAIN", acl=True, users=[USER]) as broker:
        yield broker


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler, logger = Heard(), logging.getLogger("streams")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


_NUMBERS = itertools.count()
"""Short names make messages that can be read."""
LESS = [(name, right) for name, feature in FEATURES.items() for right in feature.rights]


@pytest.mark.parametrize("name", FEATURES)
async def test_these_rights_are_enough(strict: KafkaBroker, name: str, kes: Kes) -> None:
    feature = FEATURES[name]
    office = Office(strict, f"p{next(_NUMBERS)}-", feature.partitions)
    await feature.prepare(office, kes)
    office.grant(feature.rights)
    await asyncio.wait_for(feature.use(office, kes), 60)


@pytest.mark.parametrize(("name", "missing"), LESS)
async def test_one_right_less_is_named_with_what_to_type(
    strict: KafkaBroker, heard: Heard, name: str, missing: str, kes: Kes
) -> None:
    feature = FEATURES[name]
    office = Office(strict, f"p{next(_NUMBERS)}-", feature.partitions)
    await feature.prepare(office, kes)
    office.grant([right for right in feature.rights if right != missing])
    right = office.right(missing)
    using = asyncio.ensure_future(feature.use(office, kes))
    said = ""
    for _ in range(800):
        if using.done() or "the principal needs" in heard.text:
            break
        await asyncio.sleep(0.02)
    if using.done():
        error = using.exception()
        said = f"{type(error).__name__}: {error}"
    using.cancel()
    await asyncio.wait([using], timeout=20)
    said += heard.text
    print("SAID", name, "|", missing, "|", said[:700])
    assert "the principal needs" in said
    # Without any right on a topic or a group it is the first one that is missed.
    operations = (right.operation, "Describe") if right.operation in ("Read", "Write") else (right.operation,)
    assert any(f"--operation {each} --{right.kind} {right.name}".strip() in said for each in operations), said
