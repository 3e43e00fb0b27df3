"""``kes rebuild``: a source that begins muted beside another one, and how far it is behind it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from streams import EventSource
from streams.cli import offsets, rebuild
from streams.cli.skip import position_of
from streams.cli.start_places import known_offset
from streams.cli.state_writing import without_rows
from streams.errors import OffsetError
from streams.looks.group_live import LiveMember
from streams.runtime.changelog import (
    BEGIN_KEY,
    OFFSET_KEY,
    VOICE_KEY,
    TopicIds,
    decode_begin,
    decode_offset,
    decode_voice,
)
from streams.runtime.ownership.topic_watch import refuse_replaced
from streams.runtime.status import MemberStatus
from tests.unit.cli_kit import FakeCluster, Kes, admin, preset, source_of, spec
from tests.unit.start_kit import OLD, PLAIN, World, world

__all__ = ["admin", "world"]  # the fixtures
OLDS = "old.flights.changelog"


def new(**settings: Any) -> EventSource[Any]:
    known: dict[str, Any] = {"num_partitions": 2, "bootstrap_servers": "there:1", "shadow_of": OLD}
    source = source_of(**known | settings)
    source.input("more")
    return source


@pytest.fixture
def fleet(world: World, admin: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> World:
    """NEW and OLD as sources of one module."""
    old = source_of(OLD, num_partitions=2, bootstrap_servers="there:1")
    old.input("more")
    module = sys.modules["fleet"]
    monkeypatch.setattr(module, "source", new())
    monkeypatch.setattr(module, "old", old, raising=False)
    admin.there[OLDS] = spec(OLDS, 2)
    for name in ("GroupChecks", "slot_of"):
        monkeypatch.setattr(rebuild, name, getattr(sys.modules["streams.cli.offsets_start"], name))

    class Live:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Live:
            return self

        def __exit__(self, *_: object) -> None: ...
        def read(self, seconds: float) -> object:
            status = MemberStatus(1, "1", 1, 2, (), (), (), shadow_of=OLD, muted={"totals": 3})
            return world.described("demo"), {"1": LiveMember(status, {}, 0.0), "2": LiveMember(status, {}, 0.0)}, ()

    monkeypatch.setattr(rebuild, "LiveGroup", Live)
    last_records = world.last_records
    monkeypatch.setattr(world, "last_records", lambda topic, *more: {} if topic == OLDS else last_records(topic, *more))
    return world


@pytest.fixture
def begin(kes: Kes) -> Kes:
    return preset(kes, "rebuild", "start", "fleet:source", "--of", "fleet:old")


def test_it_begins_muted_in_one_transaction_and_repeating_it_is_harmless(fleet: World, begin: Kes) -> None:
    answer = begin("--yes", "--json").data
    assert answer["inputs"] == {"flights": {"0": 2, "1": 2}, "more": {"0": 0, "1": 0}}
    assert (answer["group"], answer["follows"], answer["written"]) == ("demo", OLD, True)
    assert fleet.steps.count("commit") == 1
    for number in (0, 1):
        assert [each.key for each in fleet.records(number)] == [BEGIN_KEY, VOICE_KEY, OFFSET_KEY]
        assert decode_begin(fleet.records(number, BEGIN_KEY)[0]).how == "rebuild"
        told = decode_voice(fleet.records(number, VOICE_KEY)[0])
        assert (told.group, told.changelog, told.changelog_id) == (OLD, OLDS, "id")
        position = decode_offset(fleet.records(number, OFFSET_KEY)[0])
        assert (position.is_muted, position.ids.changelog) == (True, "id of the changelog")
    assert not begin("--yes", "--json").data["written"]
    assert "it has begun before: it follows old" in begin("--yes").err


def test_a_dry_run_writes_nothing(fleet: World, begin: Kes) -> None:
    assert not begin("--dry-run", "--json").data["written"]
    assert fleet.written == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"shadow_of": ""}, "shadow_of is ''; set it to 'old', the group it follows"),
        ({"shadow_of": "ode"}, "shadow_of is 'ode'; set it to 'old'"),
        ({"changelog_topic": OLDS}, "both sources have the topic old.flights.changelog (changelog)"),
        ({"dead_letter_topic": "old.flights.dead-letters"}, "(dead_letters): the new one needs its own"),
        ({"topic": "trains"}, "topic: the new source has 'trains', the running one 'flights'"),
        ({"num_partitions": 3}, "num_partitions: the new source has 3, the running one 2"),
        ({"bootstrap_servers": "elsewhere:1"}, "bootstrap_servers: the new source has 'elsewhere:1'"),
    ],
)
def test_sources_that_cannot_follow_are_refused(
    fleet: World, begin: Kes, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(sys.modules["fleet"], "source", new(**changed))
    assert said in begin("--yes", code=1).words
    assert fleet.written == []


def test_what_a_muted_source_cannot_have_is_named(fleet: World, begin: Kes) -> None:
    source = sys.modules["fleet"].source
    source.schedule_interjection(lambda ctx: None, every=5.0)
    source.lookup("rates", key=str, value=int)
    source.join("rows", key=str, value=int)
    said = begin("--yes", code=1).words
    assert "inputs: the new source has ['more', 'rows'], the running one ['more']" in said
    sys.modules["fleet"].old.join("rows", key=str, value=int)
    said = begin("--yes", code=1).words
    assert "a source that is muted (shadow_of) cannot have the table topic rows, the lookup topic rates" in said
    assert "the scheduled interjection" in said


def test_a_source_that_has_not_run_or_is_muted_itself_is_not_followed(
    fleet: World, begin: Kes, admin: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    del admin.there[OLDS]
    assert "old has not run yet, so nothing can follow it" in begin("--yes", code=1).words
    admin.there[OLDS] = spec(OLDS, 2)
    begin("--yes")
    found = fleet.last_records("", [0, 1], OFFSET_KEY)
    monkeypatch.setattr(fleet, "last_records", lambda *_: found)
    assert "old is muted itself" in begin("--yes", code=1).words
    monkeypatch.setattr(sys.modules["fleet"], "old", new(group="old2", shadow_of="older"))
    monkeypatch.setattr(sys.modules["fleet"], "source", new(shadow_of="old2"))
    assert "old2 is muted itself (shadow_of='older')" in begin("--yes", code=1).words


def test_the_status_says_how_far_it_is_behind(fleet: World, begin: Kes, kes: Kes) -> None:
    status = preset(kes, "rebuild", "status", "fleet:source")
    assert "it has not begun muted: run `kes rebuild start fleet:source --of OLD`" in status(code=1).words
    begin("--yes")
    fleet.members["demo"] = (PLAIN,)
    fleet.offsets = {("demo", "flights"): {0: 4, 1: 9}, (OLD, "flights"): {0: 6, 1: 9}, (OLD, "more"): {0: 1}}
    answer = status("--json").data
    assert (answer["behind"], answer["members"], answer["muted"]) == (2, 1, {"totals": 6})
    assert answer["partitions"][0] == {
        "topic": "flights", "partition": 0, "committed": 4, "followed": 6, "behind": 2,
    }  # fmt: skip
    assert answer["partitions"][3]["behind"] is None
    assert "records that they have not sent: 6 for totals" in status("--max-behind", "2").err
    status("--max-behind", "1", code=1)


def test_a_status_without_the_setting_is_refused(fleet: World, kes: Kes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fleet"], "source", new(shadow_of=""))
    assert "has no shadow_of in its settings" in kes("rebuild", "status", "fleet:source", code=1).words


def test_no_command_and_no_older_release_takes_a_muted_position_for_another(fleet: World, begin: Kes) -> None:
    begin("--yes")
    config = sys.modules["fleet"].source.config
    record = decode_offset(fleet.records(0, OFFSET_KEY)[0])
    checks: Any = fleet
    with pytest.raises(OffsetError, match="the source is muted"):
        known_offset(config, record, "flights", 0, "id of flights", "id of the changelog")
    with pytest.raises(OffsetError, match="the source is muted"):
        position_of(config, checks, "flights", 0, None)
    with pytest.raises(OffsetError, match="the source is muted"):
        offsets._compared(config, ["more"], checks, [0], restored=True)
    story = {one.key: one.value for one in fleet.records(0)} | {b"row": b"1"}
    assert without_rows({key: value for key, value in story.items() if key and value and key != OFFSET_KEY}) == {
        b"row": b"1"
    }
    # What an older release compares at its take-over: the field as it is.
    now = TopicIds("id of flights", "id of the changelog")
    with pytest.raises(OffsetError, match="was deleted and created again"):
        refuse_replaced(config, 0, TopicIds(record.source_id, record.changelog_id), now)
    refuse_replaced(config, 0, record.ids, now)
