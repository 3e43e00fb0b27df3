"""``kes dlq`` on a real broker: letters of a source that runs, sent again exactly once, or dropped."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from streams.cli import main
from streams.errors import TransactionFailed
from streams.kafka.settings import ClientSettings
from streams.looks import letters
from streams.looks.letters import MARK_KEY, LetterBox, Mark, resent
from streams.records import IncomingRecord
from streams.runtime.changelog import OFFSET_KEY
from streams.runtime.partition.dead_letters import dead_letter
from tests.broker.engine_kit import Lab, Running, picky, producer_to
from tests.unit.waiting import PATIENCE
from tests.vocabulary import ADDED, added

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

PARTITIONS = 2
Kes = Callable[..., tuple[int, Any, str]]


@pytest.mark.asyncio
async def test_letters_are_sent_again_once_while_the_source_runs(lab: Lab, kes: Kes) -> None:
    await lab.create()
    broken = {"is": True}
    source = picky(lab, broken)

    async def run(*words: str) -> tuple[int, Any, str]:
        return await asyncio.to_thread(kes, source, "dlq", *words)

    async with Running(source) as running:
        await lab.add("a", "b", "a", "c", deed="x")
        await lab.add("d", deed="x", partition=1)
        await lab.add("good")
        await running.until_committed(6)
        code, answer, _ = await run("list")
        assert (code, answer["open"]) == (0, 5)
        first = answer["letters"][0]
        assert (first["state"], first["origin"], first["key"]) == ("open", f"{lab.topic}[0]@0", "a")
        assert first["error"] == "ValueError"
        assert first["handler"].endswith("picky.<locals>.work")
        assert first["instance"] == source.config.instance_id
        places = [letter["place"] for letter in answer["letters"]]
        code, answer, _ = await run("show", places[1])
        [whole] = answer["letters"]
        assert whole["value"] == {"name": "b", "amount": 1, "deed": "x"}
        assert "in work" in whole["facts"]["trace"]
        assert "streams/" not in whole["facts"]["trace"]

        broken["is"] = False
        code, answer, _ = await run("replay", places[1], places[2], "--yes")
        assert (code, answer["settled"], answer["letters"]) == (0, 2, places[1:3])
        code, answer, _ = await run("replay", "--all", "--yes")
        assert (code, answer["settled"], answer["letters"]) == (0, 3, [places[0], *places[3:]])
        for words in (("--all",), (places[0],)):
            assert (await run("replay", *words, "--yes"))[1]["settled"] == 0
        await lab.until_outputs(6)
    assert sorted(await lab.totals()) == [("a", 1), ("a", 2), ("b", 1), ("c", 1), ("d", 1), ("good", 1)]
    code, answer, _ = await run("list", "--settled")
    assert (answer["open"], [letter["state"] for letter in answer["letters"]]) == (0, ["settled"] * 5)
    again = (await lab.records(lab.topic, 0))[5:]
    assert [record.key for record in again] == [b"b", b"a", b"a", b"c"]
    origins = [f"{lab.topic}[0]@{offset}".encode() for offset in (1, 2, 0, 3)]
    assert [record.headers for record in again] == [(*ADDED, ("__kes_origin", origin)) for origin in origins]


def write_letters(lab: Lab, *found: IncomingRecord) -> None:
    producer = producer_to(lab.bootstrap)
    for record in found:
        letter = dead_letter(lab.dead_letter_topic, record, ValueError("no"), 1, 0)
        producer.produce(letter.topic, letter.value, letter.key, letter.partition, headers=letter.headers)
    assert producer.flush(PATIENCE) == 0


def record_at(lab: Lab, offset: int, name: str = "a", **changes: Any) -> IncomingRecord:
    record = IncomingRecord(lab.topic, 0, offset, name.encode(), added(name), ADDED, 5)
    return msgspec.structs.replace(record, **changes)


def test_what_cannot_be_sent_again_is_named_and_nothing_is_sent(lab: Lab, kes: Kes) -> None:
    """A class that is gone, a topic that is gone, a record that went by reference and is gone."""
    asyncio.run(lab.create(lab.topic, lab.dead_letter_topic))
    source = picky(lab, {"is": False})
    write_letters(
        lab,
        record_at(lab, 0),
        record_at(lab, 1, headers=[("__grt__", b"Gone")]),
        record_at(lab, 2, topic=f"{lab.topic}-gone"),
        record_at(lab, 3, headers=[("__kes_dlq_left_out_value", b"7"), *ADDED]),
        record_at(lab, 4, partition=0, value=b"\x1b[31m<b>\xff"),
        record_at(lab, 5, topic="no topic\x1b[2J", headers=[("__kes_dlq_left_out_value", b"7"), *ADDED]),
    )
    code, answer, err = kes(source, "dlq", "replay", "--all", "--yes")
    assert (code, answer) == (1, None)
    assert "no handler for the event type 'Gone'" in err
    assert f"topic {lab.topic}-gone does not exist any more" in err
    assert f"the record at {lab.topic}[0]@3 is not in the log any more" in err
    assert "topic no topic\\x1b[2J does not exist any more" in err
    assert "5 letters cannot be sent again, so nothing is" in err
    assert "\x1b" not in err
    assert lab._records(lab.topic, None) == []
    assert "is gone with its topic" in kes(source, "dlq", "show", "0@5")[1]["letters"][0]["problem"]
    assert kes(source, "dlq", "drop", "0@2", "0@3", "0@5", "--yes")[1]["settled"] == 3
    code, answer, _ = kes(source, "dlq", "replay", "--all", "--force", "--yes")
    assert (code, answer["letters"]) == (0, ["0@0", "0@1", "0@4"])
    assert [record.value for record in lab._records(lab.topic, None)] == [added("a"), added("a"), b"\x1b[31m<b>\xff"]
    code, answer, _ = kes(source, "dlq", "show", "0@4")
    assert answer["letters"][0]["value"] == {"base64": "G1szMW08Yj7/"}


def test_a_letter_whose_key_is_a_reserved_one_is_no_mark(lab: Lab, kes: Kes) -> None:
    asyncio.run(lab.create(lab.topic, lab.dead_letter_topic))
    source = picky(lab, {"is": False})
    forged = msgspec.json.encode(Mark(1, [(0, 100)]))
    keys = [(OFFSET_KEY, b"{}"), (MARK_KEY, b"junk"), (MARK_KEY, forged)]
    write_letters(lab, *(record_at(lab, at, key=key, value=value) for at, (key, value) in enumerate(keys)))
    for command, is_open in (("list", 3), ("drop", 3), ("list", 0)):
        code, answer, err = kes(source, "dlq", command, *["--all", "--yes"][: 2 * (command == "drop")])
        assert (code, answer["open" if command == "list" else "settled"]) == (0, is_open), err


def test_a_letter_that_goes_by_reference_takes_its_record_from_the_source(lab: Lab, kes: Kes) -> None:
    asyncio.run(lab.create(lab.topic, lab.dead_letter_topic))
    producer = producer_to(lab.bootstrap)
    producer.produce(lab.topic, added("x" * 500), b"large", 0, headers=[*ADDED, ("mine", b"1")])
    assert producer.flush(PATIENCE) == 0
    [record] = lab._records(lab.topic, 0)
    letter = dead_letter(lab.dead_letter_topic, record, ValueError("no"), 1, 0).by_reference
    assert letter is not None
    producer.produce(letter.topic, letter.value, letter.key, letter.partition, headers=letter.headers)
    assert producer.flush(PATIENCE) == 0
    assert kes(picky(lab, {"is": False}), "dlq", "replay", "--all", "--yes")[:1] == (0,)
    again = lab._records(lab.topic, 0)[1]
    assert (again.key, again.value) == (b"large", added("x" * 500))
    assert [name for name, _ in again.headers or ()] == ["__grt__", "mine", "__kes_origin"]


@pytest.mark.parametrize(("answer", "code", "sent"), [("y\n", 0, 2), ("n\n", 1, 0), ("", 1, 0)])
def test_it_shows_the_letters_and_asks(
    lab: Lab,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    code: int,
    sent: int,
) -> None:
    asyncio.run(lab.create(lab.topic, lab.dead_letter_topic))
    write_letters(lab, record_at(lab, 0, "\x1b[2J"), record_at(lab, 1, "[bold]"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    words = ["--topic", lab.dead_letter_topic, "--bootstrap-servers", lab.bootstrap]
    assert main.main(["dlq", "list", *words]) == 0
    assert main.main(["dlq", "show", "0@1", *words]) == 0
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert "open: 2 letters\n" in out
    assert f"0@1  open  from {lab.topic}[0]@1\n  key: [bold]\n  type: Added" in out
    assert main.main(["dlq", "replay", "--all", *words]) == code
    out, err = capsys.readouterr()
    assert "\\x1b[2J" in err
    assert "2 letters will be sent again. Continue? [y/N]" in err
    assert ("sent again: 2 letters" in out) is bool(sent)
    assert len(lab._records(lab.topic, None)) == sent
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main.main(["dlq", "drop", "0@0", *words]) == 0
    out = capsys.readouterr().out
    assert out.endswith("nothing to do: no selected letter is open\n" if sent else "dropped: 1 letter\n")


@pytest.mark.parametrize("words", [["--all"], ["0@0"]])
def test_a_topic_of_other_records_is_refused(lab: Lab, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    asyncio.run(lab.create(lab.topic))
    asyncio.run(lab.add("a"))
    places = [word for word in words if word != "--all"]
    for command in (
        ["drop", *words, "--yes"],
        ["replay", *words, "--yes"],
        ["list", *places],
        ["show", *places],
    ):
        line = ["dlq", *command, "--topic", lab.topic, "--bootstrap-servers", lab.bootstrap]
        assert main.main(line) == 1
        said = capsys.readouterr().err
        assert f"{lab.topic} is not a dead-letter topic: {lab.topic}[0]@0 has no header __kes_dlq_*" in said
    assert len(lab._records(lab.topic, None)) == 1


def test_a_topic_or_a_letter_that_is_not_there(lab: Lab, kes: Kes) -> None:
    source = picky(lab, {"is": False})
    assert f"topic {lab.dead_letter_topic} does not exist" in kes(source, "dlq", "list")[2]
    asyncio.run(lab.create(lab.dead_letter_topic))
    write_letters(lab, record_at(lab, 0))
    for words in (("show",), ("replay", "--yes"), ("drop", "--yes")):
        code, answer, err = kes(source, "dlq", words[0], "0@7", *words[1:])
        assert (code, answer) == (1, None)
        assert f"{lab.dead_letter_topic} has no dead letter at 0@7" in err


def test_two_at_the_same_time_and_one_that_dies_half_way_send_nothing_twice(
    lab: Lab, kes: Kes, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(lab.create(lab.topic, lab.dead_letter_topic))
    monkeypatch.setattr(letters, "_MOST_RECORDS", 3)
    write_letters(lab, *(record_at(lab, number, f"n{number}") for number in range(20)))
    settings = ClientSettings(lab.bootstrap)

    def replay(box: LetterBox, *, dies_after: int = 100) -> int:
        """As ``kes dlq replay`` does. Dies after so many transactions, one that is open left behind."""
        settler = box.settler()
        found: list[letters.Letter] = []
        settled = box.scan(lambda letter: None if letter.is_settled else found.append(letter))
        commit = settler._commit
        calls = [0]

        def committed(outputs: list[Any]) -> None:
            calls[0] += 1
            if calls[0] > dies_after:
                settler._slot.send(outputs[:1])
                raise KeyboardInterrupt
            commit(outputs)

        monkeypatch.setattr(settler, "_commit", committed)
        try:
            return settler.settle([(letter, resent(letter, None)) for letter in found], settled)
        except (KeyboardInterrupt, TransactionFailed):
            return -1
        finally:
            settler.close()

    def sent() -> list[bytes]:
        return [record.key or b"" for record in lab._records(lab.topic, None)]

    names = [b"n%d" % number for number in range(20)]
    with LetterBox(settings, lab.dead_letter_topic, PATIENCE) as first:
        assert replay(first, dies_after=2) == -1
    with (
        LetterBox(settings, lab.dead_letter_topic, PATIENCE) as left,
        LetterBox(settings, lab.dead_letter_topic, PATIENCE) as right,
        ThreadPoolExecutor(2) as threads,
    ):
        ended = list(threads.map(replay, (left, right)))
    assert max(ended) >= 0  # at least the one that began last came to its end
    assert sent() == names
    assert kes(picky(lab, {"is": False}), "dlq", "replay", "--all", "--yes")[1]["settled"] == 0
    assert sent() == names


def test_a_fenced_replay_says_so_and_its_transaction_is_void(lab: Lab) -> None:
    asyncio.run(lab.create(lab.topic, lab.dead_letter_topic))
    write_letters(lab, record_at(lab, 0))
    with LetterBox(ClientSettings(lab.bootstrap), lab.dead_letter_topic, PATIENCE) as box:
        found: list[letters.Letter] = []
        fenced = box.settler()
        settled = box.scan(found.append)
        box.settler().close()
        with pytest.raises(TransactionFailed) as failure:
            fenced.settle([(found[0], resent(found[0], None))], settled)
        assert failure.value.kind == "fenced"
        fenced.close()
    assert lab._records(lab.topic, None) == []
