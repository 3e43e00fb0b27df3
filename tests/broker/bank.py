"""The program under attack: deposits in, balances out. Run as a process by the battery, folded again by the oracle.

python bank.py BOOTSTRAP GROUP INSTANCE        (environment: KES_FAULT, BANK_SLOW_MS, BANK_SLOW_KEY (one account, or *),
                                                BANK_HANDLER, BANK_MEMBERSHIP, BANK_STRATEGY, BANK_STANDBYS,
                                                BANK_LEAVE_SECONDS, BANK_PARTITIONS, BANK_STATIC,
                                                BANK_COPIES (of topics); those of bank_ahead.py,
                                                bank_parked.py and bank_jobs.py)

BANK_FOLDER=FOLDER       state is kept there
BANK_ENGINE=NAME         in databases of this engine of streams.disk (else in memory, and in files)
BANK_ONCE=1              deposits are handled once, by the id in their header (kes-id); ids are kept where the state is
BANK_STORE=KIND          Stores or SimpleStore, instead of Table
BANK_SNAPSHOTS=ADDRESS   with snapshots of it there
BANK_DUMP=FILE           SIGUSR1 writes every store of this member there
BANK_GATE=FILE           restoring takes BANK_GATE_MS for each change as long as this file is not there
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from streams import EventContext, EventSource, SimpleStore, StateConfig, Table, disk, event_type
from streams.metrics import Measurement, TransactionSettled
from streams.records import Change, IncomingRecord, TopicPartition
from streams.testing.faults import FaultPlan, consume_with_faults, settled_hook
from streams.testing.oracle import Sent, State
from tests.broker import bank_ahead, bank_parked
from tests.vocabulary import config_of

PARTITIONS = 4
_log = logging.getLogger("bank")
Store = dict[bytes, bytes]


@event_type("Deposited")
class Deposited(msgspec.Struct, frozen=True):
    account: str
    cents: int


class Account(msgspec.Struct):
    """What the releases of a rolling upgrade write, too: named only for a ``SimpleStore``, which needs it."""

    account: str | msgspec.UnsetType = msgspec.UNSET
    count: int = 0
    cents: int = 0


@event_type("Balance")
class Balance(msgspec.Struct, frozen=True):
    account: str
    count: int
    cents: int


def topic_of(group: str) -> str:
    return f"{group}-deposits"


def output_of(group: str) -> str:
    return f"{group}-balances"


def events(count: int, keys: int, seed: int) -> Iterator[Deposited]:
    rng = random.Random(seed)
    for _ in range(count):
        yield Deposited(f"account-{rng.randrange(keys)}", rng.randrange(1, 1000))


def new(name: str, kind: str) -> Account:
    """An account in a store of this kind."""
    return Account(name) if kind == "SimpleStore" else Account()


def fold(group: str, kind: str = "Table") -> Any:
    """What the handler does, with a dict: for the oracle."""
    output = output_of(group)

    def step(state: State, record: IncomingRecord) -> Iterator[Sent]:
        event = msgspec.json.decode(record.value or b"", type=Deposited)
        key = event.account.encode()
        account = msgspec.json.decode(state[key], type=Account) if key in state else new(event.account, kind)
        account.count += 1
        account.cents += event.cents
        state[key] = msgspec.json.encode(account)
        yield output, key, msgspec.json.encode(Balance(event.account, account.count, account.cents))

    return step


def store_of(kind: str, engine: Any) -> Any:
    """The factory of a store that has ``get`` as a table does."""
    if kind == "Table":
        return Table.factory(key=str, value=Account, engine=engine)
    if kind == "SimpleStore":
        return SimpleStore.factory(Account, key=lambda account: account.account, engine=engine)
    from streams.stores import Index, NamedTable, Stores  # the releases of a rolling upgrade lack them

    class Accounts(Stores):
        accounts = NamedTable.of(str, Account, bare=True, index={"cents": Index(int, lambda account: account.cents)})

        def get(self, name: str) -> Account | None:
            return self.accounts.get(name)

        def put(self, name: str, account: Account) -> None:
            self.accounts.put(name, account)

    return Accounts.factory(engine=engine)


def put(store: Any, name: str, account: Account) -> None:
    if isinstance(store, SimpleStore):
        store.put(account)
    else:
        store.put(name, account)


def build(
    bootstrap: str, group: str, instance: str, plan: FaultPlan, **settings: Any
) -> EventSource[Table[str, Account]]:
    session = float(os.environ.get("BANK_SESSION_SECONDS", "6"))
    membership = settings.setdefault("membership", os.environ.get("BANK_MEMBERSHIP") or "streams")
    default = "incremental" if membership == "streams" else "cooperative-sticky"
    settings.setdefault("strategy", os.environ.get("BANK_STRATEGY") or default)
    settings.setdefault("static_membership", bool(os.environ.get("BANK_STATIC")))
    settings.setdefault("num_standbys", int(os.environ.get("BANK_STANDBYS") or 0))
    settings.setdefault("leave_timeout_seconds", float(os.environ.get("BANK_LEAVE_SECONDS") or 10))
    copies = int(os.environ.get("BANK_COPIES") or 1)
    if copies > 1:
        settings |= {"replication_factor": copies, "min_insync_replicas": copies - 1}
    settings.setdefault("num_partitions", int(os.environ.get("BANK_PARTITIONS") or PARTITIONS))
    settings |= bank_parked.settings()
    if folder := os.environ.get("BANK_FOLDER"):
        snapshots = os.environ.get("BANK_SNAPSHOTS", "")
        state = StateConfig(folder=folder, checkpoint_seconds=0.2, snapshots=snapshots, snapshot_seconds=1.0)
        settings.setdefault("state", state)
    name = os.environ.get("BANK_ENGINE")
    engine = getattr(disk, name)() if name else None
    kind = os.environ.get("BANK_STORE") or "Table"
    store = store_of(kind, engine)
    source = EventSource(
        config_of(
            group_id=group,
            topic=topic_of(group),
            bootstrap_servers=bootstrap,
            instance_id=instance,
            metrics_handler=measure(plan),
            session_timeout_seconds=session,
            transaction_timeout_seconds=session * 0.8,
            **settings,
        ),
        store=gated(store) if os.environ.get("BANK_GATE") else store,
    )
    output = output_of(group)

    def deposit(ctx: EventContext[Table[str, Account]], event: Deposited) -> None:
        plan.hit("handler.before")
        account = ctx.store.get(event.account) or new(event.account, kind)
        account.count += 1
        account.cents += event.cents
        plan.hit("store.before")
        put(ctx.store, event.account, account)
        plan.hit("store.after")
        ctx.forward(output, Balance(event.account, account.count, account.cents), key=event.account)
        plan.hit("handler.after")

    deposit = bank_parked.failing(deposit)
    if os.environ.get("BANK_HOOKS"):
        from tests.broker import bank_jobs  # the releases of a rolling upgrade lack durable jobs

        deposit = bank_jobs.starting(source, group, deposit)
    slow_key, slow_ms = os.environ.get("BANK_SLOW_KEY", ""), float(os.environ.get("BANK_SLOW_MS", "0"))

    async def patient(ctx: EventContext[Table[str, Account]], event: Deposited) -> None:
        if event.account == slow_key:
            _log.info("the slow handler begins")
        if slow_key in (event.account, "*"):
            await asyncio.sleep(slow_ms / 1000)
        deposit(ctx, event)

    def blocking(ctx: EventContext[Table[str, Account]], event: Deposited) -> None:
        if slow_key in (event.account, "*"):
            time.sleep(slow_ms / 1000)
        deposit(ctx, event)

    once: dict[str, Any] = {}
    if os.environ.get("BANK_ONCE"):
        from streams.settings import Once, header  # the releases of a rolling upgrade lack them

        once["once"] = Once(header("kes-id"), within=86_400, engine=engine)
    handler = os.environ.get("BANK_HANDLER", "plain")
    if handler == "async":
        source.register_event_type(Deposited, patient, **once)
    elif handler == "blocking":
        source.register_event_type(Deposited, blocking, blocking=True, **once)
    elif handler in bank_ahead.KINDS:
        bank_ahead.register(source, handler, Deposited, plan, deposit)
    else:
        source.register_event_type(Deposited, deposit if not slow_ms else blocking, **once)
    return source


class Held(msgspec.Struct, frozen=True):
    """One store of a member: ``role`` is ``active``, or the state of a copy; ``left``: records it does not contain."""

    partition: int
    role: str
    left: int
    queued: int
    items: list[tuple[bytes, bytes]]


class Dump(msgspec.Struct, frozen=True):
    """All stores of a member at one moment. ``moves``: how many are under way. ``unwritten``: changes that are
    committed, and in none of its folders yet; releases before folders do not say."""

    member: str
    moves: int
    stores: list[Held]
    unwritten: int = 0


def measure(plan: FaultPlan) -> Callable[[Measurement], None]:
    """The metrics handler: passes ``settle.after``, and logs what is rare."""
    hook = settled_hook(plan)

    def handler(measurement: Measurement) -> None:
        if not isinstance(measurement, TransactionSettled):
            _log.info("%r", measurement)
        hook(measurement)

    return handler


def write_dump(source: EventSource[Any], path: Path) -> None:
    """On the loop of the source. The file appears complete, or not at all."""
    engine = source._run.engine
    stores: list[Held] = []
    if engine is not None:
        for partition, worker in engine.workers.items():
            if worker.state.value == "active":
                items = list(worker.store.dump())
                stores.append(Held(partition, "active", 0, worker.inbox.records, items))
        states = {copy.partition: copy.state for copy in engine.replicas.statistics()}
        with engine.replicas._lock:
            for partition, copy in engine.replicas._copies.items():
                left = copy.behind if copy.caught_up else max(copy.behind, 1)
                stores.append(Held(partition, states.get(partition, "new"), left, 0, list(copy.store.dump())))
    moves = 0 if engine is None else len(engine.handover.statistics())
    keeper = None if engine is None else engine.keeper
    unwritten = 0 if keeper is None else sum(folder.gathered_changes for folder in keeper.statistics())
    draft = path.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(Dump(source.config.instance_id, moves, stores, unwritten)))
    draft.replace(path)


def gated(factory: Callable[[TopicPartition], Any]) -> Callable[[TopicPartition], Any]:
    """Stores that restore slowly, while the gate is shut."""
    gate, seconds = Path(os.environ["BANK_GATE"]), float(os.environ.get("BANK_GATE_MS", "3")) / 1000

    def make(partition: TopicPartition) -> Any:
        store = factory(partition)
        receive = store.receive_change

        def slowly(change: Change, /) -> None:
            until = time.monotonic() + seconds
            while not gate.exists() and time.monotonic() < until:
                time.sleep(seconds)  # what a slow disk does
            receive(change)

        store.receive_change = slowly
        return store

    return make


async def _main(bootstrap: str, group: str, instance: str) -> None:
    plan = bank_parked.plan()
    source = build(bootstrap, group, instance, plan)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: source._run.ask_to_stop(drain=True))
    if dump := os.environ.get("BANK_DUMP"):
        loop.add_signal_handler(signal.SIGUSR1, write_dump, source, Path(dump))
    with bank_parked.answering(source):
        await consume_with_faults(source, plan)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # a process that hangs shows where, whatever holds the GIL
    logging.basicConfig(
        level=os.environ.get("BANK_LOG", "INFO"), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    if os.environ.get("BANK_RUN") == "run":
        build(sys.argv[1], sys.argv[2], sys.argv[3], FaultPlan()).run()
    else:
        asyncio.run(_main(*sys.argv[1:4]))
