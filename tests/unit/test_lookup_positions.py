"""Positions of lookups in the changelog, and members that do not know a lookup."""

from __future__ import annotations

import msgspec
import pytest

from streams.core.position import Position
from streams.errors import OffsetError
from streams.runtime.changelog import LOOKUP_PREFIX, OffsetRecord
from streams.runtime.partition.worker import PartitionWorker
from streams.testing import TestDriver
from streams.testing.simulation.broker import printed_id
from tests.unit.lookups_kit import RATES, Shop, hold, pay, position_of, rate, record_of, seen
from tests.vocabulary import Paid


def test_positions_lie_beside_those_of_inputs_and_a_source_without_lookups_writes_none() -> None:
    shop = Shop()
    shop.source.input("payments", event=Paid)
    with TestDriver(shop.source, topics={RATES: 1}) as driver:
        rate(driver, 1)
        pay(driver)
        found = msgspec.json.decode(record_of(driver).inputs)
        assert found[f"{LOOKUP_PREFIX}{RATES}"] == [printed_id(RATES), [1], record_of(driver).writer]
        assert found["payments"] == {"0": [0, printed_id("payments")]}
    with TestDriver(Shop(looks=False).source) as driver:
        pay(driver)
        assert record_of(driver).inputs is msgspec.UNSET
        assert driver.statistics().lookups == ()


def test_a_member_that_does_not_know_the_lookup_carries_its_position() -> None:
    release = {"looks": True}
    with TestDriver(lambda: Shop(looks=release["looks"]).source, members=2, topics={RATES: 1}) as driver:
        rate(driver, 1)
        pay(driver)
        for looks in (False, True):
            release["looks"] = looks
            for member in list(driver.members):  # a rolling restart
                driver.leave(member)
                driver.restart(member)
            pay(driver)
            assert position_of(driver) == (printed_id(RATES), (1,))
        assert seen(driver) == ["EUR at 1", "EUR at None", "EUR at 1"]


@pytest.mark.parametrize("release", ["carries", "drops"])
def test_after_a_donor_that_does_not_know_the_lookup_there_is_a_takeover(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner looks into a row without a record of that, and dies. A member without the lookup has the partition next
    and hands it over to one whose table is behind."""
    if release == "drops":  # as releases from before the positions do

        def own_fields(self: PartitionWorker, position: Position) -> tuple[str, str, msgspec.UnsetType]:
            return self.ids.source, self.ids.changelog, msgspec.UNSET

        monkeypatch.setattr(PartitionWorker, "further_fields", own_fields)
    looks = True
    with TestDriver(lambda: Shop(looks=looks).source, members=2, topics={RATES: 1}) as driver:
        rate(driver, 1)
        pay(driver)
        looks = False
        between, owner = driver.join(), driver.owner(0)
        assert owner is not None
        last = 1 - owner
        go_on = hold(driver, last)
        rate(driver, 2)
        rates = next(iter(driver._world.members[owner].source._declared.lookups.by_topic.values()))
        assert driver.interject(0, lambda ctx: ctx.lookup(rates).get("EUR")) == 2
        driver.crash(owner)
        pay(driver, wait=False)
        driver.advance(15.0)
        assert driver.owner(0) == between
        driver._world.members[between].source._run.ask_to_stop(drain=True)
        driver.advance(30.0)
        pay(driver, wait=False)
        driver.advance(10.0)
        assert driver.owner(0) is None, "it waits"
        go_on()
        driver.settle()
        assert driver.owner(0) == last
        assert seen(driver) == ["EUR at 1", "EUR at None", "EUR at 2"]
        driver.check()


def test_a_position_that_cannot_be_read_is_named() -> None:
    record = OffsetRecord(1, "w", 1, 1, inputs=msgspec.Raw(b'{"lookup:rates": 5}'))
    with pytest.raises(OffsetError, match="position of the lookup rates that cannot be read"):
        record.position_of_lookup(RATES)
