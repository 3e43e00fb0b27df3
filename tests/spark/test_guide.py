"""The guides about Spark: their Python runs as it stands there, from top to bottom; their tables name every option."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

import streams.spark as kes_spark
from examples import bank, bank_feed
from examples.topics import create_topics
from streams import EventSource
from streams.broker import KafkaBroker
from streams.spark import options
from tests.broker.engine_kit import Running

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "guides"

FLIGHTS = """\
tail_number,origin,minutes_late,scheduled
N14228,EWR,2,2013-01-01T05:15:00Z
N24211,LGA,4,2013-01-01T05:29:00Z
N14228,EWR,101,2013-01-02T05:15:00Z
N619AA,JFK,75,2013-01-01T05:40:00Z
"""


def blocks(page: Path) -> str:
    """The Python of a page, each line where it is in the page, so that an error names it."""
    lines = []
    inside = False
    for line in page.read_text().splitlines():
        begins, ends = line == "```python", inside and line == "```"
        lines.append(line if inside and not ends else "")
        inside = begins or (inside and not ends)
    return "\n".join(lines)


def run(python: str, folder: Path, servers: str) -> str:
    """Run it as a program of its own, in ``folder``; what it prints."""
    (folder / "page.py").write_text(python)
    start = "import os, pathlib; servers = os.environ['KES_BOOTSTRAP_SERVERS']; "
    start += "exec(compile(pathlib.Path('page.py').read_text(), 'page.py', 'exec'))"
    ended = subprocess.run(
        [sys.executable, "-c", start],
        cwd=folder,
        env={**os.environ, "KES_BOOTSTRAP_SERVERS": servers, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended.stdout


@pytest.fixture
def servers() -> Iterator[str]:
    with KafkaBroker() as broker:  # the topics of the pages have plain names
        yield broker.bootstrap_servers


def runs(test: Callable[..., None]) -> Callable[..., None]:
    for mark in ("spark", "broker", "slow", "nightly"):
        test = getattr(pytest.mark, mark)(test)
    return pytest.mark.timeout(600)(test)


@runs
def test_the_python_of_the_guide_runs(servers: str, tmp_path: Path) -> None:
    (tmp_path / "flights.csv").write_text(FLIGHTS)
    create_topics(servers, {"flights": 4, "late-flights": 4, "flights-archive": 4})
    shown = run(blocks(GUIDES / "spark.md"), tmp_path, servers)
    assert "True 4" in shown
    assert re.search(r"\|\s+N14228\|\s+101\|", shown), shown


@runs
def test_the_spark_part_of_the_readme_runs(servers: str, tmp_path: Path) -> None:
    create_topics(servers, {"bank-events": 10, "bank-large-deposits": 10})
    paid = bank_feed.pay_in(servers, 50, seed=1)
    part = re.search(r"^## The same events on Spark\n(.*?)^## ", (ROOT / "README.md").read_text(), re.M | re.S)
    assert part is not None
    assert "--output bank-large-deposits:10`" in part[1], "the topic is made by who follows the page"
    assert '"cents >= 250"' in part[1], "below what the README has sent, so that something is shown"
    (tmp_path / "part.md").write_text(part[1].replace("cents >= 250", "cents >= 0"))
    shown = run(blocks(tmp_path / "part.md"), tmp_path, servers)
    assert "sum(cents)" in shown
    assert any(re.search(rf"{account}\|\s+{cents}\|", shown) for account, cents in paid.items()), shown


@runs
def test_the_python_of_the_guide_of_replays_runs(servers: str, tmp_path: Path) -> None:
    """Beside a bank that was at work."""
    create_topics(servers, {"bank-events": 10, "bank-balances": 10})
    bank_feed.pay_in(servers, deposits := 2_000, seed=1)
    config = msgspec.structs.replace(bank.source.config, bootstrap_servers=servers)
    source = EventSource(config, bank.source._declared.store_factory)
    source.register_event_type(bank.Deposited, bank.on_deposited)

    async def handle_all() -> None:
        async with Running(source) as running:
            await running.until_committed(deposits)

    asyncio.run(handle_all())
    shown = run(blocks(GUIDES / "spark-replay.md"), tmp_path, servers)
    assert "the stores of production are those of its history: True" in shown
    assert (
        f"production is what its own handlers give: Comparison(same={deposits}, missing=0, extra=0, different=0)"
        in shown
    )
    assert "with the bonus: Comparison(" in shown
    assert shown.rstrip().splitlines()[-1].startswith("True ")


def test_every_option_is_in_the_guide() -> None:
    """And no other."""
    page = (GUIDES / "spark.md").read_text()
    known = {
        *options.READ_BATCH, *options.READ_STREAM, *options.WRITE_BATCH, *options.WRITE_STREAM,
        options._PREFIX, options._CALLBACK,
    } - {*options._OF_SPARK}  # fmt: skip
    assert sorted(name for name in known - {"runId"} if not re.search(rf"`{name}\b", page)) == []
    tables = re.findall(r"^\| option \|.*?\n\n", page, re.M | re.S)
    assert len(tables) >= 2
    named = {
        name
        for table in tables
        for row in table.splitlines()[2:]
        for name in re.findall(r"`(\w+)`", row.split(" | ")[0])
    }
    assert sorted(named - known) == []


def test_every_public_name_resolves_and_is_in_the_reference() -> None:
    """Some are imported when they are first used: a module that has moved is not missed before."""
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    assert [name for name in kes_spark.__all__ if getattr(kes_spark, name).__name__ != name] == []
    assert [
        name for name in kes_spark.__all__ if not re.search(rf"auto\w+:: streams\.spark\.{name}$", page, re.M)
    ] == []


def test_every_recipe_is_on_the_page_of_recipes() -> None:
    page = (GUIDES / "spark-recipes.md").read_text()
    named = re.findall(r"^\| \[`(\w+)`\]", page, re.M)
    files = {path.stem for path in (ROOT / "examples" / "spark").glob("*.py")} - {"__init__", "common"}
    assert sorted(named) == sorted(files)
    assert [name for name in files if f"`examples/spark/{name}.py`" not in page] == []
