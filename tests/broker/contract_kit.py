"""Members of all three kinds that look the same to a test, in this process or in one of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import admin as _admin

from streams.clients.kafka_python_settings import translate
from streams.clients.librdkafka_connect import connect_librdkafka_group
from streams.clients.settings import ClientSettings
from streams.group import Assigned
from tests.broker.membership_kit import PATIENCE, Seat, make_topic, until

KINDS = ("streams", "librdkafka", "broker")
SESSION_MS, HEARTBEAT_MS = 2000, 200
STEADY_MS = 12_000
"""Session of groups from which nobody is to be lost: a machine that stands still for some seconds does not end it."""
_untyped: Any = _admin


def set_broker_session(servers: str, group: str, session_ms: int, heartbeat_ms: int = HEARTBEAT_MS) -> None:
    """Session and heartbeat of a group of the broker-side protocol: they are settings of the broker."""
    kind, operation = _untyped.ResourceType.GROUP, _untyped.AlterConfigOpType.SET
    values = {"consumer.session.timeout.ms": session_ms, "consumer.heartbeat.interval.ms": heartbeat_ms}
    entries = [
        _untyped.ConfigEntry(name, str(value), incremental_operation=operation) for name, value in values.items()
    ]
    client = _admin.AdminClient({"bootstrap.servers": servers, "log_level": 0})
    resource = _untyped.ConfigResource(kind, group, incremental_configs=entries)
    for future in client.incremental_alter_configs([resource]).values():
        future.result(PATIENCE)

    def told() -> str:
        (future,) = client.describe_configs([_untyped.ConfigResource(kind, group)]).values()
        return str(future.result(PATIENCE)["consumer.session.timeout.ms"].value)

    until(lambda: told() == str(session_ms), "the controller has the settings, the broker does not hear of them")


class AnySeat(Seat):
    """A member of one of the ``KINDS``."""

    def __init__(self, kind: str, *arguments: Any, **settings: Any) -> None:
        self.kind = kind
        defaults = {"session_timeout_ms": SESSION_MS, "heartbeat_interval_ms": HEARTBEAT_MS}
        super().__init__(*arguments, **{**defaults, **settings})

    def _connect(self, servers: str, group: str, topic: str, name: str, settings: dict[str, Any]) -> Any:
        if self.kind == "streams":
            return super()._connect(servers, group, topic, name, settings)
        settings.setdefault("security", translate({}))
        settings.setdefault("transaction_timeout_ms", SESSION_MS // 2)
        strategies, broker_side = settings.pop("strategies", ("cooperative-sticky",)), self.kind == "broker"
        return connect_librdkafka_group(
            ClientSettings(servers), group, topic, name, strategies, broker_side=broker_side, **settings
        )


class Desk:
    """A topic, and a group of one kind on it, with a session timeout for all of its members."""

    def __init__(self, kind: str, servers: str, prefix: str, folder: Path, session_ms: int) -> None:
        self.session_ms = session_ms
        self.kind, self.servers, self.group, self.folder = kind, servers, f"{prefix}group", folder
        self.topic = make_topic(servers, f"{prefix}in")
        self.made: list[Any] = []
        if kind == "broker":
            set_broker_session(servers, self.group, session_ms)

    def seat(self, name: str, **settings: Any) -> AnySeat:
        """A member in this process."""
        kind = settings.pop("kind", self.kind)
        settings.setdefault("session_timeout_ms", self.session_ms)
        self.made.append(AnySeat(kind, self.servers, self.group, self.topic, name, **settings))
        return self.made[-1]  # type: ignore[no-any-return]

    def process(self, name: str) -> Process:
        """A member in a process of its own."""
        self.made.append(Process(self, name))
        return self.made[-1]  # type: ignore[no-any-return]


@contextmanager
def laid_desk(kind: str, servers: str, prefix: str, folder: Path, session_ms: int = SESSION_MS) -> Iterator[Desk]:
    """A new topic and a group without members; closes whoever joined."""
    desk = Desk(kind, servers, prefix, folder, session_ms)
    try:
        yield desk
    finally:
        for member in desk.made:
            (member.membership if isinstance(member, Seat) else member).close(3.0)


class Process:
    """A member in a process of its own, which writes a line for everything that it hears, and for each new snapshot."""

    def __init__(self, desk: Desk, name: str) -> None:
        self.path = desk.folder / f"{name}-{time.monotonic_ns()}.jsonl"
        place = [desk.kind, desk.servers, desk.group, desk.topic, name, str(desk.session_ms)]
        command = [sys.executable, "-m", __name__, *place]
        root = str(Path(__file__).parents[2])
        with self.path.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, env={**os.environ, "PYTHONPATH": root}, cwd=root)

    @property
    def heard(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def owning(self, number: int, since: int = 0) -> dict[str, Any]:
        def found() -> list[dict[str, Any]]:
            return [line for line in self.heard[since:] if line["event"] == "Assigned" and len(line["owned"]) == number]

        until(lambda: bool(found()), f"it does not get {number} partitions")
        return found()[0]

    @property
    def metadata(self) -> bytes:
        """The newest that it published."""
        return bytes.fromhex(next(line["metadata"] for line in reversed(self.heard) if line["metadata"]))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self, _: float = 0.0) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(10)


def _told(event: Any, snapshot: Any) -> dict[str, Any]:
    line: dict[str, Any] = {
        "event": type(event).__name__,
        "incarnation": snapshot.incarnation,
        "metadata": snapshot.metadata.hex() if snapshot.metadata else None,
    }
    return line | ({"owned": sorted(event.owned)} if isinstance(event, Assigned) else {})


def _main(kind: str, servers: str, group: str, topic: str, name: str, session_ms: str) -> None:
    seat = AnySeat(kind, servers, group, topic, name, session_timeout_ms=int(session_ms))
    told, shown = 0, seat.membership.snapshot
    while True:
        with seat.changed:
            lines = seat.heard[told:]
            if not lines:
                seat.changed.wait(0.02)
        told += len(lines)
        for line in lines:
            print(json.dumps(_told(*line)), flush=True)
            shown = line[1]
        if not lines and seat.membership.snapshot is not shown:
            shown = seat.membership.snapshot
            print(json.dumps(_told(None, shown)), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
