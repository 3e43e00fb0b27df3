"""Members that join, leave, die, and are late with everything: real broker, real strategies, one ledger."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from streams.core.strategies import PlanSettings, assignor
from tests.broker.gate import gate
from tests.broker.moves_kit import QUICK, Engine, MovingTable, moving_table

pytestmark = [pytest.mark.broker, pytest.mark.slow]

STEPS = 40


LATE = ("gives", "hears", "prepares", "tells")


class Chaos:
    """One run. ``step`` does something to a random member."""

    def __init__(self, table: MovingTable, chance: random.Random, strategy: str) -> None:
        self.table, self.chance = table, chance
        self.strategies = {strategy: assignor(strategy, PlanSettings(num_standbys=1, max_moves=4))}
        self.members: list[Engine] = []
        self.made = 0

    def step(self) -> str:
        member = self.chance.choice(self.members) if len(self.members) > 1 else None
        if member is None:
            return self.join()
        deed = self.chance.choice(["join", "die", "go", "leave", "give", "late", "late", "catch_up"])
        if deed == "join" and len(self.members) < 4:
            return self.join()
        if deed in ("die", "go"):
            self.members.remove(member)
        if deed == "late":
            deed = f"{self.chance.choice(LATE)} no more"
            setattr(member, deed.split()[0], False)
        elif deed == "leave":
            member.membership.leave()
        else:
            getattr(member, "catch_up" if deed == "join" else deed)()
        return f"{member.name}: {deed}"

    def join(self) -> str:
        self.made += 1
        late = {word: self.chance.random() < 0.7 for word in LATE}
        self.members.append(self.table.engine(f"m{self.made}", self.strategies, **QUICK, **late))
        return f"{self.members[-1].name} joins {late}"

    def end(self) -> None:
        """All that are leaving go, the others do what they were late with: then everything has one owner."""
        for member in list(self.members):
            if member.membership._state.holdings.leaving:
                self.members.remove(member)
                member.go()
        if not self.members:
            self.join()
        for member in self.members:
            member.catch_up()
        self.table.even(*self.members)


@pytest.mark.parametrize("strategy", gate(["incremental", "cooperative-sticky", "range"], "incremental"))
def test_nothing_has_two_owners_and_in_the_end_everything_has_one(
    kafka_broker: Any, topic_prefix: str, strategy: str, seed: int
) -> None:
    chance = random.Random(seed)
    with moving_table(kafka_broker.bootstrap_servers, topic_prefix) as table:
        chaos = Chaos(table, chance, strategy)
        for _ in range(STEPS):
            print(chaos.step(), flush=True)
            time.sleep(chance.choice([0.0, 0.02, 0.1, 0.4]))  # not for luck: any moment will do
            assert table.ledger.wrong == []
        chaos.end()
