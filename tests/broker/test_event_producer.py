"""``EventProducer`` on a real broker: what is acknowledged, refused, in doubt, and committed together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from confluent_kafka import Producer

from examples import web_service
from streams import Delivery, EventProducer, NotDelivered, Record, TransactionRecords, partition_of, to_record
from streams.errors import BrokerUnavailable, ConfigError, RecordRefused, RegistrationError, Stopped, TransactionFailed
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.reading.fetch_session import FOLLOWING
from streams.kafka.reading.fetching import LogFetcher
from streams.kafka.settings import ClientSettings
from streams.records import IncomingRecord
from streams.testing.fixtures import OwnBroker
from tests.broker.client_kit import Received, create
from tests.broker.gate import gate
from tests.vocabulary import Added

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]

PARTITIONS = 3


@pytest.fixture
def topic(admin: TopicAdmin, topic_prefix: str) -> str:
    create(admin, name := f"{topic_prefix}events", PARTITIONS, max_message_bytes="2000")
    return name


def read(settings: ClientSettings, topic: str) -> dict[int, list[IncomingRecord]]:
    """Everything that readers of committed records see, by partition."""
    consumer = LogFetcher(settings, topic, FOLLOWING)
    try:
        received = Received(consumer)
        for partition in range(PARTITIONS):
            consumer.add(partition, 0)
        received.until(lambda: len(received.at_end) == PARTITIONS)
        return received.records
    finally:
        consumer.close()


class Blocking:
    """The methods of a blocking producer as coroutines, so that one test drives both."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer

    async def send(self, *arguments: Any, **options: Any) -> Delivery:
        delivery: Delivery = await asyncio.to_thread(self._producer.send, *arguments, **options)
        return delivery

    async def send_soon(self, *arguments: Any, **options: Any) -> None:
        await asyncio.to_thread(self._producer.send_soon, *arguments, **options)

    async def flush(self) -> None:
        await asyncio.to_thread(self._producer.flush)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[TransactionRecords]:
        with self._producer.transaction() as records:
            yield records


@asynccontextmanager
async def started(kind: str, producer: EventProducer) -> AsyncIterator[Any]:
    if kind == "async":
        async with producer as running:
            yield running
    else:
        with producer as running:
            yield Blocking(running)


KINDS = pytest.mark.parametrize("kind", ["async", "blocking"])


@KINDS
@pytest.mark.asyncio
async def test_events_arrive_typed_placed_by_their_keys_and_in_order(
    settings: ClientSettings, topic: str, kind: str
) -> None:
    small = EventProducer(settings.bootstrap_servers, max_queued_records=10, transactional_id=topic)
    async with started(kind, small) as producer:
        for number in range(300):  # thirty times what may be on its way
            await producer.send_soon(topic, Added(f"k{number % 7}", number), key=f"k{number % 7}")
        delivery = await producer.send(
            topic, Added("x"), key=b"x", headers=[("trace", b"1")], partition=1, timestamp_ms=1_700_000_000_000
        )
        await producer.send(Record(topic, None, b"k0"))  # a tombstone
        with pytest.raises(RegistrationError):
            await producer.send(topic, "not an event")
        await producer.flush()
    with pytest.raises(Stopped):
        await producer.send_soon(topic, Added("late"))
    with pytest.raises(Stopped):
        async with producer.transaction():
            pass
    found = read(settings, topic)
    (last,) = [record for record in found[1] if record.header("trace")]
    assert (last.offset, last.partition, last.timestamp_ms) == (delivery.offset, delivery.partition, 1_700_000_000_000)
    assert last.record_type == "Added"
    assert [record.value for record in found[partition_of(b"k0", PARTITIONS)]][-1] is None
    for partition, records in found.items():
        events = [msgspec.json.decode(record.value, type=Added) for record in records if record.value]
        for name in {event.name for event in events} - {"x"}:
            assert partition_of(name.encode(), PARTITIONS) == partition
            amounts = [event.amount for event in events if event.name == name]
            assert amounts == list(range(amounts[0], 300, 7))
    assert sum(map(len, found.values())) == 302


