"""The assignor's decisions, told as transcripts: ``transcripts/assignor/*.txt``. ``REGENERATE=1`` writes them anew.

A line that begins with ``>`` is input, what follows is what came of it. Commands: ``topic N`` (partitions),
``join NAME`` or ``join ID=NAME``, ``ready NAME: 1 2``, ``owns NAME@GENERATION: 1 2`` (a report as it stands),
``leave NAME``, ``crash NAME``, ``round``.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from streams.core.assignor import sticky_plan
from streams.group import Copies, MemberReport

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts" / "assignor").glob("*.txt"))


class Play:
    def __init__(self) -> None:
        self.partitions, self.generation, self.sequence = 0, 0, 0
        self.reports: dict[str, MemberReport] = {}

    def do(self, line: str) -> list[str]:
        command, _, rest = line.partition(" ")
        name, _, numbers = rest.partition(":")
        parts = frozenset(int(number) for number in numbers.split())
        if command == "topic":
            self.partitions = int(name)
        elif command == "join":
            member_id, _, instance = name.partition("=")
            self.reports[member_id] = MemberReport(instance=instance or member_id)
        elif command == "crash":
            del self.reports[name]
        elif command == "leave":
            self.change(name, leaving=True)
        elif command == "ready":
            self.change(name, copies=Copies(ready=parts))
        elif command == "owns":
            name, _, generation = name.partition("@")
            self.change(name, owned=parts, generation=int(generation))
        else:
            assert command == "round", line
            return self.round()
        return []

    def change(self, name: str, **changes: object) -> None:
        self.reports[name] = msgspec.structs.replace(self.reports[name], **changes)

    def round(self) -> list[str]:
        self.generation += 1
        lines = []
        for member_id, assignment in sticky_plan(self.partitions, self.reports).items():
            owned = self.reports[member_id].owned
            told = [f"{member_id:8} own {shown(assignment.own):12}"]
            told += [f"+ {shown(assignment.own - owned)}"] if assignment.own - owned else []
            told += [f"- {shown(owned - assignment.own)}"] if owned - assignment.own else []
            told += ["quit"] if assignment.quit else []
            lines.append("  ".join(told).rstrip())
            self.change(member_id, owned=assignment.own, generation=self.generation)
        names = assignment.members if self.reports else ()
        return [*lines, f"members {' '.join(names)}"]


def shown(numbers: frozenset[int]) -> str:
    return ",".join(map(str, sorted(numbers))) or "-"


def replayed(text: str) -> str:
    play, out = Play(), []
    for line in text.splitlines():
        if line.startswith(">"):
            out += [line, *play.do(line[1:].strip())]
        elif line.startswith("#") or not line.strip():
            out.append(line)
    return "\n".join(out) + "\n"


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    text = path.read_text()
    answer = replayed(text)
    if os.environ.get("REGENERATE"):
        path.write_text(answer)
        text = answer
    assert answer == text


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 6


def test_a_group_without_members_has_an_empty_plan() -> None:
    assert sticky_plan(3, {}) == {}


def test_each_member_hears_the_counter_of_its_own_report() -> None:
    plan = sticky_plan(2, {"a": MemberReport(instance="a", sequence=7), "b": MemberReport(instance="b", sequence=9)})
    assert [plan["a"].sequence, plan["b"].sequence] == [7, 9]
