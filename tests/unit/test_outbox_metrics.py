"""Metrics and probes of a relay: counted events, and what waits in the shards that it owns."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client import generate_latest

from streams import Outbox, Record, RelayConfig
from streams.errors import ConfigError, OutboxError
from streams.observability import RelayMetrics
from streams.observability import relay_metrics as module
from streams.observability.relay_metrics import OF_RELAYS, Kind
from streams.outbox.relay import Relay
from streams.outbox.sessions import open_session
from streams.outbox.shard import BatchRelayed, RowParked, ShardAcquired, ShardInterrupted, ShardReleased

GUIDE = Path(__file__).resolve().parents[2] / "docs/guides/outbox.md"


@pytest.fixture
def relay(tmp_path: Path) -> Relay:
    address = f"sqlite:{tmp_path / 'shop.db'}"
    with open_session(address, "kes_outbox") as session:
        session.apply(2)
    return Relay(RelayConfig(name="shop", database=address, bootstrap_servers="nowhere:1"))


def shown(metrics: RelayMetrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line.startswith("kes_"))}


def test_events_are_counted_and_the_rows_of_own_shards_are_shown(relay: Relay, tmp_path: Path) -> None:
    metrics = RelayMetrics(relay)
    with sqlite3.connect(tmp_path / "shop.db") as db:
        for number in range(20):
            Outbox().stash_many(db, [Record("notes", b"x", b"%d" % number)])
    db.close()
    relay._notify(ShardAcquired(0, 0))
    begun = shown(metrics)
    assert begun['kes_outbox_rows_total{group="shop.outbox",shard="0"}'] == 0.0  # the first row is an increase
    assert begun['kes_outbox_waiting_rows{group="shop.outbox",shard="0"}'] > 0
    assert 'kes_outbox_waiting_rows{group="shop.outbox",shard="1"}' not in begun  # of another relay
    for event in (BatchRelayed(0, 5, 1), BatchRelayed(0, 7, 2), RowParked(0, 3, "notes", "no"), ShardAcquired(1, 0)):
        relay._notify(event)
    assert shown(metrics)['kes_outbox_shards{group="shop.outbox"}'] == 2.0
    relay._notify(ShardInterrupted(0, "fenced"))
    relay._notify(ShardReleased(1, "stopped"))
    found = shown(metrics)
    assert found['kes_outbox_rows_total{group="shop.outbox",shard="0"}'] == 12.0
    assert found['kes_outbox_batches_total{group="shop.outbox",shard="0"}'] == 2.0
    assert found['kes_outbox_refusals_total{group="shop.outbox",shard="0"}'] == 1.0
    assert found['kes_outbox_interruptions_total{group="shop.outbox",shard="0"}'] == 1.0
    assert found['kes_outbox_shards{group="shop.outbox"}'] == 0.0
    assert found['kes_outbox_database_up{group="shop.outbox"}'] == 1.0


@pytest.mark.parametrize("error", [None, OutboxError("of another version"), ConfigError("no such address"), OSError()])
def test_a_scrape_without_a_database_says_so_and_keeps_the_counters(
    relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    metrics = RelayMetrics(relay)
    relay._notify(ShardAcquired(0, 0))
    if error is None:
        (tmp_path / "shop.db").write_bytes(b"no database")
    else:

        def fails(*_: object) -> None:
            assert error is not None
            raise error

        monkeypatch.setattr(module, "open_session", fails)
    found = shown(metrics)
    assert found['kes_outbox_database_up{group="shop.outbox"}'] == 0.0
    assert found['kes_outbox_batches_total{group="shop.outbox",shard="0"}'] == 0.0
    assert not [name for name in found if name.startswith("kes_outbox_waiting")]


def test_probes_say_whether_it_is_in_its_group_and_goes_on(relay: Relay) -> None:
    with RelayMetrics(relay).serve("127.0.0.1:0") as server:
        address = f"http://127.0.0.1:{server.port}"
        assert urlopen(f"{address}/live").status == 200
        assert b"kes_outbox_shards" in urlopen(f"{address}/metrics").read()
        with pytest.raises(HTTPError) as refused:
            urlopen(f"{address}/ready")
        assert b"not in the group" in refused.value.read()
        relay.stop()
        with pytest.raises(HTTPError):
            urlopen(f"{address}/live")


def test_the_guide_names_them_all() -> None:
    names = [f"{one.name}_total" if one.kind is Kind.COUNTER else one.name for one in OF_RELAYS]
    page = GUIDE.read_text()
    assert [name for name in names if f"`{name}`" not in page] == []
