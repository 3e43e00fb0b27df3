"""The wire producer on real brokers: each way to authenticate, transactions v1 and v2, three brokers."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

from streams.broker import KafkaBroker, KafkaCluster, kafka_broker
from streams.broker.probe import HOST, free_port
from streams.clients.admin import TopicAdmin
from streams.clients.group_wire import group_metadata
from streams.clients.producing.broker_connection import connect
from streams.clients.producing.cluster import Cluster
from streams.clients.producing.encoded_transaction import EncodedTransaction
from streams.clients.producing.messages import ADD_OFFSETS, END, PRODUCE, code_of, partition_codes, refused
from streams.clients.producing.settings import ProducerSettings
from streams.clients.producing.transactions import WireSlot
from streams.clients.reader import PartitionReader
from streams.clients.settings import ClientSettings
from streams.errors import TransactionFailed
from streams.group import Snapshot
from streams.records import IncomingRecord, Output
from streams.testing.fixtures import BrokerAddress
from streams.topics import TopicSpec

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

ANYBODY = Snapshot(1, -1, "", b"CGMDv2:\xff\xff\xff\xffgroup\0\0\1")
"""The metadata of no member: the broker takes offsets under it, and does not fence them."""
NOBODY = Snapshot(1, 5, "nobody", group_metadata("group", 5, "nobody", None))
SESSION_MS = 2_000


@asynccontextmanager
async def slot_at(
    address: str,
    name: str,
    settings: dict[str, Any] | None = None,
    topic: str = "",
    transaction_seconds: float = 30,
) -> AsyncIterator[WireSlot]:
    cluster = Cluster(ProducerSettings.of(address, "client", settings or {}))
    slot = WireSlot(name, cluster, "group", call_timeout_seconds=20, transaction_timeout_seconds=transaction_seconds)
    try:
        await slot.reopen([topic])
        yield slot
    finally:
        sockets = [connection._transport.get_extra_info("socket") for connection in slot._connections.values()]
        slot.abandon()
        while any(sock.fileno() >= 0 for sock in sockets):
            await asyncio.sleep(0)


async def encoded(slot: WireSlot, topic: str, first: int, count: int = 20) -> EncodedTransaction:
    records = EncodedTransaction(slot._cluster, 20)
    await records.complete(
        [Output(topic, b"%d" % n, b"k%d" % (n % 7), [("h", b"x")], -1, 0, 0, n) for n in range(first, first + count)]
    )
    return records


async def send(slot: WireSlot, topic: str, first: int, *, source: str = "") -> None:
    """Begin a transaction with records and offsets, all acknowledged."""
    await slot.flush(await encoded(slot, topic, first), source or topic, {0: first + 20}, lambda: ANYBODY)


async def transact(slot: WireSlot, topic: str, first: int, *, commit: bool = True, source: str = "") -> None:
    await send(slot, topic, first, source=source)
    if commit:
        await slot.commit(lambda: None)
    else:
        await slot.abort()
        if not slot.is_open:
            await slot.reopen([topic])


def committed(settings: ClientSettings, topic: str) -> list[int]:
    admin, seen = TopicAdmin(settings), list[IncomingRecord]()
    reader = PartitionReader(settings)
    ranges = {number: (marks.start, marks.end) for number, marks in admin.watermarks(topic).items()}
    reader.read(
        topic, ranges, lambda _, records: seen.extend(records), stalled_after_seconds=30, cancelled=lambda: False
    )
    reader.close()
    admin.close()
    return sorted(int(record.value or b"-1") for record in seen)


def create(settings: ClientSettings, spec: TopicSpec) -> None:
    admin = TopicAdmin(settings)
    admin.create([spec])
    admin.committed("group", spec.name)  # so that the group has a coordinator
    admin.close()


@pytest.fixture
def topic(kafka_broker: BrokerAddress, topic_prefix: str) -> str:
    name = topic_prefix + "t"
    create(ClientSettings(kafka_broker.bootstrap_servers), TopicSpec(name=name, partitions=3, replication_factor=1))
    return name


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_what_is_committed_is_there_and_what_is_aborted_is_not(
    kafka_broker: BrokerAddress, topic: str, codec: str
) -> None:
    address = kafka_broker.bootstrap_servers
    async with slot_at(address, topic + ".id", {"compression.type": codec}, topic) as slot:
        for number in range(6):
            await transact(slot, topic, number * 20, commit=number % 3 != 1)
        async with slot_at(address, topic + ".id", topic=topic) as second:
            with pytest.raises(TransactionFailed) as failed:
                await transact(slot, topic, 900)
            assert failed.value.kind == "fenced"
            await transact(second, topic, 120)
            with pytest.raises(TransactionFailed, match="UNKNOWN_MEMBER_ID") as failed:
                await second.flush(await encoded(second, topic, 200), topic, {0: 220}, lambda: NOBODY)
            assert failed.value.kind == "lost"
            await second.abort()
    wanted = [n for number in (0, 2, 3, 5, 6) for n in range(number * 20, number * 20 + 20)]
    assert committed(ClientSettings(address), topic) == wanted
    assert TopicAdmin(ClientSettings(address)).committed("group", topic) == {0: 140}


@pytest.mark.nightly
async def test_an_identity_whose_epochs_are_used_up(kafka_broker: BrokerAddress, topic: str) -> None:
    """After 32,766 ends the broker gives another producer id."""
    async with slot_at(kafka_broker.bootstrap_servers, topic + ".id", topic=topic) as slot:
        first = slot._who.producer_id
        while slot._who.producer_id == first:
            slot._has_begun = True
            await slot.abort()
        await transact(slot, topic, 0)
    assert committed(ClientSettings(kafka_broker.bootstrap_servers), topic) == list(range(20))


@pytest.fixture(scope="module")
def leveled_broker() -> Iterator[KafkaBroker]:
    """A broker whose ``transaction.version`` changes; it looks for transactions that are out of time all the time."""
    with KafkaBroker(properties={"transaction.abort.timed.out.transaction.cleanup.interval.ms": "100"}) as broker:
        yield broker


@pytest.fixture(params=[1, 2])
def either(request: pytest.FixtureRequest, leveled_broker: KafkaBroker, topic_prefix: str) -> tuple[str, str]:
    """The address of a broker at this ``transaction.version``, and a topic. A cluster that was upgraded and is not yet
    finalized has version 1."""
    address, topic = leveled_broker.bootstrap_servers, topic_prefix + "t"
    asyncio.run(set_transaction_version(address, request.param))
    create(ClientSettings(address), TopicSpec(name=topic, partitions=3, replication_factor=1))
    return address, topic


async def test_requests_that_come_late_or_twice_do_nothing(either: tuple[str, str]) -> None:
    """All requests of a transaction are sent again in the middle of the next one. Under v1 the slot was opened in
    between, as it is whenever an answer did not come."""
    address, topic = either
    sent: list[tuple[int, int, Sequence[bytes]]] = []
    async with slot_at(address, topic + ".id", topic=topic) as slot:
        (connection,) = slot._connections.values()
        call = connection.call
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection, "call", lambda *request: sent.append(request) or call(*request))
            await transact(slot, topic, 0)
        if not slot._protocol.bumps_epoch:
            await slot.reopen([topic])
        await send(slot, topic, 20)
        late = await connect(HOST, int(address.rpartition(":")[2]), "late", {})
        refusals = {}
        for key, version, parts in sent:
            frame = await late.call(key, version, parts)
            read = {PRODUCE: partial(refused, asked=()), ADD_OFFSETS: code_of, END: code_of}
            refusals[key] = bool(read.get(key, partial(partition_codes, asked=()))(frame))
        late.close()
        await slot.commit(lambda: None)
    assert len(refusals) >= 3
    assert all(refusals.values()), refusals
    settings = ClientSettings(address)
    assert committed(settings, topic) == list(range(40))
    assert TopicAdmin(settings).committed("group", topic) == {0: 40}


async def test_a_transaction_that_the_broker_has_timed_out(either: tuple[str, str]) -> None:
    address, topic = either
    settings = ClientSettings(address)
    async with slot_at(address, topic + ".id", topic=topic, transaction_seconds=1) as slot:
        await send(slot, topic, 0)
        assert await asyncio.to_thread(committed, settings, topic) == []  # waits for its end
        with pytest.raises(TransactionFailed) as failed:
            await slot.commit(lambda: None)
        # Under v2 the epoch before is known to be that of a transaction that ended otherwise: the changelog says how.
        if slot._protocol.bumps_epoch:
            assert (failed.value.kind, failed.value.code) == ("unknown", "INVALID_TXN_STATE")
        else:
            assert failed.value.kind == "fenced"
            assert "the broker timed the transaction out" in str(failed.value)
        await slot.reopen([topic])
        await transact(slot, topic, 20)
    assert committed(settings, topic) == list(range(20, 40))


@pytest.mark.parametrize("is_sent", [False, True])
async def test_a_topic_that_is_deleted_in_mid_transaction(either: tuple[str, str], is_sent: bool) -> None:
    address, topic = either
    settings, admin = ClientSettings(address), AdminClient({"bootstrap.servers": address})
    spec = TopicSpec(name=topic + ".out", partitions=3, replication_factor=1)
    create(settings, spec)
    async with slot_at(address, topic + ".id", topic=spec.name) as slot:
        records = await encoded(slot, spec.name, 0)
        if is_sent:
            await slot.flush(records, topic, {0: 1}, lambda: ANYBODY)
        admin.delete_topics([spec.name])[spec.name].result(20)
        if is_sent:
            await slot.commit(lambda: None)
        else:
            with pytest.raises(TransactionFailed, match=rf"{spec.name}.*create the topic") as failed:
                await slot.flush(records, topic, {0: 1}, lambda: ANYBODY)
            assert failed.value.kind == "blocked"
            await slot.reopen([topic])
        create(settings, spec)
        await transact(slot, spec.name, 20, source=topic)
    assert committed(settings, spec.name) == list(range(20, 40))


async def set_transaction_version(address: str, level: int) -> None:
    """Finalize this level, and wait until the broker says so."""
    request: Any = import_module("kafka.protocol.admin").UpdateFeaturesRequest
    update = request.FeatureUpdateKey(
        feature="transaction.version", max_version_level=level, upgrade_type=3 if level < 2 else 1
    )
    port, asked = int(address.rpartition(":")[2]), False
    while True:
        connection = await connect(HOST, port, "client", {})  # the answer to each new one has the levels
        if connection.features.get("transaction.version", 0) == level:
            return connection.close()
        if not asked:
            answer = await connection.ask(request(feature_updates=[update], timeout_ms=20_000), 1)
            assert not answer.error_code, answer
            asked = True
        connection.close()


@pytest.mark.parametrize("either", [1], indirect=True)
async def test_transactions_of_version_1_on_the_same_code(either: tuple[str, str]) -> None:
    address, topic = either
    async with slot_at(address, "id", topic=topic) as slot:
        assert not slot._protocol.bumps_epoch
        for number in range(6):
            await transact(slot, topic, number * 20, commit=number % 3 != 1)
        await set_transaction_version(address, 2)
        await transact(slot, topic, 120)
        slot.abandon()  # a level is learnt when a connection is made
        await slot.reopen([topic])
        assert slot._protocol.bumps_epoch
        await transact(slot, topic, 140)
        await set_transaction_version(address, 1)  # taken back
        await transact(slot, topic, 160, commit=False)
        await transact(slot, topic, 180)
    wanted = [n for number in (0, 2, 3, 5, 6, 7, 9) for n in range(number * 20, number * 20 + 20)]
    assert committed(ClientSettings(address), topic) == wanted


@pytest.mark.slow
async def test_one_of_three_brokers_dies_and_comes_back(topic_prefix: str) -> None:
    """Leaders and coordinators move while transactions go on; each is tried until it is known to be committed."""
    with KafkaCluster() as cluster:
        topic = topic_prefix + "t"
        settings = ClientSettings(cluster.bootstrap_servers)
        create(settings, TopicSpec(name=topic, partitions=6, replication_factor=3))
        async with slot_at(cluster.bootstrap_servers, "id", topic=topic) as slot:
            await transact(slot, topic, 0)
            victim = cluster.transaction_coordinator("id")
            steps = (cluster.node(victim).kill, cluster.node(victim).restart)
            first, committed_here, doubtful = 20, set(range(20)), set[int]()
            for step in steps:
                changing = asyncio.create_task(asyncio.to_thread(step))
                deadline = time.monotonic() + 60
                done = 0
                while not changing.done() or done < 10:
                    assert time.monotonic() < deadline, "transactions go on"
                    try:
                        await transact(slot, topic, first)
                        committed_here |= set(range(first, first + 20))
                        done += 1
                    except TransactionFailed as failure:
                        if failure.call == "commit_transaction":
                            doubtful |= set(range(first, first + 20))
                        await reopened(slot, topic, deadline)
                    first += 20
                await changing
        found = committed(settings, topic)
    assert len(found) == len(set(found)), "nothing is there twice"
    assert committed_here <= set(found) <= committed_here | doubtful


async def reopened(slot: WireSlot, topic: str, deadline: float) -> None:
    while True:
        try:
            return await slot.reopen([topic])
        except TransactionFailed:
            assert time.monotonic() < deadline, "the slot can be opened again"
            await asyncio.sleep(0.1)


# -- security ----------------------------------------------------------------------------------------------------------


def token(_: str) -> tuple[str, float]:
    """An unsigned token, which Kafka takes where no other validator is set."""
    now = time.time()
    claims = {"sub": "alice", "iat": now - 1, "exp": now + 3600}
    parts = [
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in ({"alg": "none"}, claims)
    ]
    return f"{parts[0]}.{parts[1]}.", now + 3600


def no_token(_: str) -> tuple[str, float]:
    raise KeyError("secret")


def certificates(folder: Path) -> None:
    """A CA, and certificates that it signed for the broker and for a client, each with its key in one file."""

    def openssl(*command: str) -> None:
        subprocess.run(["openssl", *command], check=True, capture_output=True, cwd=folder)

    key = ("-newkey", "rsa:2048", "-nodes")
    openssl("req", "-x509", *key, "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2")
    for name, alternative in (("server", "IP:127.0.0.1"), ("client", "DNS:client")):
        (folder / "extensions").write_text(f"subjectAltName={alternative}\n")
        openssl("req", "-new", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "extensions", "-days", "2")
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.crt")
        (folder / f"{name}.pem").write_text((folder / f"{name}.key").read_text() + (folder / f"{name}.crt").read_text())


LOGIN = "org.apache.kafka.common.security."
MECHANISMS = {
    "PLAIN": LOGIN + 'plain.PlainLoginModule required user_alice="secret";',
    "SCRAM-SHA-256": LOGIN + "scram.ScramLoginModule required;",
    "SCRAM-SHA-512": LOGIN + "scram.ScramLoginModule required;",
    "OAUTHBEARER": LOGIN + 'oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="alice";',
}


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KafkaBroker, dict[str, str], Path]]:
    """A broker with further listeners: SASL over TLS, and TLS where the client shows a certificate, too."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    folder = tmp_path_factory.mktemp("certificates")
    certificates(folder)
    ports = {"SASL": free_port(), "MUTUAL": free_port()}
    plain = kafka_broker.server_settings

    def with_more(path: Path, port: int, controller: int, *others: Any) -> str:
        more = {
            "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller}",
            "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL:SASL_SSL,MUTUAL:SSL",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(folder / "server.pem"),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(folder / "ca.pem"),
            "listener.name.mutual.ssl.client.auth": "required",
            "listener.name.sasl.sasl.enabled.mechanisms": ",".join(MECHANISMS),
            "connections.max.reauth.ms": str(SESSION_MS),
        }
        for name, number in ports.items():
            for setting in ("listeners", "advertised.listeners"):
                more[setting] += f",{name}://{HOST}:{number}"
        for name, login in MECHANISMS.items():
            more[f"listener.name.sasl.{name.lower()}.sasl.jaas.config"] = login
        return plain(path, port, controller, *others) + "".join(f"{key}={value}\n" for key, value in more.items())

    with pytest.MonkeyPatch.context() as patch, KafkaBroker() as broker:
        patch.setattr(kafka_broker, "server_settings", with_more)
        broker.restart()
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            wanted = UserScramCredentialUpsertion("alice", ScramCredentialInfo(mechanism, 4096), b"secret")
            admin.alter_user_scram_credentials([wanted])["alice"].result()
        create(ClientSettings(broker.bootstrap_servers), TopicSpec(name="t", partitions=2, replication_factor=1))
        yield broker, {name: f"{HOST}:{number}" for name, number in ports.items()}, folder