@KINDS
@pytest.mark.asyncio
async def test_a_record_that_is_too_large_is_refused_alone(
    settings: ClientSettings, admin: TopicAdmin, topic_prefix: str, kind: str
) -> None:
    """Batches of small records are larger than the topic takes, and refused with all in them. Nothing behind them
    overtakes them, not even what is sent while they are sent again."""
    create(admin, topic := f"{topic_prefix}small", PARTITIONS, max_message_bytes="100000")
    create(admin, other := f"{topic_prefix}other", 1)
    async with started(kind, EventProducer(settings.bootstrap_servers)) as producer:
        for number in range(600):
            await producer.send_soon(topic, Added("s" * 1_000, number), key=f"k{number % 7}")
        await producer.send_soon(topic, Added("large" * 30_000), key="k0")
        for number in range(600, 800):
            await producer.send_soon(topic, Added("s" * 1_000, number), key=f"k{number % 7}")
            await producer.send(other, Added("in between"))
        with pytest.raises(NotDelivered, match=r"1 records were not delivered \(1 refused, 0 in doubt\).*small\[\d\]"):
            await producer.flush()
        with pytest.raises(RecordRefused, match="MSG_SIZE_TOO_LARGE"):
            await producer.send(topic, Added("large" * 30_000))
    numbers = [
        [msgspec.json.decode(record.value or b"", type=Added).amount for record in records]
        for records in read(settings, topic).values()
    ]
    assert numbers == [sorted(of_partition) for of_partition in numbers]
    assert sorted(number for of_partition in numbers for number in of_partition) == list(range(800))


def test_a_record_without_a_key_takes_no_others_of_its_batch_with_it(
    settings: ClientSettings, admin: TopicAdmin, topic_prefix: str
) -> None:
    """A compacted topic refuses it, and the whole batch."""
    create(admin, topic := f"{topic_prefix}compact", PARTITIONS, cleanup_policy="compact")
    with EventProducer(settings.bootstrap_servers) as producer:
        for number in range(300):
            key = None if number in (100, 150) else b"k"
            producer.send_soon(Record(topic, b"%d" % number, key, partition=0))
        with pytest.raises(NotDelivered, match=r"2 refused, 0 in doubt.*INVALID_RECORD") as found:
            producer.flush()
    assert [delivery.record.value for delivery in found.value.deliveries] == [b"100", b"150"]
    numbers = [int(record.value or b"") for record in read(settings, topic)[0]]
    assert numbers == [number for number in range(300) if number not in (100, 150)]


