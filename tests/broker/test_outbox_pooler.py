"""A PgBouncer between an outbox and its database: in session mode it is nothing to a relay, in another it is refused.

It is no package of Python: nightly, and only where a machine has one.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from streams import Outbox, Record, Relay
from streams.broker.probe import free_port
from streams.errors import OutboxError
from streams.outbox import postgres as module
from streams.outbox.postgres import PostgresSession
from streams.testing.fixtures import BrokerAddress
from tests.broker.battery_kit import wait_until
from tests.broker.outbox_kit import Ledger, PostgresServer

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin")
Pool = Callable[..., str]

pytestmark = [
    pytest.mark.broker,
    pytest.mark.nightly,
    pytest.mark.timeout(180),
    pytest.mark.skipif(PGBOUNCER is None, reason="there is no pgbouncer here (Debian, Ubuntu: apt-get install it)"),
]

SETTINGS = """\
[databases]
* = host={host} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {size}
"""


@contextmanager
def pooled(server: PostgresServer, database: str, mode: str, size: int = 20) -> Iterator[str]:
    """Run a pooler; yields the address of the database through it."""
    assert PGBOUNCER is not None
    known = conninfo_to_dict(database)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="pgbouncer-") as name:
        folder = Path(name)
        settings, log = folder / "pgbouncer.ini", folder / "log"
        text = SETTINGS.format(host=known["host"], user=known["user"], port=port, mode=mode, size=size)
        settings.write_text(text)
        server.own(folder)
        server.own(settings)
        with log.open("wb") as output:
            process = server.start(PGBOUNCER, str(settings), output=output)
        try:
            address = make_conninfo(database, host="127.0.0.1", port=port)

            def answers() -> bool:
                assert process.poll() is None, log.read_text()
                try:
                    psycopg.connect(address).close()
                except psycopg.OperationalError:
                    return False
                return True

            wait_until(answers, "the pooler answers", 30)
            yield address
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture
def pool(postgres: PostgresServer) -> Iterator[Pool]:
    """A function that runs a pooler for a database until the end of the test: ``pool(database, mode, size)``."""
    with ExitStack() as pools:
        yield lambda *given: pools.enter_context(pooled(postgres, *given))


@pytest.fixture
def ledger(postgres: PostgresServer, kafka_broker: BrokerAddress, topic_prefix: str) -> Ledger:
    return Ledger(postgres, kafka_broker.bootstrap_servers, topic_prefix)


def test_a_relay_behind_a_pool_of_sessions_and_writers_behind_one_of_transactions(
    ledger: Ledger, pool: Pool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    relays, direct = pool(ledger.database, "session"), ledger.database
    ledger.database = pool(direct, "transaction")
    with Relay(replace(ledger.config, database=relays)) as relay, monkeypatch.context() as patch:
        # A prepared statement is one of a session: psycopg has to make none behind such a pool.
        patch.setattr(psycopg, "connect", partial(psycopg.connect, prepare_threshold=None))
        with ledger.writers(seed, 4, 40):
            pass
        ledger.until_empty()
        assert not relay.wait(0)
    ledger.database = direct
    with Relay(replace(ledger.config, database=relays)):  # in the sessions that the first one has used
        ledger.write(random.Random(seed), 20)
        ledger.until_empty()
    assert ledger.check() > 100


@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_a_pool_that_shares_sessions_is_refused_by_name(ledger: Ledger, pool: Pool, mode: str) -> None:
    with pytest.raises(OutboxError, match=r"a pooler in transaction mode .* pool_mode = session"):
        Relay(replace(ledger.config, database=pool(ledger.database, mode))).start()


def test_a_pool_with_a_single_session_is_waited_for_and_taken(
    ledger: Ledger, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CONNECT_SECONDS", 2)
    with psycopg.connect(ledger.database) as db:
        Outbox().stash_many(db, [Record("t", b"1", b"a")])
    with PostgresSession(pool(ledger.database, "session", 1), "kes_outbox") as session:
        assert sum(len(session.fetch(shard, 10, 1_000)) for shard in range(session.about().shards)) == 1
