"""Brokers that outlive the process that starts them, found again by a name: the library under ``kes broker``.

Each has a state file and a lock file in the cache folder. The keeper inherits the open lock from the starter and holds
it as long as it lives, however it ends; a held lock is therefore the truth about "running", and the process numbers in
the state file are right while it is held (a number alone may have been given to another process).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from streams.broker.guardian_handle import GRACE_SECONDS, held_lock
from streams.broker.jars import Progress, errors_named, silent
from streams.broker.kafka_broker import KafkaBroker
from streams.broker.probe import HOST, metadata
from streams.broker.security import Tls
from streams.errors import ConfigError, EmbeddedBrokerError
from streams.sak.cache import cache_folder

_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class DetachedBroker:
    """A broker that runs on its own: ``pid`` is Java's process, ``keeper_pid`` the one that ends it on SIGTERM.

    ``throw_away``: ``data_dir`` is removed at the end. ``started`` is in seconds since 1970. ``plain_port``: where a
    request shows whether it answers (0: ``port``). ``security_dir``: folder of the CA and the users' settings, if any.
    """

    name: str
    port: int
    pid: int
    keeper_pid: int
    data_dir: str
    throw_away: bool
    started: float
    plain_port: int = 0
    security_dir: str = ""

    @property
    def bootstrap_servers(self) -> str:
        """``host:port`` for clients."""
        return f"{HOST}:{self.port}"

    @property
    def answers(self) -> bool:
        """Check whether the broker serves clients now. Sends it a request; waits for two seconds at most."""
        return metadata(self.plain_port or self.port) is not None


def start_detached(
    name: str,
    *,
    port: int | None = None,
    data_dir: Path | None = None,
    durable: bool = False,
    properties: Mapping[str, str] | None = None,
    tls: Tls = False,
    sasl: str | Sequence[str] = (),
    acl: bool = False,
    users: Mapping[str, str] | Sequence[str] = (),
    progress: Progress = silent,
) -> DetachedBroker:
    """Start a broker that goes on when this process ends; the other arguments are ``KafkaBroker``'s.

    Until this returns, the broker ends with this process. Raises ``EmbeddedBrokerError``, also when one of this name
    runs already, and ``ConfigError``.
    """
    _check(name)
    with errors_named(f"the cache folder {_folder()}"):
        _folder().mkdir(parents=True, exist_ok=True)
    with _lock(name, patience=1.0) as held:  # a look at the state holds it for an instant
        if held is None:
            running = _read(name)
            where = f" at {running.bootstrap_servers}" if running else " and is just being started"
            raise EmbeddedBrokerError(f"the broker {name!r} runs already{where}: stop it, or choose another name")
        _state(name).unlink(missing_ok=True)
        broker = KafkaBroker(
            port=port,
            data_dir=data_dir,
            durable=durable,
            properties=properties,
            tls=tls,
            sasl=sasl,
            acl=acl,
            users=users,
            progress=progress,
        )
        broker.belongs_to_keeper(descriptors=(held,), files=(_state(name),))
        broker.start()
        try:
            state = _state_of(name, broker, throw_away=data_dir is None)
            draft = _state(name).with_suffix(".tmp")
            draft.write_text(json.dumps(asdict(state)))
            draft.replace(_state(name))
            broker.leave()
        except BaseException:
            broker.stop()
            raise
        return state


def stop_detached(name: str) -> DetachedBroker | None:
    """End the broker of this name and wait for it; return its state, or nothing if none ran. Safe to repeat."""
    _check(name)
    running = _running(name)
    if running is None:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.kill(running.keeper_pid, signal.SIGTERM)
    until = time.monotonic() + 2 * GRACE_SECONDS
    while _running(name) is not None:
        if time.monotonic() > until:
            raise EmbeddedBrokerError(f"the broker {name!r} (process {running.pid}) does not end; kill it by hand")
        time.sleep(_POLL_SECONDS)
    return running


def detached_brokers() -> list[DetachedBroker]:
    """List the running brokers, by name."""
    names = sorted(path.stem for path in _folder().glob("*.json"))
    return [running for name in names if (running := _running(name)) is not None]


def _state_of(name: str, broker: KafkaBroker, *, throw_away: bool) -> DetachedBroker:
    port, plain = (
        int(address.rpartition(":")[2]) for address in (broker.bootstrap_servers, broker.plain_bootstrap_servers)
    )
    pid, keeper = broker.pid, broker.keeper_pid
    if pid is None or keeper is None:
        raise EmbeddedBrokerError(
            f"the broker {name!r} ended as soon as it had started: see {broker.data_dir}/kafka.log"
        )
    folder = str(broker.security_dir or "")
    return DetachedBroker(name, port, pid, keeper, str(broker.data_dir), throw_away, time.time(), plain, folder)


def _running(name: str) -> DetachedBroker | None:
    if not _folder().exists():
        return None
    with _lock(name) as held:
        if held is None:
            return _read(name)
        _state(name).unlink(missing_ok=True)  # it ended without its keeper: a power cut, or a kill -9 of both
        return None


def _lock(name: str, patience: float = 0.0) -> AbstractContextManager[int | None]:
    return held_lock(_folder() / f"{name}.lock", patience)


def _read(name: str) -> DetachedBroker | None:
    try:
        return DetachedBroker(**json.loads(_state(name).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _folder() -> Path:
    return cache_folder() / "brokers"


def _state(name: str) -> Path:
    return _folder() / f"{name}.json"


def _check(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name):
        raise ConfigError(f"a broker's name is 1 to 40 letters, digits, '-' or '_', not {name!r}")
