"""``kes journal`` on a real broker: what it shows, what it deletes, and what it finds wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from streams.cli import logging_setup, main
from streams.errors import OffsetError
from streams.journal import Journal, Replicated, SnapshotFolder
from streams.kafka.settings import ClientSettings
from streams.testing.fixtures import BrokerAddress
from tests.broker.client_kit import rows, writing
from tests.broker.test_replicated import Bank, Members, Moved, move
from tests.unit.waiting import until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120), pytest.mark.nightly]

Run = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kafka_broker: BrokerAddress) -> Run:
    """The command in this process: exit code, answer (of ``--json``, or its text), messages."""
    monkeypatch.setattr(logging_setup, "configure_logging", lambda options: None)
    monkeypatch.setenv("KES_BOOTSTRAP_SERVERS", kafka_broker.bootstrap_servers)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: str) -> tuple[int, Any, str]:
        code = main.main(["journal", *words])
        out, err = capsys.readouterr()
        return code, [json.loads(line) for line in out.splitlines()] if "--json" in words else out, err

    return call


async def fill(members: Members) -> None:
    """Three checkpoints, and more."""
    async with members.member(1, checkpoint_every=1_000_000) as member:
        await until(lambda: member.is_leading, "it leads")
        for round_ in range(4):
            for _ in range(3):
                await member.decide(move("a", "b", 1))
            if round_ < 3:
                assert member._term is not None
                await member._checkpoint(member._term)


async def test_a_journal_is_shown_trimmed_and_verified(
    run: Run, kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = Members(kafka_broker, topic_prefix + "bank", tmp_path)
    journal = members.journal()
    code, _, err = run("status", journal.name)
    assert (code, f"topic error: topic {journal.name} does not exist" in err) == (1, True)
    await journal.create()
    assert run("status", journal.name, "--json")[1][0]["entries"] == 0
    assert run("trim", journal.name, "--json")[1][0]["start"] == 0
    await fill(members)
    code, (status,), _ = run("status", journal.name, "--json")
    assert (code, status["entries"], status["start"], len(status["terms"])) == (0, 12, 0, 1)
    covers = [checkpoint["covers"] for checkpoint in status["checkpoints"]]
    assert len(covers) == 3
    code, text, _ = run("status", journal.name)
    assert all(word in text for word in (journal.name, "member-1", f"{covers[-1]:,}"))
    code, lines, _ = run("follow", journal.name, "--after", "0", "--limit", "3", "--json")
    assert [line["type"] for line in lines] == ["__term__", "Moved", "Moved"]
    assert [(line["term"], line["number"]) for line in lines] == [(0, 0), (0, 1), (0, 2)]
    assert lines[1]["value"] == {"source": "a", "target": "b", "cents": 1}
    code, text, _ = run("follow", journal.name, "--after", "0", "-n", "1")
    assert "0:0  __term__" in text
    assert run("follow", journal.name, "--after", "5000")[0] == 1

    module = ModuleType("shop")
    folder = SnapshotFolder(tmp_path / "1", keep=2)
    vars(module).update(service=Replicated(journal, Bank, snapshots=folder), other=lambda: 5)
    monkeypatch.setitem(sys.modules, "shop", module)
    code, (verified,), _ = run("verify", journal.name, "--service", "shop:service", "--json")
    assert (code, verified["terms"], verified["entries"], verified["snapshots"]) == (0, 1, 12, covers[1:])
    code, _, err = run("verify", journal.name, "--service", "shop:other")
    assert (code, f"'shop:other' is not a Replicated of the journal {journal.name}" in err) == (1, True)

    code, (kept,), _ = run("trim", journal.name, "--keep", "4", "--yes", "--json")
    assert (code, kept["start"]) == (0, 0)
    code, (kept,), _ = run("trim", journal.name, "--keep", "2", "--yes", "--json")
    assert (code, kept["was"], kept["start"]) == (0, 0, covers[1])
    code, text, _ = run("trim", journal.name, "--keep", "2", "--yes")
    assert "nothing is deleted: 2 checkpoints, 2 are kept" in text
    assert run("verify", journal.name, "--service", "shop:service", "--json")[1][0]["snapshots"] == covers[2:]
    async with members.member(1) as again:  # its snapshots are behind the new start
        await until(lambda: again.is_leading, "it leads")
        assert await again.read(lambda bank: bank.accounts["a"]) == 88
    with pytest.raises(OffsetError, match="entries that are needed were trimmed"):
        async with members.member(2) as fresh:  # without a snapshot it cannot know the rest
            await fresh.wait()


async def test_a_journal_that_is_not_whole_is_named_with_its_offset(
    run: Run,
    kafka_broker: BrokerAddress,
    topic_prefix: str,
    tmp_path: Path,
    settings: ClientSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = Members(kafka_broker, topic_prefix + "bank", tmp_path)
    journal: Journal = members.journal()
    await journal.create()
    await fill(members)
    # A state that is not what the log makes.
    folder = SnapshotFolder(tmp_path / "1", keep=3)
    wrong = Bank()
    wrong.apply(Moved("a", "b", 50))
    topic = await journal.check()
    folder.save(journal.name, topic.topic_id, topic.end, wrong.save)
    module = ModuleType("shop")
    vars(module).update(service=Replicated(journal, Bank, snapshots=folder))
    monkeypatch.setitem(sys.modules, "shop", module)
    code, _, err = run("verify", journal.name, "--service", "shop:service")
    assert (code, f"the snapshot of {topic.end} in" in err, "Is `apply` deterministic?" in err) == (1, True, True)
    with writing(settings, journal.name) as writer:
        writer.commit(*rows(0, "foreign"))
    for words in (("verify",), ("status",), ("trim", "--yes")):
        code, _, err = run(words[0], journal.name, *words[1:])
        assert (code, f"[0]@{topic.end} is no entry of a journal" in err) == (1, True), err
