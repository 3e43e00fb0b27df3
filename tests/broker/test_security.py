"""Event sources on brokers with TLS and SASL: each way to come in, and what is wrong is named, without a secret."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from streams import EventSource
from streams.broker import KafkaBroker
from streams.broker.security import MECHANISMS, certify
from streams.errors import ConfigError, StreamsError
from tests.broker.engine_kit import PATIENCE, Lab, Running, start_failure, until
from tests.broker.gate import gate

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(120)]

SECRET = "no-one-should-see-this"
_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def tls() -> Iterator[KafkaBroker]:
    with KafkaBroker(tls=True) as broker:
        yield broker


@pytest.fixture(scope="module")
def mutual() -> Iterator[KafkaBroker]:
    with KafkaBroker(tls="mutual", users=["alice"]) as broker:
        yield broker


@pytest.fixture(scope="module")
def sasl() -> Iterator[KafkaBroker]:
    with KafkaBroker(tls=True, sasl=list(MECHANISMS), users={"alice": SECRET}) as broker:
        yield broker


def lab_at(broker: KafkaBroker) -> Lab:
    """Topics of one test; the administrator comes by the plain listener."""
    return Lab(broker.plain_bootstrap_servers, f"s{next(_NUMBERS)}-", 2)


STREAMS: dict[str, Any] = {}
BROKER = {"membership": "broker", "strategy": "cooperative-sticky"}
GATE = [("SCRAM-SHA-512", STREAMS, "streams"), ("mutual", BROKER, "broker")]
NIGHTLY = [
    (way, settings, name)
    for way in ("tls", "mutual", *MECHANISMS)
    for name, settings in (("streams", STREAMS), ("broker", BROKER))
    if (way, settings, name) not in GATE
]
CASES = [
    *(pytest.param(way, settings, id=f"{way}-{name}") for way, settings, name in GATE),
    *(pytest.param(way, settings, id=f"{way}-{name}", marks=pytest.mark.nightly) for way, settings, name in NIGHTLY),
]


@pytest.mark.parametrize(("way", "membership"), CASES)
async def test_join_transact_restore_and_move(
    request: pytest.FixtureRequest, way: str, membership: dict[str, Any]
) -> None:
    broker: KafkaBroker = request.getfixturevalue(way if way in ("tls", "mutual") else "sasl")
    mechanism, user = (way if way in MECHANISMS else ""), ("admin" if way == "tls" else "alice")
    lab = lab_at(broker)
    await lab.create()
    settings = {
        "bootstrap_servers": broker.bootstrap_servers,
        "client_settings": broker.client_settings(user, mechanism),
        **membership,
    }
    await lab.add("a", "b")
    await lab.add("c", partition=1)
    async with Running(lab.telling(**settings)) as first:
        await first.until_handled(2, 1)
    async with Running(lab.telling(**settings)) as second:  # which restores
        await lab.add("a")
        await second.until_handled(3, 1)
        async with Running(lab.telling(**settings), active=0) as third:
            await until(lambda: second.active == third.active == 1, "the partitions are shared")
            await lab.add("c", partition=1)
            await lab.until_outputs(5)
    assert sorted(await lab.totals()) == [("a", 1), ("a", 2), ("b", 1), ("c", 1), ("c", 2)]


async def failure(broker: KafkaBroker, **settings: Any) -> StreamsError:
    """Start a source with these settings; the error that it stops with says nothing secret."""
    lab = lab_at(broker)
    source = lab.source(bootstrap_servers=broker.bootstrap_servers, client_settings=settings)
    error = await asyncio.wait_for(start_failure(source), 60)
    assert isinstance(error, StreamsError), error
    for secret in (SECRET, "a-wrong-one"):
        assert secret not in str(error)
    return error


@pytest.mark.parametrize("mechanism", ["PLAIN", pytest.param("SCRAM-SHA-256", marks=pytest.mark.nightly)])
async def test_a_wrong_password(sasl: KafkaBroker, mechanism: str) -> None:
    settings = {**sasl.client_settings("alice", mechanism), "sasl.password": "a-wrong-one"}
    error = await failure(sasl, **settings)
    assert isinstance(error, ConfigError)
    assert "refuses the credentials" in str(error)
    assert "check " in str(error)


async def test_a_certificate_that_is_missing(mutual: KafkaBroker) -> None:
    settings = {
        name: value
        for name, value in mutual.client_settings("alice").items()
        if name not in ("ssl.certificate.location", "ssl.key.location")
    }
    print(error := await failure(mutual, **settings))
    assert "certificate" in str(error)


async def waits(source: EventSource[Any], caplog: pytest.LogCaptureFixture) -> None:
    """The source cannot know that this is no broker that is being started, so it goes on waiting, and says why."""
    task = asyncio.create_task(source.consume_events())
    try:
        await until(lambda: "check the address, security.protocol (with TLS or not?)" in caplog.text, "it is said")
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE)


@pytest.mark.nightly
async def test_tls_to_a_listener_that_speaks_plain(tls: KafkaBroker, caplog: pytest.LogCaptureFixture) -> None:
    source = lab_at(tls).source(client_settings=tls.client_settings())  # at the plain listener
    await waits(source, caplog)


@pytest.mark.nightly
async def test_plain_to_a_listener_that_speaks_tls(tls: KafkaBroker, caplog: pytest.LogCaptureFixture) -> None:
    await waits(lab_at(tls).source(bootstrap_servers=tls.bootstrap_servers), caplog)


NOW = datetime.now(UTC)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "expired": ({"not_before": NOW - timedelta(days=2), "not_after": NOW - timedelta(days=1)}, "expired"),
    "of another host": ({"hosts": ["elsewhere.example"]}, "host"),
}


@pytest.fixture(scope="module")
def fake() -> Iterator[KafkaBroker]:
    """Its certificates are replaced."""
    with KafkaBroker(tls=True) as broker:
        yield broker


@pytest.mark.parametrize("what", gate(BAD, "expired"))
async def test_a_certificate_that_is_bad(fake: KafkaBroker, what: str) -> None:
    how, said = BAD[what]
    assert fake.security_dir is not None
    certify(fake.security_dir, **how)
    await asyncio.to_thread(fake.restart)
    print(error := await failure(fake, **fake.client_settings()))
    assert said in str(error)
    assert "ssl.ca.location" in str(error)
