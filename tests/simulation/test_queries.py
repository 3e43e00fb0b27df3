"""Queries in worlds from seeds: no answer is stale, dirty or backwards, and without a proof one is."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from streams.runtime.partition.failures import TakenBack
from streams.runtime.partition.interjections import Proof
from streams.runtime.queries.copies import CopyReads
from streams.runtime.read_proofs import ReadProofs

from . import test_joins, test_loop, test_visits
from .plans import plan_of
from .query_world import QueryWorld, simulate_queries
from .seeds import assert_missed, assert_right
from .shadows import Shadows
from .world import simulate

pytestmark = pytest.mark.usefixtures("quiet")

SEEDS = int(os.environ.get("SIM_QUERY_SEEDS", "3"))
TRIES = 30


def _at_once(self: ReadProofs, worker: Any, waiter: Any, proof: Proof) -> None:
    waiter(None if worker.state.admits else TakenBack())


async def _heartbeat_is_not_needed(self: ReadProofs) -> bool:
    return True


async def _no_question(self: CopyReads, partitions: list[int]) -> None:
    """The end that the copy knows itself."""
    for partition in partitions:
        copy = self._engine.replicas._copies.get(partition)
        if copy is not None:
            topic_id = "" if copy.offset_record is None else copy.offset_record.changelog_id
            self._ends[partition] = self._engine.environment.elapsed_seconds(), copy.position, topic_id


PROOFS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "any proof, and the commit": lambda patch: patch.setattr(ReadProofs, "answer", _at_once),
    "the end of the lease": lambda patch: patch.setattr(ReadProofs, "has_lease", lambda self: self._lease is not None),
    "the heartbeat": lambda patch: patch.setattr(ReadProofs, "_is_proven", _heartbeat_is_not_needed),
    "the commit of what was seen": lambda patch: patch.setattr(
        ReadProofs, "_when_committed", lambda self, worker, waiter: waiter(None)
    ),
    "the changes that are under way": lambda patch: patch.setattr(ReadProofs, "pending", lambda self, partition: []),
    "the end of a copy": lambda patch: patch.setattr(CopyReads, "_request", _no_question),
}


def test_no_answer_is_stale_dirty_or_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_right(simulate_queries, range(SEEDS), monkeypatch)


def test_there_are_answers_of_each_kind() -> None:
    counts: Counter[str] = Counter()
    for seed in (0, 4):
        counts += QueryWorld(seed).run().counts
    assert all(counts[kind] > 20 for kind in ("leased", "point", "confirmed", "copy", "refused")), counts


NIGHTLY = ("any proof, and the commit", "the heartbeat", "the changes that are under way")


@pytest.mark.parametrize(
    "proof", [pytest.param(proof, marks=[pytest.mark.nightly] if proof in NIGHTLY else []) for proof in PROOFS]
)
def test_each_proof_is_missed(proof: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_missed(simulate_queries, proof, TRIES, monkeypatch)


WORLDS: dict[str, Callable[[], object]] = {
    "joins": lambda: test_joins.run(6),
    "loop": lambda: test_loop.run(6),
    "visits": lambda: test_visits.run(6),
    "timers": lambda: [simulate(seed, plan_of(seed)) for seed in range(6)],
}


@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize("world", WORLDS)
def test_what_no_transaction_changes_is_committed(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changes a key: a slice, a batch, work ahead of its turn, an update handler, a timer, a visit. So its
    value may be told by the lease alone."""
    shadows = Shadows(monkeypatch)
    WORLDS[world]()
    assert not shadows.wrong, f"{len(shadows.wrong)}: {shadows.wrong[0]}"
    assert shadows.looks > shadows.under_way > 200
    monkeypatch.setattr(ReadProofs, "pending", lambda self, partition: [])
    WORLDS[world]()
    assert shadows.wrong, "it would be seen"
