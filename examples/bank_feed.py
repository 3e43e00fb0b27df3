"""The other side of the bank: pays money in, and looks whether every cent arrived, once.

python -m examples.bank_feed 10000      10,000 deposits, then watches the balances until they add up
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from examples.bank import Balance, Deposited
from examples.topics import create_topics, ends, kafka_log
from streams import EventProducer
from streams.events import event_type_of

ACCOUNTS = 1_000
PARTITIONS = 10
PATIENCE_SECONDS = 30.0


def pay_in(servers: str, deposits: int, seed: int) -> Counter[str]:
    """Produce deposits to random accounts; what each account was given."""
    random_ = random.Random(seed)
    paid: Counter[str] = Counter()
    with EventProducer(servers) as producer:
        for _ in range(deposits):
            event = Deposited(f"account-{random_.randrange(ACCOUNTS)}", random_.randrange(1, 100_00))
            producer.send_soon("bank-events", event, key=event.account)
            paid[event.account] += event.cents
    return paid


def watch(servers: str, deposits: int, already: dict[int, int]) -> tuple[int, Counter[str]]:
    """Read balances from ``already`` on, as committed, until there is one per deposit, or nothing comes any more.

    Gives how many came, and the last balance of each account.
    """
    balance = event_type_of(Balance)
    last: Counter[str] = Counter()
    count = 0
    settings = {"bootstrap.servers": servers, "group.id": "bank-feed", "isolation.level": "read_committed"}
    consumer = Consumer(settings, logger=kafka_log)
    consumer.assign([TopicPartition("bank-balances", number, already[number]) for number in range(PARTITIONS)])
    deadline = time.monotonic() + PATIENCE_SECONDS
    while count < deposits and time.monotonic() < deadline:
        for message in consumer.consume(1_000, 0.5):
            event = balance.decode(message.value())
            last[event.account] = event.cents
            count += 1
            deadline = time.monotonic() + PATIENCE_SECONDS
    consumer.close()
    return count, last


def balances(servers: str, until: dict[int, int]) -> Counter[str]:
    """The last balance of each account below the offsets ``until``."""
    last: Counter[str] = Counter()
    settings = {"bootstrap.servers": servers, "group.id": "bank-feed", "isolation.level": "read_committed"}
    consumer = Consumer(settings, logger=kafka_log)
    waiting = {number: end for number, end in until.items() if end}
    consumer.assign([TopicPartition("bank-balances", number, 0) for number in waiting])
    while waiting:
        for message in consumer.consume(1_000, 0.2):
            event = event_type_of(Balance).decode(message.value())
            last[event.account] = event.cents
        for place in consumer.position([TopicPartition("bank-balances", number) for number in waiting]):
            if place.offset >= waiting[place.partition]:  # not the last record: a transaction ends with a marker
                del waiting[place.partition]
    consumer.close()
    return last


def main() -> int:
    """Pay in, watch, compare."""
    deposits = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    servers = os.environ["KES_BOOTSTRAP_SERVERS"]
    create_topics(servers, {"bank-events": PARTITIONS, "bank-balances": PARTITIONS})
    already = ends(AdminClient({"bootstrap.servers": servers}, logger=kafka_log), "bank-balances")
    before = balances(servers, already)
    seed = int(os.environ.get("SEED", "0")) or random.randrange(1, 1 << 30)
    paid = pay_in(servers, deposits, seed)
    print(f"paid in: {deposits:,} deposits, {paid.total() / 100:,.2f} (SEED={seed})")
    count, last = watch(servers, deposits, already)
    more = Counter({account: cents - before[account] for account, cents in last.items()})
    print(f"balances seen: {count:,}, the accounts hold {more.total() / 100:,.2f} more than before")
    right = more == paid and count == deposits  # account by account
    print("to the cent" if right else "WRONG: balances and deposits differ")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
