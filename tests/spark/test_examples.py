"""The recipes of ``examples/spark``, each on a small bank with a broker of its own."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import streams.spark as kes_spark
from examples import bank_feed
from examples.bank import Deposited
from examples.spark import new_version, restore
from examples.spark.common import create_topics, read
from tests.spark.examples_kit import DEPOSITS, Bank, bank_at_work

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(
    path.stem for path in (ROOT / "examples" / "spark").glob("*.py") if path.stem not in ("__init__", "common")
)


@pytest.fixture(scope="module")
def bank() -> Iterator[Bank]:
    with bank_at_work() as found:
        yield found


@pytest.mark.parametrize("name", RECIPES)
def test_help_shows_what_the_recipe_says_of_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = importlib.import_module(f"examples.spark.{name}")
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        recipe.main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"python -m examples.spark.{name}" in shown
    assert "--servers" in shown


def contents(records: DataFrame) -> list[tuple[object, ...]]:
    """Records without their offsets (of which transaction markers take some), in the order of their partitions."""
    rows = records.orderBy("partition", "offset").collect()
    return [(row.partition, row.key, row.value, row.timestamp, tuple(map(tuple, row.headers or []))) for row in rows]


def test_restore_brings_back_every_record_as_it_was_and_only_once(
    spark: SparkSession, bank: Bank, tmp_path: Path
) -> None:
    restore.save(spark, bank.servers, "bank-events", tmp_path / "saved")
    before = contents(read(spark, bank.servers, "bank-events"))
    create_topics(bank.servers, {"bank-events-restored": 10})
    for written in (True, False):
        result = restore.load(spark, bank.servers, "bank-events-restored", tmp_path / "saved")
        assert (result.written, result.rows) == (written, len(before))
    assert len(before) >= DEPOSITS
    assert contents(read(spark, bank.servers, "bank-events-restored")) == before


def test_a_new_version_has_no_seam(spark: SparkSession, bank: Bank, tmp_path: Path) -> None:
    create_topics(bank.servers, {new_version.NEW: 10})
    first = new_version.backfill(spark, bank.servers, tmp_path)
    bank_feed.pay_in(bank.servers, 300, seed=6)
    for _ in range(2):  # a second run of everything changes nothing
        again = new_version.backfill(spark, bank.servers, tmp_path)
        assert (again.written, again.rows) == (False, first.rows)
        new_version.follow(spark, bank.servers, tmp_path, for_ever=False).awaitTermination()
    old = kes_spark.events(read(spark, bank.servers, new_version.OLD), Deposited, on_error="fail")
    new = kes_spark.events(read(spark, bank.servers, new_version.NEW), new_version.DepositedInCurrency, on_error="fail")
    history = by_account(old)
    assert sum(map(len, history.values())) == first.rows + 300
    assert by_account(new) == history
    assert {row.currency for row in new.select("currency").distinct().collect()} == {"EUR"}


def by_account(deposits: DataFrame) -> dict[str, list[tuple[int, object]]]:
    """Account to its deposits as they follow each other: (cents, time)."""
    found: dict[str, list[tuple[int, object]]] = {}
    for row in deposits.orderBy("_meta.partition", "_meta.offset").collect():
        found.setdefault(row.account, []).append((row.cents, row._meta.timestamp))
    return found