@pytest.mark.parametrize("mechanism", [*MECHANISMS, "MUTUAL"])
async def test_each_way_to_authenticate(secure: tuple[KafkaBroker, dict[str, str], Path], mechanism: str) -> None:
    """Sessions last two seconds: a connection is replaced in time, and no transaction fails."""
    _, addresses, folder = secure
    settings: dict[str, Any] = {"ssl.ca.location": str(folder / "ca.pem")}
    if mechanism == "MUTUAL":
        address = addresses["MUTUAL"]
        settings |= {"security.protocol": "ssl", "ssl.certificate.location": str(folder / "client.crt")}
        settings |= {"ssl.key.location": str(folder / "client.key")}
    else:
        address = addresses["SASL"]
        settings |= {"security.protocol": "sasl_ssl", "sasl.mechanism": mechanism}
        settings |= (
            {"oauth_cb": token} if mechanism == "OAUTHBEARER" else {"sasl.username": "alice", "sasl.password": "secret"}
        )
    until = time.monotonic() + (0 if mechanism == "MUTUAL" else SESSION_MS / 1000 * 1.5)
    async with slot_at(address, mechanism, settings, "t") as slot:
        first = slot._connections.values()
        while True:
            await transact(slot, "t", 0)
            if time.monotonic() > until:
                break
        replaced = first != slot._connections.values()
        assert replaced == (mechanism != "MUTUAL")


