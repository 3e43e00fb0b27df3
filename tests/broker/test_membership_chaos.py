"""Members that join, leave, die, and are late with everything: real broker, real strategies, one ledger."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest

from streams.core.strategies import PlanSettings, assignor
from tests.broker.gate import gate
from tests.broker.moves_kit import QUICK, Engine, MovingTable, moving_table

pytestmark = [pytest.mark.broker, pytest.mark.slow]

STEPS = 40


class Chaos:
    """One run. ``step`` does something to a random member."""

    def __init__(self, table: MovingTable, chance: random.Random, strategies: tuple[str, ...]) -> None:
        self.table, self.chance = table, chance
        self.strategies = {name: assignor(name, PlanSettings(num_standbys=1, max_moves=4)) for name in strategies}
        self.members: list[Engine] = []
        self.made = 0

    def step(self) -> str:
        if len(self.members) < 2:
            return self.join()
        actions = [self.join, self.die, self.leave, self.go, self.give, self.be_late, self.be_late, self.catch_up]
        return self.chance.choice(actions)()

    def join(self) -> str:
        if len(self.members) > 3:
            return self.catch_up()
        self.made += 1
        late = {word: self.chance.random() < 0.7 for word in ("gives", "hears", "prepares", "tells")}
        self.members.append(self.table.engine(f"m{self.made}", self.strategies, **QUICK, **late))
        return f"{self.members[-1].name} joins {late}"

    def any(self) -> Engine:
        return self.chance.choice(self.members)

    def gone(self) -> Engine:
        member = self.any()
        self.members.remove(member)
        return member

    def die(self) -> str:
        member = self.gone()
        member.die()
        return f"{member.name} dies"

    def go(self) -> str:
        member = self.gone()
        member.go()
        return f"{member.name} goes"

    def leave(self) -> str:
        member = self.any()
        member.membership.leave()
        return f"{member.name} leaves"

    def give(self) -> str:
        member = self.any()
        member.give()
        return f"{member.name} gives"

    def be_late(self) -> str:
        member, word = self.any(), self.chance.choice(["gives", "hears", "prepares", "tells"])
        setattr(member, word, False)
        return f"{member.name} {word} no more"

    def catch_up(self) -> str:
        member = self.any()
        member.catch_up()
        return f"{member.name} catches up"

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
    kafka_broker: Any, topic_prefix: str, strategy: str
) -> None:
    seed = int(os.environ.get("SEED", "0")) or random.randrange(1 << 30)
    print("SEED", seed)
    chance = random.Random(seed)
    with moving_table(kafka_broker.bootstrap_servers, topic_prefix) as table:
        chaos = Chaos(table, chance, (strategy,))
        for _ in range(STEPS):
            print(chaos.step(), flush=True)
            time.sleep(chance.choice([0.0, 0.02, 0.1, 0.4]))  # not for luck: any moment will do
            assert table.ledger.wrong == []
        chaos.end()