@pytest.mark.parametrize("kind", gate(["async", "blocking"], "async"))
@pytest.mark.asyncio
async def test_what_is_in_doubt_is_raised_at_the_end(
    own_broker: OwnBroker, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    broker = own_broker(start_timeout=150.0)
    create(TopicAdmin(ClientSettings(broker.bootstrap_servers)), "events", 1)
    async with started(kind, EventProducer(broker.bootstrap_servers)) as running:
        await running.send("events", Added("there"))
    producer = EventProducer(broker.bootstrap_servers, delivery_timeout_seconds=2.0)

    others = [
        to_record("events", Added("in doubt, too"), key="a", headers=[("trace", b"1")]),
        Record("events", None, b"a"),
        Record("events", b"", None, [("trace", None)], 0, 1_700_000_000_000),
    ]

    async def doubtful() -> None:
        async with started(kind, producer) as running:
            await running.send("events", Added("there, too"))
            broker.freeze()
            await running.send_soon("events", Added("in doubt"))
            with pytest.raises(BrokerUnavailable, match="it may be there or not"):
                await running.send("events", Added("awaited"))
            for record in others:
                await running.send_soon(record)

    async def failing() -> None:
        async with started(kind, producer) as running:
            await running.send_soon("events", Added("in doubt"))
            raise ZeroDivisionError

    with pytest.raises(NotDelivered) as raised:
        await doubtful()
    assert [delivery.record for delivery in raised.value.deliveries] == [
        to_record("events", Added("in doubt")),
        *others,
    ]
    assert isinstance(raised.value.deliveries[0].error, BrokerUnavailable)
    with pytest.raises(ZeroDivisionError):  # the block's own error is not hidden
        await failing()
    assert "1 records were not delivered (0 refused, 1 in doubt)" in caplog.text


async def transact(producer: Any, topic: str, *events: Added, error: Exception | None = None) -> None:
    async with producer.transaction() as records:
        for event in events:
            records.send(topic, event, key=event.name)
        if error is not None:
            raise error


@KINDS
@pytest.mark.asyncio
async def test_a_transaction_is_committed_as_a_whole_or_not_at_all(
    settings: ClientSettings, admin: TopicAdmin, topic: str, kind: str
) -> None:
    """The blocking one is called on the thread of the running loop."""
    options: dict[str, Any] = {"transactional_id": topic, "client_settings": {"linger.ms": 5}}
    producer, again = (EventProducer(settings.bootstrap_servers, **options) for _ in range(2))
    async with started(kind, producer) as running:
        for amount in (1, 2):
            await transact(running, topic, *(Added(f"k{number}", amount) for number in range(50)))
        with pytest.raises(ZeroDivisionError):
            await transact(running, topic, Added("never"), error=ZeroDivisionError())
        with pytest.raises(RecordRefused, match=r"nothing of the transaction is committed"):
            await transact(running, topic, Added("never"), Added("large" * 500))
        with pytest.raises(RecordRefused, match=rf"{topic}\.none: .*create the topic; nothing of the transaction"):
            await transact(running, f"{topic}.none", Added("never"))
        with pytest.raises(ConfigError, match="in use by another block"):
            await started(kind, producer).__aenter__()
        async with started(kind, again) as other:
            await transact(other, topic, Added("of the other"))
        await transact(running, topic, Added("after it"))  # by a new client: the one that met the error is gone
        async with started(kind, again) as other:
            await transact(other, topic, Added("of the other"))
        with pytest.raises(TransactionFailed, match=r"newer instance|same transactional id"):
            await transact(running, topic, Added("never"))
    found = [record.value or b"" for records in read(settings, topic).values() for record in records]
    assert len(found) == 103
    assert not [value for value in found if b"never" in value]
    assert admin.describe([f"{topic}.none"]) == {f"{topic}.none": None}, "it was not made"


@pytest.mark.parametrize("kind", gate(["async", "blocking"], "blocking"))
@pytest.mark.asyncio
async def test_the_broker_is_started_again_between_two_transactions(own_broker: OwnBroker, kind: str) -> None:
    broker = own_broker(start_timeout=150.0)
    settings = ClientSettings(broker.bootstrap_servers)
    create(TopicAdmin(settings), "events", PARTITIONS)
    async with started(kind, EventProducer(broker.bootstrap_servers, transactional_id="program")) as running:
        await transact(running, "events", *(Added(f"k{number}") for number in range(50)))
        await asyncio.to_thread(broker.restart)
        await transact(running, "events", *(Added(f"k{number}") for number in range(50)))
    assert sum(map(len, read(settings, "events").values())) == 100


def test_threads_share_a_producer(settings: ClientSettings, topic: str) -> None:
    with EventProducer(settings.bootstrap_servers) as producer, ThreadPoolExecutor(8) as threads:
        deliveries = list(threads.map(lambda number: producer.send(topic, Added(f"k{number}"), key=b"k"), range(200)))
    assert sorted(delivery.offset for delivery in deliveries) == list(range(200))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bootstrap_servers": ""}, "no broker is named: set bootstrap_servers or the variable KES_BOOTSTRAP_SERVERS"),
        ({"max_queued_records": 0}, "max_queued_records is 0; it must be a whole number, 1 or more"),
        ({"delivery_timeout_seconds": 0}, "delivery_timeout_seconds is 0; it must be a millisecond or more"),
        (
            {"transactional_id": "t", "client_settings": {"ssl.keystore.location": "x"}},
            "the group member cannot honour ssl.keystore.location",
        ),
        ({"client_settings": {"acks": 0}}, "kafka setting 'acks' can not be overridden: exactly-once rests on it"),
    ],
)
def test_wrong_settings_are_refused(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], text: str) -> None:
    monkeypatch.delenv("KES_BOOTSTRAP_SERVERS", raising=False)
    with pytest.raises(ConfigError, match=text):
        EventProducer(**{"bootstrap_servers": "127.0.0.1:1", **options})


