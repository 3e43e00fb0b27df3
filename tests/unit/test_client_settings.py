from __future__ import annotations

import logging
import re

import pytest
from confluent_kafka import Consumer, KafkaError, Producer

from streams.errors import ConfigError
from streams.kafka.connection import ConnectionLog
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import RESERVED, ClientSettings, build
from streams.kafka.wire.settings import ProducerSettings
from streams.settings.config import EventSourceConfig
from streams.settings.groups import TimeoutConfig

NOBODY = "127.0.0.1:1"


@pytest.mark.parametrize("key", sorted(RESERVED))
def test_a_reserved_key_is_refused_with_its_name_and_the_reason(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ClientSettings(NOBODY, {key: "x"})
    assert repr(key) in str(caught.value)
    assert RESERVED[key] in str(caught.value)


def test_the_settings_that_are_named_are_settings() -> None:
    named = re.findall(r"\b(\w+) setting\b", " ".join(RESERVED.values()))
    assert len(named) > 5
    known = {*EventSourceConfig.__struct_fields__, *TimeoutConfig.__struct_fields__}
    assert {name for name in named if name not in known} == set()


def test_overrides_win_everywhere_and_only_where_they_may() -> None:
    settings = ClientSettings(NOBODY, {"linger.ms": 77, "compression.type": "lz4", "fetch.wait.max.ms": 9})
    assert settings.plain_producer(5000).items() >= {"linger.ms": 77, "compression.type": "lz4"}.items()
    assert settings.consumer(partition_eof=True)["fetch.wait.max.ms"] == 9


def test_what_exactly_once_rests_on() -> None:
    settings = ClientSettings(NOBODY, group_id="g")
    producer = {"enable.idempotence": True, "partitioner": "murmur2_random"}
    assert settings.plain_producer(5000).items() >= producer.items()
    consumer = {
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "auto.offset.reset": "error",
        "group.id": "g",
    }
    assert settings.consumer(partition_eof=False).items() >= consumer.items()


def test_a_smaller_batch_takes_the_place_of_that_of_the_settings() -> None:
    settings = ClientSettings(NOBODY, {"batch.size": 500})
    assert settings.plain_producer(5000)["batch.size"] == 500
    assert settings.plain_producer(5000, batch_bytes=7)["batch.size"] == 7


def test_secrets_are_not_shown() -> None:
    names = ("sasl.password", "ssl.key.password", "ssl.key.pem", "sasl.oauthbearer.client.secret")
    secrets: dict[str, object] = dict.fromkeys((*names, "ssl.keystore.password"), "hunter2")
    shown = repr(ClientSettings(NOBODY, {**secrets, "sasl.username": "alice"}))
    assert ("hunter2" in shown, "alice" in shown, NOBODY in shown) == (False, True, True)
    with pytest.raises(ConfigError) as caught:
        build_producer({"security.protocol": "SSL", "ssl.key.pem": "hunter2"})
    assert "hunter2" not in str(caught.value)


def build_producer(overrides: dict[str, object]) -> None:
    build(Producer, ClientSettings(NOBODY, overrides).plain_producer(5000), ConnectionLog(NOBODY, "test"))


def test_librdkafka_takes_every_configuration() -> None:
    settings = ClientSettings(NOBODY, {"compression.type": "lz4"})
    log = ConnectionLog(NOBODY, "test")
    build(Producer, settings.plain_producer(1_000, batch_bytes=1), log)
    build(Consumer, settings.consumer(partition_eof=True), log).close()


@pytest.mark.parametrize(
    ("overrides", "named"), [({"no.such.key": 1}, "no.such.key"), ({"batch.size": "soon"}, "batch.size")]
)
def test_what_librdkafka_refuses_is_named(overrides: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build_producer(overrides)
    with pytest.raises(ConfigError, match=named):
        TopicAdmin(ClientSettings(NOBODY, overrides))


def test_what_librdkafka_takes_is_taken_also_where_it_makes_no_client() -> None:
    callbacks = {"stats_cb": print, "oauth_cb": print, "throttle_cb": print}
    of_consumers = {"fetch.wait.max.ms": 9, "queued.min.messages": "7"}
    TopicAdmin(ClientSettings(NOBODY, {"compression.type": "lz4", "socket.keepalive.enable": True, **of_consumers}))
    ClientSettings(NOBODY, {**callbacks, "statistics.interval.ms": 20}).check()
    with pytest.raises(ConfigError) as caught:
        ClientSettings(NOBODY, {"ssl.key.pem": "x", "sasl.kerberos.min.time.before.relogin": "hunter2"}).check()
    assert "hunter2" not in str(caught.value)


def test_addresses() -> None:
    assert ClientSettings(" a:1 , b:2,").bootstrap_servers == "a:1,b:2"
    with pytest.raises(ConfigError, match="bootstrap_servers is empty"):
        ClientSettings(" , ")
    with pytest.raises(ConfigError, match="credentials") as caught:
        ClientSettings("me:hunter2@host:9092")
    assert "hunter2" not in str(caught.value)


def test_an_outage_is_told_once_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = ConnectionLog("a:1,b:2", "slot 0")

    def levels() -> list[int]:
        return [record.levelno for record in caplog.records if record.getMessage().startswith("slot 0: ")]

    log.on_error(KafkaError(KafkaError._TRANSPORT, "a:1: Disconnected"))
    assert (log.down, levels()) == (False, []), "one lost connection of many is no outage"
    for _ in range(3):
        log.on_error(KafkaError(KafkaError._TRANSPORT, "a:1: Connection refused"))
        log.on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN, "2/2 brokers are down"))
    assert (log.down, levels()) == (True, [logging.WARNING])
    assert "a:1,b:2" in caplog.text
    assert "Connection refused" in caplog.text
    log.on_answer()
    log.on_answer()
    assert levels() == [logging.WARNING, logging.INFO]
    log.on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN, "2/2 brokers are down"))
    assert levels()[2:] == [logging.WARNING]


def test_librdkafkas_log_never_cries_wolf(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    log = ConnectionLog("a:1", "slot 0")
    for said, facility, text, level in (
        (logging.ERROR, "FAIL", "Connect failed", logging.DEBUG),
        (logging.CRITICAL, "FATAL", "fenced", logging.WARNING),
        (logging.INFO, "TXNERR", "100 % sure", logging.INFO),
        (logging.WARNING, "GETPID", "Coordinator load in progress: retrying", logging.DEBUG),
    ):
        log.log(said, "%s [%s] %s", facility, "rdkafka#1", text)
        last = [record for record in caplog.records if record.getMessage().startswith("slot 0: ")][-1]
        assert (last.levelno, last.getMessage()) == (level, f"slot 0: {facility} {text}")


def test_the_settings_of_transactions_show_no_secrets() -> None:
    login = {"security.protocol": "sasl_plaintext", "sasl.mechanism": "PLAIN", "sasl.username": "alice"}
    settings = ProducerSettings.of("b:1", "client", {**login, "sasl.password": "correct-horse"})
    assert "correct-horse" not in f"{settings!r} {settings} {[settings]}"
    assert "PLAIN" in repr(settings)
