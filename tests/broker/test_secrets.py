"""Secrets are planted wherever settings come from, everything that can fail does, and none of them shows anywhere."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from streams import EventProducer
from streams.broker import KafkaBroker
from streams.broker.probe import free_port
from tests.broker.battery_kit import wait_until
from tests.broker.kes_kit import Kes, KesRun
from tests.unit.cli_run_kit import get
from tests.vocabulary import Paid

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]

PLANTED = {
    name: f"planted-{name}-{number:04d}"
    for number, name in enumerate(
        ["password", "wrong", "jaas", "client", "token", "key", "url", "database", "scraper"], 4711
    )
}
"""One for each kind and place, so that one that shows names where it came from."""

SHOP = """
import logging
from streams import DEAD_LETTER, EventSource, EventSourceConfig, Table
from tests.broker.test_secrets import PLANTED, Paid

def made(**settings):
    source = EventSource(
        EventSourceConfig(group_id="shop", topic="paid", num_partitions=2, error_policy=DEAD_LETTER, **settings),
        Table.factory(key=str, value=int),
    )

    @source.register_event_type(Paid)
    def on_paid(ctx, event):
        logging.getLogger("shop").debug("settings: %r", source.config)
        if event.cents < 0:
            raise ValueError(f"less than nothing, with {{source.config!r}} of {{source!r}}")
        ctx.store.put(event.name, event.cents)

    return source

source = made()  # its password is in kes.toml, that of a key in the environment

def wrong():
    return made(client_settings={{"sasl.password": PLANTED["wrong"]}})

def jaas():
    return made(client_settings={{"sasl.jaas.config": "PlainLoginModule required password=" + PLANTED["jaas"]}})

def client():
    return made(client_settings={{"sasl.oauthbearer.client.secret": PLANTED["client"]}})

def token():
    def give(_config):
        raise RuntimeError(PLANTED["token"])
    return made(client_settings={{"sasl.mechanism": "OAUTHBEARER", "oauth_cb": give}})

def url():
    return made(bootstrap_servers="me:" + PLANTED["url"] + "@{address}")

def crash():
    source = made()
    class Crash:
        def run(self):
            raise RuntimeError(f"with {{source.config!r}}")
    return Crash()
