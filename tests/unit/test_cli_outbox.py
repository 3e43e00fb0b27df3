"""``kes outbox`` over a database in a file: status again and again, and parked rows by their whole identity."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from streams import Outbox, Record
from streams.cli import outbox as module
from streams.core.outbox import RowId
from streams.errors import OutboxError
from streams.outbox.database import StashedRow
from streams.outbox.sessions import open_session
from streams.records import Output
from tests.unit.cli_kit import Kes, kes_with
from tests.unit.waiting import give_own


@pytest.fixture
def kes(capsys: pytest.CaptureFixture[str]) -> Kes:
    return kes_with(capsys)


@pytest.fixture
def database(tmp_path: Path) -> str:
    """An outbox with one row, which is parked."""
    file = tmp_path / "shop.db"
    with open_session(f"sqlite:{file}", "kes_outbox") as session:
        session.apply(1)
        db = sqlite3.connect(file)
        with db:
            Outbox().stash_many(db, [Record("notes", b"x", b"k")])
        db.close()
        session.park(0, session.fetch(0, 1, 1)[0].row, "no such topic", 60.0, 60.0)
    return f"sqlite:{file}"


def test_a_watch_shows_each_look_and_waits_for_a_database_that_is_away(
    kes: Kes, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, turns = Path(database.removeprefix("sqlite:")), list[float]()
    content = file.read_bytes()

    def sleep(seconds: float) -> None:
        turns.append(seconds)
        file.write_bytes(b"no database" if len(turns) == 1 else content)
        if len(turns) == 3:
            raise KeyboardInterrupt

    give_own(monkeypatch, "time", module, sleep=sleep)
    answer = kes("outbox", "status", "--watch", "--database", database, "--json")
    looks = [json.loads(line) for line in answer.out.splitlines()]
    assert [look[0]["parked"] for look in looks] == [1, 1]
    assert "does not answer" in answer.words or "not a database" in answer.words
    give_own(monkeypatch, "time", module, sleep=lambda seconds: (_ for _ in ()).throw(KeyboardInterrupt))
    assert "parked" in kes("outbox", "status", "--watch", "--database", database).out


def test_a_parked_row_is_dropped_by_id_and_tag(kes: Kes, database: str) -> None:
    (row,) = kes("outbox", "parked", "list", "--database", database, "--json").data
    shown = kes("outbox", "parked", "show", str(row["id"]), "--database", database, "--json").data
    assert (shown["id"], shown["tag"], shown["key"]) == (row["id"], row["tag"], "k")
    drop = ["outbox", "parked", "drop", str(row["id"]), "--yes", "--database", database, "--tag"]
    assert "no row 1 is parked" in kes(*drop, str(row["tag"] ^ 1), code=1).words
    assert str(2**63 - 1) in kes("outbox", "parked", "show", str(2**63), "--database", database, code=2).words
    kes(*drop, str(row["tag"]))
    assert kes("outbox", "parked", "list", "--database", database, "--json").data == []


def test_one_of_two_rows_with_an_id_is_named_by_its_tag() -> None:
    output = Output("notes", b"x", b"k", None, -1, 0, 0, 0)
    both = [StashedRow(RowId(4, tag), output) for tag in (7, -9)]

    class Session:
        def parked_records(self, number: int) -> list[StashedRow]:
            return both

    session: Any = Session()
    with pytest.raises(OutboxError, match="2 parked rows of kes_outbox have the id 4: name one by --tag, of 7, -9"):
        module._parked(session, 4, None, "kes_outbox")
    assert module._parked(session, 4, -9, "kes_outbox") is both[1]
