"""``kes dlq`` without a cluster: which letters are settled, what is shown of bad ones, and wrong usage."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.cli import dlq
from streams.cli.cluster import checked_partition_offset
from streams.cli.console import complain
from streams.cli.letter_tables import described
from streams.errors import OffsetError
from streams.looks.committing import transaction
from streams.looks.letter_facts import summary_of, whole
from streams.looks.letters import Letter, Mark, Settled, resent
from streams.looks.records import Decoder, one_line, plain, plain_bytes
from streams.records import Headers, IncomingRecord
from streams.sak.harmless import harmless
from tests.unit.cli_kit import Kes, preset, source_of

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 10)), max_size=12)


@given(RANGES)
def test_ranges_are_the_set_that_was_added(added: list[tuple[int, int]]) -> None:
    settled, expected = Settled(), set()
    for start, length in added:
        settled.add(start, start + length)
        expected |= set(range(start, start + length))
        assert {offset for offset in range(80) if offset in settled} == expected
    ranges = settled.ranges
    assert all(end < start for (_, end), (start, _) in pairwise(ranges)), "none touch"
    assert all(start < end for start, end in ranges)
    assert settled.prefix == next(offset for offset in range(80) if offset not in expected)
    assert Settled(msgspec.json.decode(msgspec.json.encode(Mark(1, ranges)), type=Mark).settled).ranges == ranges


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=30), st.data())
def test_a_mark_says_of_each_letter_whether_it_is_settled(gaps: list[tuple[int, bool]], data: st.DataObject) -> None:
    """In whatever order and however often, whatever lies between the letters; all settled: one range."""
    offsets, after, at = [], {}, -1
    for gap, _ in gaps:
        before, at = at, at + gap
        offsets.append(at)
        after[at] = before + 1
    chosen = [offset for offset, (_, wanted) in zip(offsets, gaps, strict=True) if wanted]
    settled = Settled()
    for offset in data.draw(st.permutations(chosen)):
        settled.add(after[offset], offset + 1)
    assert [offset for offset in offsets if offset in settled] == chosen
    if chosen == offsets:
        assert settled.ranges == [(0, offsets[-1] + 1)]


def letter(headers: Headers, *, key: bytes | None = b"k", value: bytes | None = b"{}") -> Letter:
    named = [("__kes_dlq_" + name, content) for name, content in headers]
    return Letter(IncomingRecord("dlq", 1, 7, key, value, named, 5), 0, False)


BAD: list[Headers] = [
    [],
    [("topic", None), ("partition", b"1")],
    [("topic", b"t"), ("partition", b"-1"), ("offset", b"9" * 5_000)],
    [("topic", b"t\x1b[2J"), ("partition", b"9" * 5_000), ("failed_at_ms", b"9" * 18), ("attempts", b"many")],
    [("topic", b"\xff\xfe"), ("partition", "\u0661".encode()), ("trace", b"\x1b]0;evil\x07\n\xff")],
    [("topic", b"t"), ("partition", b"1"), ("left_out_value", b"x"), ("message", b"[bold]<script>\xe2\x80\xae")],
]


@pytest.mark.parametrize("headers", BAD)
def test_a_bad_letter_is_shown_and_harmless(headers: Headers) -> None:
    found = letter(headers, key=b"\x1b[31m", value=b"\xff\x1b")
    facts = whole(found, Decoder(source_of()), None)
    text = described(facts).plain
    assert text.replace("\n", "").isprintable()
    assert facts["problem"]
    msgspec.json.encode(facts)
    assert summary_of(found)["place"] == "1@7"


def test_a_letter_that_was_sent_again_by_other_tools_names_its_last_failure() -> None:
    first, second = [("topic", b"t"), ("partition", b"0"), ("offset", b"1")], [("partition", b"0"), ("offset", b"8")]
    found = letter([*first, *second])
    assert found.origin == "t[0]@8"
    again = resent(found, None)
    assert (again.topic, again.partition, again.headers) == ("t", 0, [("__kes_origin", b"t[0]@8")])
    assert again.timestamp_ms == 0, "the time of sending: an old one could be deleted before it is handled"


def test_the_first_origin_stays() -> None:
    found = letter([("topic", b"t"), ("partition", b"0"), ("offset", b"8")])
    found.record.headers = [("__kes_origin", b"t[0]@1"), *(found.record.headers or ())]
    assert resent(found, None).headers == [("__kes_origin", b"t[0]@1")]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (b'{"v":1,"settled":[[5,3]]}', "a range that is none"),
        (b"", "cannot be read"),
        (None, "cannot be read"),
        (b'{"v":2,"settled":[]}', "has format 2: update this program"),
    ],
)
def test_a_mark_of_another_program_is_an_error(value: bytes | None, error: str) -> None:
    from streams.looks.letters import _settled_by

    with pytest.raises(OffsetError, match=error):
        _settled_by(IncomingRecord("dlq", 1, 7, b"", value, None))


@given(st.binary(max_size=60))
def test_bytes_are_shown_in_one_harmless_line(data: bytes) -> None:
    assert harmless(data).isprintable()
    assert one_line(plain_bytes(data)).isprintable()


def test_values_that_have_no_plain_form_are_named() -> None:
    class Odd:
        def __str__(self) -> str:
            raise RuntimeError

    assert plain({"a": {1}, b"b": b"x"}) == {"a": [1], "Yg==": "eA=="}
    assert plain(Odd()) == "(Odd, which has no plain form: RuntimeError)"


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("fleet")
    vars(module).update(source=source_of(bootstrap_servers="127.0.0.1:1"))
    monkeypatch.setitem(sys.modules, "fleet", module)


@pytest.mark.usefixtures("fleet")
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["list"], 2, "name MODULE:SOURCE, or its dead-letter topic with --topic"),
        (["list", "fleet:source", "--topic", "x"], 2, "name MODULE:SOURCE, or its dead-letter topic with --topic"),
        (["show", "fleet:source", "3"], 2, "'3' is not PARTITION@OFFSET"),
        (["list", "--topic", "x"], 1, "no broker is named"),
        (["list", "fleet:source", "--timeout", "0.1"], 1, "nothing listens at 127.0.0.1:1"),
        (["replay", "fleet:source"], 2, "name letters by PARTITION@OFFSET, or use --all"),
        (["drop", "fleet:source", "--all", "--json"], 2, "--json needs --yes"),
    ],
)
def test_what_is_wrong_is_said(
    kes: Kes, arguments: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if code == 2:
        monkeypatch.setattr(dlq, "await_listener", lambda servers, timeout: None)
    assert said in preset(kes, "dlq")(*arguments, code=code).words


def test_a_place_is_two_numbers() -> None:
    assert checked_partition_offset("2@1473") == (2, 1473)
    for text in ("", "2", "@", "2@", "-1@3", "2@1e3", "2@3@4", "\u0661@1"):
        with pytest.raises(Exception, match="is not PARTITION@OFFSET"):
            checked_partition_offset(text)


def test_a_source_on_another_cluster_is_refused(kes: Kes, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("far")
    vars(module).update(source=source_of(bootstrap_servers="a:1", source_bootstrap_servers="b:1"))
    monkeypatch.setitem(sys.modules, "far", module)
    monkeypatch.setattr(dlq, "await_listener", lambda servers, timeout: None)
    assert "no transaction spans both" in kes("dlq", "replay", "far:source", "--all", code=1).words


class SlotThatIsInterrupted:
    """Ctrl-C comes in one of its calls."""

    def __init__(self, during: str) -> None:
        self.during, self.calls = during, list[str]()

    def __getattr__(self, name: str) -> Callable[[], None]:
        def call() -> None:
            self.calls.append(name)
            if name == self.during:
                raise KeyboardInterrupt

        return call


@pytest.mark.parametrize(("during", "in_doubt"), [("commit", True), ("send", False)])
def test_ctrl_c_during_the_commit_says_that_the_outcome_is_in_doubt(
    during: str, in_doubt: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    slot: Any = SlotThatIsInterrupted(during)
    with pytest.raises(KeyboardInterrupt), transaction(slot, "look there", complain):
        slot.send()
    said = " ".join(capsys.readouterr().err.split())
    assert said == ("kes: interrupted during the commit, so whether it took place is not known. look there" * in_doubt)
    assert slot.calls[-1] == "abort"
