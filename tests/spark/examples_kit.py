"""A bank that has been at work: its broker, its topics, what was paid in; and recipes as processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from examples import bank_feed
from examples.topics import create_topics
from streams.broker import KafkaBroker

ROOT = Path(__file__).resolve().parents[2]
DEPOSITS = 3_000


@dataclass(frozen=True)
class Bank:
    """``paid``: account to what all its deposits add up to. The event source has handled them all, and was stopped."""

    servers: str
    paid: Counter[str]


@contextlib.contextmanager
def bank_at_work() -> Iterator[Bank]:
    """A broker of its own, ``bank-events`` with deposits, and what ``examples.bank`` has made of them."""
    with KafkaBroker() as broker:
        servers = broker.bootstrap_servers
        create_topics(servers, {"bank-events": 10, "bank-balances": 10})
        paid = bank_feed.pay_in(servers, DEPOSITS, seed=5)
        source = start("-m", "streams", "run", "examples.bank:source", servers=servers)
        try:
            count, last = bank_feed.watch(servers, DEPOSITS, dict.fromkeys(range(10), 0))
            assert (count, last) == (DEPOSITS, paid)
        finally:
            source.send_signal(signal.SIGTERM)
            assert source.wait(60) == 0
        yield Bank(servers, paid)


def start(*arguments: str, servers: str) -> subprocess.Popen[bytes]:
    """Python in the checkout, as leader of a process group of its own, with the broker in its environment."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "KES_BOOTSTRAP_SERVERS": servers},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the process and everything that it started in its group (Spark's Java); waits for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
