"""``kes skip`` on a real broker: a record at which a source stops is passed, exactly once, and nothing else is."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from streams import PARK, EventSource
from streams.cli import main
from streams.errors import EventFailure, OffsetError
from streams.kafka.questions.group_checks import GroupChecks
from streams.kafka.writing.blocking import BlockingSlot
from streams.runtime.changelog import OFFSET_KEY
from streams.settings import QueryConfig
from tests.broker.client_kit import writing
from tests.broker.engine_kit import Lab, Running, facts, start_failure
from tests.unit.private_kit import private
from tests.unit.waiting import PATIENCE, stays, wait_until
from tests.unit.web_kit import ask
from tests.vocabulary import Totals, added

from streams.queries import QueryServer  # isort: skip
from streams.web import Monitor  # isort: skip

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(180)]

PARTITIONS = 2
Kes = Callable[..., tuple[int, Any, str]]
POISON = b'{"name":5}'


class Shop:
    """A source over two partitions that stops at what it cannot read, and ``kes skip`` for it."""

    def __init__(self, lab: Lab, kes: Kes) -> None:
        self.lab, self._kes = lab, kes
        self.source: EventSource[Totals] = lab.telling(instance_id="shop")

    async def skip(self, *words: str) -> tuple[int, Any, str]:
        return await asyncio.to_thread(self._kes, self.source, "skip", *words, "--yes", behind=1)

    async def until_poison(self) -> None:
        """Run until the source stops at the poison."""
        assert isinstance(await start_failure(self.source), EventFailure)

    async def run_to(self, *offsets: int) -> None:
        """Run up to these offsets, and stop in good order."""
        async with Running(self.source) as running:
            await running.until_handled(*offsets)

    async def offset_records(self) -> list[bytes]:
        """The offset records of partition 0, as they are in the changelog."""
        found = await self.lab.records(self.lab.changelog, 0)
        return [record.value or b"" for record in found if record.key == OFFSET_KEY]


@pytest.fixture
async def shop(lab: Lab, kes: Kes) -> Shop:
    """``a``, poison, ``b`` in partition 0; ``c`` in partition 1."""
    await lab.create()
    shop = Shop(lab, kes)
    await lab.add("a")
    await lab.send(POISON)
    await lab.add("b")
    await lab.add("c", partition=1)
    return shop


async def test_poison_is_passed_and_kept_as_a_dead_letter(shop: Shop) -> None:
    lab = shop.lab
    await shop.until_poison()
    await shop.until_poison()  # as kes run would find it
    carried = b',"inputs":{"more":{"0":[7, "id"]}}}'  # of a later version, which was here meanwhile
    value = (await shop.offset_records())[-1][:-1] + carried
    await lab.send(value, OFFSET_KEY, None, topic=lab.changelog)
    await lab.flush()
    code, _, err = await shop.skip("0@1", "--reason", "as the log has it")
    assert (code, "only a dead letter" in " ".join(err.split())) == (2, True)
    code, answer, err = await shop.skip("0@1", "--dead-letter", "--reason", "as the log has it")
    assert (code, answer and answer["next_offset"]) == (0, 2), err
    code, _, err = await shop.skip("0@1", "--dead-letter")
    assert code == 1
    assert "the record at 1 is handled already, the next one is 2" in err
    await shop.run_to(3, 1)
    assert sorted(await lab.totals()) == [("a", 1), ("b", 1), ("c", 1)]
    [(letter, found)] = await lab.dead_letters()
    assert (letter.value, found["offset"], found["error"], found["instance"]) == (
        POISON,
        "1",
        "DecodeError",
        "kes skip",
    )
    assert "Expected `str`, got `int`" in found["message"]
    assert found["message"].endswith("(passed by kes skip: as the log has it)")
    written = await shop.offset_records()
    behind = written[written.index(value) + 1 :]
    assert len(behind) > 1
    assert all(each.endswith(carried) for each in behind)
    await lab.check_settled(lab.topic, lab.output, lab.changelog, lab.dead_letter_topic)


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1)])
async def test_it_shows_the_record_and_asks(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, code: int
) -> None:
    await shop.until_poison()
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    module = ModuleType("shop")
    vars(module).update(source=shop.source)
    monkeypatch.setitem(sys.modules, "shop", module)
    assert await asyncio.to_thread(main.main, ["skip", "shop:source", "0@1"]) == code
    out, err = capsys.readouterr()
    assert '{"name":5}' in err
    assert "(cannot be read: " in err
    assert "This record is skipped, and not kept anywhere else. Continue after it? [y/N]" in err
    assert out.lstrip() == ("" if code else f"{shop.lab.topic}[0] goes on behind 1\n")
    assert await shop.lab.changelog_offset(0) == (1 if code else 2)
    assert await shop.lab.dead_letters() == []


async def test_poison_at_the_very_start_and_what_is_refused(lab: Lab, kes: Kes) -> None:
    """No offset is in the changelog then."""
    shop = Shop(lab, kes)
    await lab.create()
    await lab.send(POISON)
    await lab.add("a")
    await shop.until_poison()
    for place, said in {
        "0@1": "the next record is the one at 0, not 1",
        "0@77": "the next record is the one at 0, not 77",
        "1@0": "there is no record at 0 or behind it yet",
        "2@0": "has the partitions 0 to 1, not 2",
    }.items():
        code, answer, err = await shop.skip(place)
        assert (code, answer) == (1, None)
        assert said in err
    assert (await shop.skip("0@0"))[0] == 0
    async with Running(shop.source) as running:
        await running.until_handled(2, 0)
        code, _, err = await shop.skip("0@2")
        assert code == 1
        assert f"group {lab.group} is alive (shop): stop all members" in err
    assert await lab.totals() == [("a", 1)]
    assert await lab.dead_letters() == []


@pytest.mark.nightly
@pytest.mark.parametrize("names", ["", "abc"], ids=["the first", "the fourth"])
async def test_poison_in_a_further_input_is_passed(lab: Lab, kes: Kes, names: str) -> None:
    """Also the very first record, before there is any position."""
    more, place = f"{lab.topic}-more", len(names)
    await lab.create(lab.topic, lab.output, more)
    shop = Shop(lab, kes)
    shop.source.input(more)
    for value in (*map(added, names), POISON, added("d")):
        await lab.send(value, topic=more)
    await lab.flush()
    assert f"kes skip MODULE:SOURCE {more}:0@{place}" in str(await start_failure(shop.source))
    for wrong, exit_code, said in [
        (f"{more}:0@{place + 1}", 1, f"the next record is the one at {place}"),
        (f"other:0@{place}", 2, "is no input of"),
    ]:
        code, _, err = await shop.skip(wrong)
        assert code == exit_code
        assert said in " ".join(err.split())
    code, answer, err = await shop.skip(f"{more}:0@{place}", "--dead-letter")
    assert (code, answer and answer["next_offset"]) == (0, place + 1), err
    [(letter, found)] = await lab.dead_letters()
    assert (letter.value, found["topic"]) == (POISON, more)
    async with Running(shop.source):
        await lab.until_outputs(place + 1)
    assert await lab.totals() == [(name, 1) for name in (*names, "d")]


async def test_a_record_behind_markers_and_aborted_ones_is_the_next_one(lab: Lab, kes: Kes) -> None:
    shop = Shop(lab, kes)
    assert "the source has not run yet" in (await shop.skip("0@0"))[2]
    await shop.source.create_source()
    with writing(lab.settings, lab.topic) as writer:
        writer.abort((0, "k", "aborted"))
        writer.producer.close()
    await lab.send(POISON)
    await lab.flush()
    [poison] = await lab.records(lab.topic, 0)
    assert poison.offset > 0
    assert f"the next record is the one at {poison.offset}, not 0" in (await shop.skip("0@0"))[2]
    assert "there is no record at 0 or behind it yet" in (await shop.skip("1@0"))[2]


async def test_a_member_that_starts_meanwhile_waits_and_goes_on_behind_the_record(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joins after the look, and before the commit."""
    lab = shop.lab
    await shop.until_poison()
    loop, started = asyncio.get_running_loop(), []
    hold = GroupChecks.hold

    async def start() -> None:
        running = Running(lab.telling(instance_id="other"), active=1)
        started.append(running)
        running.task = asyncio.create_task(running.source.consume_events())

    def hold_and_start(self: GroupChecks, slot: BlockingSlot, offsets: Mapping[int, int], *topic: str) -> None:
        hold(self, slot, offsets, *topic)
        asyncio.run_coroutine_threadsafe(start(), loop).result(60)
        wait_until(lambda: self._questions.describe_group(lab.group, 10.0).state == "Stable")
        running = started[0]
        stays(lambda: not running.task.done() and running.active <= 1, 1.0, "the member waits for partition 0")

    monkeypatch.setattr(GroupChecks, "hold", hold_and_start)
    code, _, err = await shop.skip("0@1")
    assert code == 0, err
    [running] = started
    await running.until_handled(3, 1)
    await running.__aexit__(None, None, None)
    assert sorted(await lab.totals()) == [("a", 1), ("b", 1), ("c", 1)]