@pytest.mark.parametrize(
    ("wrong", "code", "said"),
    [
        ({"sasl.password": "wrong"}, "_AUTHENTICATION", "credentials"),
        ({"sasl.mechanism": "GSSAPI"}, "_AUTHENTICATION", "GSSAPI"),
        ({"ssl.ca.location": ""}, "_SSL", "certificate"),
        ({"host": "localhost"}, "_SSL", "ostname mismatch.*'localhost'"),
        ({"sasl.mechanism": "OAUTHBEARER", "oauth_cb": no_token}, "_TRANSPORT", "KeyError"),
        ({"security.protocol": "plaintext"}, "_TRANSPORT", "list_topics"),
    ],
    ids=["password", "mechanism", "authority", "host", "token", "no TLS"],
)
async def test_what_is_wrong_is_said_without_secrets(
    secure: tuple[KafkaBroker, dict[str, str], Path], wrong: dict[str, Any], code: str, said: str
) -> None:
    _, addresses, folder = secure
    settings: dict[str, Any] = {"security.protocol": "sasl_ssl", "sasl.mechanism": "PLAIN", "sasl.username": "alice"}
    settings |= {"sasl.password": "secret", "ssl.ca.location": str(folder / "ca.pem"), **wrong}
    if wrong.get("security.protocol") == "plaintext":
        settings = wrong
    address = addresses["SASL"].replace(HOST, settings.pop("host", HOST))
    with pytest.raises(TransactionFailed, match=said) as failed:
        async with slot_at(address, "id", settings, "t"):
            pass
    assert failed.value.code == code
    assert address in str(failed.value)
    assert "wrong" not in str(failed.value)
    assert "secret" not in str(failed.value)
