"""Work ahead of its turn on a real broker: killed at random, moved while jobs run, with one key that is slow."""

from __future__ import annotations

import pytest

from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from tests.broker import bank
from tests.broker.bank_ahead import KINDS
from tests.broker.battery_kit import ENDLESS, QUICK, Bank, wait_until
from tests.broker.gate import gate

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

KEYS = 60


@pytest.mark.parametrize("kind", gate(KINDS, "job"))
@pytest.mark.slow
def test_killed_at_random(bank_group: Bank, kind: str, seed: int) -> None:
    """Two members, one of them killed again and again while jobs run."""
    settings = {**QUICK, "BANK_HANDLER": kind}
    members = {name: bank_group.start(name, **settings) for name in ("victim", "other")}
    load = bank_group.load(ENDLESS, KEYS, seed, 500)
    bank_group.wait_handled(200)
    bank_group.strike_at_random(members, ["victim"], 3, seed, **settings)
    load.stop()
    bank_group.wait_handled()
    bank_group.check_stores()
    bank_group.must_be_exact()


@pytest.mark.nightly
def test_partitions_move_while_jobs_run(bank_group: Bank, seed: int) -> None:
    """Members come and go in good order; jobs in front end, the rest is done by the next owner."""
    settings = {"BANK_HANDLER": "job", "BANK_JOB_MS": "100"}
    first = bank_group.start("a", **settings)
    load = bank_group.load(ENDLESS, KEYS, seed, 200)
    try:
        bank_group.wait_handled(200)
        second = bank_group.start("b", **settings)
        wait_until(lambda: second.said("generation"), "the second is in the group")
        bank_group.wait_progress(300)
        third = bank_group.start("c", **settings)
        wait_until(lambda: third.said("generation"), "the third is in the group")
        assert first.stop() == 0
        bank_group.wait_progress()
    finally:
        load.stop()
    bank_group.wait_handled()
    bank_group.check_stores()
    bank_group.must_be_exact()


def test_a_slow_key_holds_up_its_partition_and_no_other(bank_group: Bank, seed: int) -> None:
    """While one job of a minute runs, the other partitions are done to their ends, and its own partition has not passed
    it."""
    settings = {"BANK_HANDLER": "job", "BANK_SLOW_KEY": "account-0", "BANK_SLOW_MS": "60000"}
    bank_group.start("a", **settings)
    bank_group.deposit(1, 1, seed)
    bank_group.deposit(2_000, KEYS, seed)
    admin = TopicAdmin(ClientSettings(bank_group.bootstrap, {}, client_id="test"))
    try:
        topic = bank.topic_of(bank_group.group)
        ends = {number: marks.end for number, marks in admin.watermarks(topic).items()}

        def behind() -> set[int]:
            done = admin.committed(bank_group.group, topic)
            return {number for number, end in ends.items() if end and done.get(number, 0) < end}

        wait_until(lambda: len(behind()) == 1, "all partitions but one are done")
        [slow] = behind()
        assert not admin.committed(bank_group.group, topic).get(slow), "nothing is committed behind the slow job"
    finally:
        admin.close()
