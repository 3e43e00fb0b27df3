"""``kes run --metrics`` on a real broker: what is scraped while two workers handle events, and no secret shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from streams import EventProducer
from streams.broker.probe import free_port
from streams.testing.fixtures import BrokerAddress
from tests.broker.battery_kit import wait_until
from tests.broker.kes_kit import KesRun
from tests.unit.test_cli_run_metrics import by_worker, get
from tests.vocabulary import Paid

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

SECRET = "correct-horse-battery-staple"
SOURCE = """
import logging, msgspec, time
from streams import AsyncJobScheduler, DEAD_LETTER, EventSource, EventSourceConfig, Table, event_type
from tests.broker.test_metrics import Paid

source = EventSource(
    EventSourceConfig(
        group_id="{prefix}shop", topic="{prefix}paid", num_partitions=2, error_policy=DEAD_LETTER,
        client_settings={{"sasl.password": "{secret}", "ssl.key.password": "{secret}"}},
    ),
    Table.factory(key=str, value=int),
)

@source.register_event_type(Paid)
def on_paid(ctx, event):
    if event.cents < 0:
        raise ValueError("less than nothing")
    logging.getLogger("shop").debug("paid: %d", event.cents)
    ctx.store.put(event.name, event.cents)
    ctx.schedule_at(time.time() + 3600, event, name="remind")
"""


@pytest.fixture
def shop(kafka_broker: BrokerAddress, topic_prefix: str, tmp_path: Path) -> Iterator[tuple[KesRun, int]]:
    (tmp_path / "shop.py").write_text(SOURCE.format(prefix=topic_prefix, secret=SECRET))
    port = free_port()
    environment = {"KES_BOOTSTRAP_SERVERS": kafka_broker.bootstrap_servers}
    options = ["--metrics", f"127.0.0.1:{port}", "--log-level", "debug"]
    running = KesRun("shop:source", 2, tmp_path / "kes.log", tmp_path, environment, options)
    yield running, port
    running.close()


def test_two_workers_are_scraped_and_no_secret_shows(
    shop: tuple[KesRun, int], kafka_broker: BrokerAddress, topic_prefix: str
) -> None:
    running, port = shop

    def total(name: str) -> float:
        return sum(by_worker(port, name).values())

    wait_until(lambda: get(port, "/ready")[0] == 200, f"ready; see {running.log}")
    # The second worker may come after the first was ready alone.
    wait_until(lambda: total("kes_partitions") == 2, "both partitions are somewhere")
    with EventProducer(kafka_broker.bootstrap_servers) as producer:
        for number in range(100):
            producer.send_soon(
                f"{topic_prefix}paid", Paid(f"{number}", -1 if number % 10 == 0 else number), key=f"{number}"
            )
    wait_until(
        lambda: total("kes_partition_next_offset") == 100 and total("kes_unsettled_transactions") == 0, "all is done"
    )
    moves = by_worker(port, "kes_moves_total")  # a marker counts as an event, of the member that gives
    assert 100 <= total("kes_events_total") <= 100 + sum(moves.values())
    assert total("kes_failed_events_total") == 10
    assert total("kes_outputs_total") == 10, "the dead letters"
    assert total("kes_partition_timers") == 2
    aborted = Producer(
        {"bootstrap.servers": kafka_broker.bootstrap_servers, "transactional.id": f"{topic_prefix}aborted"}
    )
    aborted.init_transactions(30.0)
    aborted.begin_transaction()
    aborted.produce(f"{topic_prefix}paid", b"of no transaction", partition=0)
    aborted.flush(30.0)
    aborted.abort_transaction(30.0)  # the record and the marker of its end are behind all events
    wait_until(lambda: total("kes_partition_lag") == 2, "the ends are known")
    wait_until(lambda: total("kes_partition_lag") == 0, "nothing is left behind them")
    assert get(port, "/ready?max_lag=0")[0] == 200
    assert get(port, "/live") == (200, f"w-0: {topic_prefix}shop: live\nw-1: {topic_prefix}shop: live\n")
    text = get(port, "/metrics")[1]
    commands = [Path(f"/proc/{running.pid(f'w-{worker}')}/cmdline").read_bytes().decode() for worker in (0, 1)]
    assert running.stop() == 0
    log = running.log.read_text()
    joined = [line for line in log.splitlines() if " joined: " in line]
    assert len(joined) == 2
    assert f"joined: group {topic_prefix}shop as w-" in joined[0]
    assert f"topic {topic_prefix}paid, brokers {kafka_broker.bootstrap_servers}, partitions " in joined[0]
    assert "DEBUG   w-" in log
    assert "shop: paid: " in log
    assert "more lines like this" not in "".join(line for line in log.splitlines() if " shop: paid" in line)
    assert "ValueError: less than nothing" in log
    assert not [one for one in (log, text, *commands, *map(str, running.lines)) if SECRET in one]