@pytest.mark.parametrize("member", [True, False], ids=["a member came", "the command dies"])
async def test_an_end_before_the_commit_leaves_everything_as_it_was(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, member: bool
) -> None:
    lab = shop.lab
    await shop.until_poison()
    hold, abort = GroupChecks.hold, BlockingSlot.abort

    def held(self: GroupChecks, slot: BlockingSlot, offsets: Mapping[int, int], *topic: str) -> None:
        hold(self, slot, offsets, *topic)
        if member:
            raise OffsetError("group is alive")
        raise KeyboardInterrupt

    monkeypatch.setattr(GroupChecks, "hold", held)
    if not member:
        monkeypatch.setattr(BlockingSlot, "abort", lambda self: None)
    assert (await shop.skip("0@1", "--dead-letter"))[0] == (1 if member else 130)
    monkeypatch.setattr(BlockingSlot, "abort", abort)
    monkeypatch.setattr(GroupChecks, "hold", hold)
    assert await lab.dead_letters() == []
    assert await lab.changelog_offset(0) == 1
    if not member:  # what is pending is ended by the next run, under the same id
        code, _, err = await shop.skip("0@1", "--dead-letter")
        assert code == 0, err
        assert [facts(letter)["offset"] for letter, _ in await lab.dead_letters()] == ["1"]