"""


@pytest.fixture(scope="module")
def secure() -> Iterator[KafkaBroker]:
    with KafkaBroker(tls=True, sasl="PLAIN", users={"alice": PLANTED["password"]}) as broker:
        yield broker


class Shop:
    """A folder with a source and a settings file, its environment, and all that is ever said, by place."""

    def __init__(self, broker: KafkaBroker, folder: Path) -> None:
        self.broker, self.folder = broker, folder
        self.said: dict[str, str] = {}
        settings = broker.client_settings("alice")
        assert settings["sasl.password"] == PLANTED["password"]
        lines = [f'"{name}" = "{value}"' for name, value in settings.items()]
        (folder / "kes.toml").write_text("\n".join(["[client_settings]", *lines]))
        (folder / "shop.py").write_text(SHOP.format(address=broker.bootstrap_servers))
        self.environment = {
            "KES_BOOTSTRAP_SERVERS": broker.bootstrap_servers,
            "KES_CLIENT_SETTINGS_SSL_KEY_PASSWORD": PLANTED["key"],
            "KES_OUTBOX_DATABASE": f"postgresql://me:{PLANTED['database']}@127.0.0.1:1/shop",
            "KES_DEBUG": "1",  # stack traces of everything
        }
        self.kes = Kes(broker.bootstrap_servers, folder)
        self.kes.environment |= self.environment

    def runs(self, *words: str, code: int) -> str:
        """Run a command that ends with this code; return what it said on both streams."""
        found, out, err = self.kes(*words)
        self.said[f"kes {' '.join(words)}"] = out + err
        assert found == code, (words, out, err)
        return out + err

    def look_at_processes(self, when: str) -> int:
        """Note the command lines of all processes that this one has begun, however far down; return their number."""
        processes = psutil.Process().children(recursive=True)
        for process in processes:
            with suppress(psutil.NoSuchProcess), process.oneshot():  # a zombie has none
                self.said[f"/proc/{process.pid}/cmdline, {when}"] = " ".join(process.cmdline())
        return len(processes)

    def shows_none(self) -> None:
        """Search all of it, and what was left in the folder, except for the files in which secrets are planted."""
        files = [path for path in self.folder.rglob("*") if path.is_file() and path.name not in ("kes.toml", "shop.py")]
        left = {str(path): path.read_bytes().decode(errors="replace") for path in files}
        texts = {**self.said, **left}
        assert [(place, name) for place, text in texts.items() for name, one in PLANTED.items() if one in text] == []


@pytest.fixture
def shop(secure: KafkaBroker, tmp_path: Path) -> Shop:
    return Shop(secure, tmp_path)


def scrape(port: int) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics?token={PLANTED['scraper']}")
    request.add_header("Authorization", f"Bearer {PLANTED['scraper']}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=20) as answer:
        return str(answer.headers) + answer.read().decode()


@pytest.mark.slow
def test_planted_secrets_are_found_nowhere(shop: Shop) -> None:
    broker, said = shop.broker, shop.said
    shop.runs("topics", "apply", "shop:source", code=0)
    port = free_port()
    options = ["--metrics", f"127.0.0.1:{port}", "--log-level", "debug"]
    running = KesRun("shop:source", 2, shop.folder / "kes.log", shop.folder, shop.environment, options)
    try:
        wait_until(lambda: get(port, "/ready")[0] == 200, f"ready; see {running.log}")
        with EventProducer(broker.plain_bootstrap_servers) as producer:
            for number in range(20):
                producer.send_soon("paid", Paid(f"{number}", -1 if number % 2 else number), key=f"{number}")
        wait_until(lambda: "kes_failed_events_total{" in get(port, "/metrics")[1], "the metrics say so")
        wait_until(lambda: get(port, "/ready?max_lag=0")[0] == 200, "all is handled")
        said["the metrics"] = scrape(port)
        assert shop.look_at_processes("of a run") >= 4, "the broker, its guardian, the supervisor, workers"
        shop.runs("doctor", "shop:source", "--json", code=0)
        running.signal(0)
        wait_until(lambda: len(running.said("started")) == 3, "it is started again")
    finally:
        running.stop()
        running.close()
    said["its log"], said["its lines"] = running.log.read_text(), json.dumps(running.lines)
    assert "DEBUG" in said["its log"]
    assert "settings: EventSourceConfig(" in said["its log"]
    assert "ValueError: less than nothing, with EventSourceConfig(" in said["its log"]

    shown = shop.runs("config", "shop:source", "--all", code=0)
    assert shown.count("***") == 2, "the ones of the environment and of the file"
    letters = shop.runs("dlq", "show", "shop:source", "--json", code=0)
    assert "less than nothing, with EventSourceConfig(" in letters
    said["the broker's log"] = (broker.data_dir / "kafka.log").read_text() if broker.data_dir else ""
    assert sum(map(len, said.values())) > 20_000, "a lot is said"
    shop.shows_none()


@pytest.mark.nightly
def test_commands_and_workers_that_are_refused_show_none(shop: Shop) -> None:
    """Each secret as a command meets it, and as a worker does; with stack traces."""
    shop.runs("topics", "apply", "shop:source", code=0)
    for name, why in REFUSED.items():
        options = ["--log-level", "debug", "--max-crashes", "0"]
        assert why in shop.runs("run", f"shop:{name}", *options, code=70 if name == "crash" else 1)
        shop.runs("doctor", f"shop:{name}", "--json", code=1)
        shop.runs("config", f"shop:{name}", "--json", code=0 if name in ("wrong", "jaas", "client") else 1)
    shop.runs("lag", "shop:token", "--timeout", "3", code=1)
    shop.runs("outbox", "status", code=1)
    for words in (["doctor", "shop:source"], ["config", "shop:source", "--json"], ["config"], ["lag", "shop:source"]):
        shop.runs(*words, code=0)
    shop.runs("tail", "shop:source", "--headers", code=0)
    shop.runs("tail", "shop.paid.dead-letters", "--headers", "--json", code=0)
    shop.runs("state", "scan", "shop:source", "--json", code=0)
    shop.shows_none()


REFUSED = {
    "wrong": "refuses the credentials",
    "jaas": "sasl.jaas.config",
    "client": "sasl.oauthbearer.client.secret",
    "url": "bootstrap_servers must not hold credentials",
    "crash": "RuntimeError: with EventSourceConfig(",
}