@pytest.mark.asyncio
async def test_a_callback_of_the_settings_that_fails_leaves_no_sender_waiting() -> None:
    failures = [ValueError("wrong")] * 3

    def statistics(_: str) -> None:
        if failures:
            raise failures.pop()

    settings = {"stats_cb": statistics, "statistics.interval.ms": 20}
    async with EventProducer("127.0.0.1:1", client_settings=settings, delivery_timeout_seconds=0.5) as producer:
        with pytest.raises(BrokerUnavailable, match="not acknowledged"):
            await asyncio.wait_for(producer.send(Record("t", b"v")), 30)
    assert not failures


def test_a_transaction_needs_a_name(settings: ClientSettings) -> None:
    with (
        EventProducer(settings.bootstrap_servers) as producer,
        pytest.raises(ConfigError, match="transactional_id"),
        producer.transaction(),
    ):
        pass


@pytest.mark.asyncio
async def test_the_web_service(monkeypatch: pytest.MonkeyPatch, own_broker: OwnBroker) -> None:
    broker = own_broker(start_timeout=150.0)
    monkeypatch.setenv("KES_BOOTSTRAP_SERVERS", broker.bootstrap_servers)
    monkeypatch.setattr(web_service, "TIMEOUT_SECONDS", 2.0)
    settings = ClientSettings(broker.bootstrap_servers)
    create(TopicAdmin(settings), "bank-events", PARTITIONS, max_message_bytes="2000")
    app = web_service.app
    async with (
        web_service.lifespan(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://bank") as client,
    ):

        async def deposit(cents: object, account: str = "ada") -> httpx.Response:
            return await client.post(f"/accounts/{account}/deposits", json={"cents": cents})

        for offset, cents in enumerate((500, 250)):
            answer = await deposit(cents)
            assert (answer.status_code, answer.json()["offset"]) == (202, offset)
        assert (await deposit("many")).status_code == 422
        assert (await deposit(1, account="x" * 3000)).status_code == 422
        broker.freeze()
        assert (await deposit(1)).status_code == 503
        broker.thaw()
    found = read(settings, "bank-events")[partition_of(b"ada", PARTITIONS)]
    assert [msgspec.json.decode(record.value or b"")["cents"] for record in found][:2] == [500, 250]


@pytest.mark.parametrize("null_keys", ["sticky", "spread"])
def test_records_without_key_go_together_or_each_by_itself(
    settings: ClientSettings, topic: str, null_keys: Any
) -> None:
    """One by one, and in a transaction, whose records are placed by the toolkit itself."""
    with EventProducer(settings.bootstrap_servers, null_keys=null_keys, transactional_id=topic) as producer:
        for _ in range(40):  # by librdkafka, at random: all in one is less likely than 1 in 10 ** 18
            producer.send_soon(Record(topic, b"alone"))
        with producer.transaction() as records:
            for _ in range(PARTITIONS):
                records.send(Record(topic, b"together"))
    found = [record for records_of in read(settings, topic).values() for record in records_of]
    together = {record.partition for record in found if record.value == b"together"}
    assert len(together) == (1 if null_keys == "sticky" else PARTITIONS)
    if null_keys == "spread":
        assert len({record.partition for record in found if record.value == b"alone"}) > 1


@pytest.mark.parametrize(
    ("partitioner", "theirs"),
    [("murmur2", "murmur2_random"), ("crc32", "consistent_random"), ("fnv1a", "fnv1a_random")],
)
def test_keys_go_where_librdkafka_puts_them(
    settings: ClientSettings, topic: str, partitioner: Any, theirs: str
) -> None:
    """Sent one by one, and in a transaction, whose records are placed by the toolkit itself."""
    keys, brokers = [b"key-%d" % number for number in range(20)], settings.bootstrap_servers
    placed: dict[bytes | None, int | None] = {}
    other = Producer({"bootstrap.servers": brokers, "partitioner": theirs})
    for key in keys:
        other.produce(topic, b"theirs", key, on_delivery=lambda _, one: placed.__setitem__(one.key(), one.partition()))
    other.flush(30)
    with EventProducer(brokers, partitioner=partitioner, transactional_id=topic) as producer:
        assert {key: producer.send(Record(topic, b"ours", key)).partition for key in keys} == placed
        with producer.transaction() as records:
            for key in keys:
                records.send(Record(topic, b"together", key))
    found = [record for records_of in read(settings, topic).values() for record in records_of]
    assert {record.key: record.partition for record in found if record.value == b"together"} == placed
    assert {key: partition_of(key, PARTITIONS, partitioner) for key in keys} == placed