async def test_parked_keys_are_listed_shown_and_let_go(lab: Lab, kes: Kes, tmp_path: Path) -> None:
    await lab.create()
    source = lab.telling(instance_id="shop", decode_policy=PARK)
    await lab.add("a")
    await lab.send(POISON, b"bad")
    await lab.send(POISON, None)
    await lab.send(POISON, b"bad")

    async def parked(*words: str) -> tuple[int, Any, str]:
        command, *rest = words
        return await asyncio.to_thread(kes, source, "parked", command, *rest, behind=2)

    async with Running(source) as running:
        await running.until_handled(4, 0)
        code, answer, err = await parked("list")  # beside the member
        assert (code, [(row["key"], row["events"]) for row in answer["parked"]]) == (1, [("bad", 2), (None, 1)]), err
        code, _, err = await parked("drop", "bad", "--yes")
        assert code == 1
        assert "member" in err
    code, answer, err = await parked("show", "bad")
    assert (code, [event["value"] for event in answer["events_shown"]]) == (0, [{"name": 5}] * 2), err
    assert "Expected `str`, got `int`" in answer["events_shown"][0]["problem"]
    assert (await parked("drop", "other", "--yes"))[0] == 1
    code, answer, err = await parked("skip-head", "bad", "--dead-letter", "--yes")
    assert (code, answer and answer["action"]) == (0, "skip-head"), err
    [(letter, facts)] = await lab.dead_letters()
    assert (letter.value, letter.key, facts["offset"]) == (POISON, b"bad", "1")
    assert "let go by an operator" in facts["message"]
    code, answer, _ = await parked("list")
    (first, second) = answer["parked"]
    assert (first["events"], second["key"]) == (1, None)
    assert (await parked("retry", "--all", "--yes"))[0] == 0
    assert (await parked("drop", "--queue", second["queue"], "--yes"))[0] == 0
    assert (await parked("drop", b"bad".hex(), "--hex", "--yes"))[0] == 0
    assert (await parked("list"))[:2] == (0, {"parked": []})

    queries = QueryConfig(secret_file=str(private(tmp_path / "secret", "the secret of this group")), operate=True)
    source = lab.telling(instance_id="shop", decode_policy=PARK, queries=queries)
    await lab.send(POISON, b"bad")
    await lab.send(POISON, None)
    await lab.send(added("b"), b"bad")
    await lab.flush()
    server = QueryServer(source, "127.0.0.1:0")
    async with Running(source) as running:  # the owner acts
        await running.until_handled(7, 0)
        _, answer, _ = await parked("list")
        # Both may be parked in one millisecond, and have no order then.
        assert sorted((row["events"], row["key"]) for row in answer["parked"]) == [(1, None), (2, "bad")]
        async with asyncio.timeout(PATIENCE):  # members report once a second
            while not (told := (await asyncio.to_thread(kes, source, "lag", behind=1))[1]["parked"]):
                pass
        assert [(row["partition"], row["keys"], row["events"]) for row in told] == [(0, 2, 3)]
        _, found, _ = await asyncio.to_thread(kes, source, "doctor", behind=1)
        assert ("parked", "warning") in [(each["check"], each["state"]) for each in found["findings"]]
        code, _, err = await parked("drop", "other", "--yes")
        assert (code, "not parked" in err) == (1, True), err
        assert (await parked("retry", "--all", "--yes"))[0] == 0
        async with Monitor(source, address="127.0.0.1:0") as monitor:  # its pages do the same

            def web(path: str, **more: Any) -> Any:
                return json.loads(ask(monitor.port, path, monitor.link.partition("#")[2], **more).text)

            shown = await asyncio.to_thread(web, "/api/v1/parked-keys")
            places = {(each["key"], each["events"]): each["place"] for each in shown["queues"]}
            assert places.keys() == {("bad", 2), ("", 1)}
            act = "/api/v1/actions/act-on-parked-keys/start"
            body = json.dumps({"action": "drop", "places": [places["", 1]]})
            await asyncio.to_thread(web, act, method="POST", body=body)
            async with asyncio.timeout(PATIENCE):
                while (left := await asyncio.to_thread(web, "/api/v1/parked-keys"))["parked_keys"] > 1:
                    pass
            assert (left["parked_events"], left["problem"]) == (2, "")
        code, answer, err = await parked("skip-head", "bad", "--dead-letter", "--yes")
        assert (code, answer and answer["queues"][0]["events"]) == (0, 2), err
        assert len(await lab.dead_letters()) == 2
        assert (await parked("list"))[:2] == (0, {"parked": []})
        server.close()
        code, _, err = await parked("drop", "bad", "--yes", "--timeout", "1")
        assert (code, "no answer within 1 s" in err) == (1, True), err
    assert sorted(await lab.totals()) == [("a", 1), ("b", 1)]
    await lab.check_settled(lab.topic, lab.output, lab.changelog, lab.dead_letter_topic)
