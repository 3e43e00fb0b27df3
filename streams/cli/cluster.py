"""Shared parts of commands about a cluster: their options, the named event source, the addresses of the brokers, a
client, and the loop of those that go on until Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from streams.cli.console import complain
from streams.cli.source_name import checked_name
from streams.errors import BrokerUnavailable, ConfigError, StreamsError
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.looks import addresses
from streams.looks.addresses import client_settings_of
from streams.looks.records import PartitionOffset, partition_offset_of
from streams.model.loading import described, load
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource

T = TypeVar("T")

SourceName = Annotated[
    str, typer.Argument(metavar="MODULE:SOURCE", help="An EventSource, or a function that returns one.")
]
Servers = Annotated[str, typer.Option(help="Brokers. Default: those of the source, or KES_BOOTSTRAP_SERVERS.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, max=86_400, help="Seconds to wait for the brokers.")]
Interval = Annotated[float, typer.Option(min=0.2, max=86_400, help="Seconds between refreshes.")]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print one line of JSON per refresh.")]


def named_source(text: str) -> EventSource[object]:
    """The event source that ``MODULE:SOURCE`` names. Raises ``ConfigError``, and ``BadParameter`` for another shape."""
    name = checked_name(text)
    try:
        found = load(name)
    except StreamsError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{text!r} cannot make an event source: {described(error)}") from error
    if not isinstance(found, EventSource):
        raise ConfigError(f"{text!r} is {type(found).__name__}, not an EventSource: its topics are not known")
    return found


def config_at(servers: str, source: EventSource[Any]) -> EventSourceConfig:
    """Return the settings of a source with the address that is used, and all that is filled in at a start."""
    config = source.config
    return msgspec.structs.replace(config, bootstrap_servers=addresses.brokers(servers, config)).resolved()


def refuse_to_ask(*, json: bool, yes: bool) -> None:
    """Raise ``BadParameter`` for ``--json`` without ``--yes``: it could not ask for confirmation."""
    if json and not yes:
        raise typer.BadParameter("--json needs --yes: it cannot ask for confirmation", param_hint="--yes")


def await_listener(servers: str, timeout_seconds: float) -> None:
    """Wait as ``addresses.await_listener`` does, with the complaint of a command."""
    addresses.await_listener(servers, timeout_seconds, complain)


def admin_of(
    servers: str, config: EventSourceConfig | None, timeout_seconds: float
) -> AbstractContextManager[TopicAdmin]:
    """A client for questions about topics and offsets, with the security settings of the source, if one is named, when
    something listens. Raises ``BrokerUnavailable``."""
    return _admin(servers, client_settings_of(config), timeout_seconds)


def source_admin_of(
    config: EventSourceConfig | None, admin: TopicAdmin, timeout_seconds: float
) -> AbstractContextManager[TopicAdmin]:
    """A client for questions about the source topic: ``admin`` itself, unless the source is on another cluster."""
    if config is None or not config.source_is_elsewhere:
        return nullcontext(admin)
    return _admin(config.source_bootstrap_servers, config.source_client_settings, timeout_seconds)


@contextmanager
def _admin(servers: str, client_settings: Mapping[str, object] | None, timeout_seconds: float) -> Iterator[TopicAdmin]:
    await_listener(servers, timeout_seconds)
    with closing(TopicAdmin(ClientSettings(servers, client_settings, client_id="kes-cli"))) as admin:
        yield admin


def checked_partition_offset(text: str) -> PartitionOffset:
    """Parse ``PARTITION@OFFSET``. Raises ``BadParameter``."""
    at = partition_offset_of(text)
    if at is None:
        raise typer.BadParameter(f"{text!r} is not PARTITION@OFFSET, as in 2@1473", param_hint="PARTITION@OFFSET")
    return at


def topic_option(text: str) -> tuple[str, int]:
    """Name and partitions of an ``--output``. Raises ``ConfigError``."""
    name, _, partitions = text.rpartition(":")
    if not name or not partitions.isdecimal() or int(partitions) < 1:
        raise ConfigError(f"--output must be NAME:PARTITIONS, as in balances:10, not {text!r}")
    return name, int(partitions)


def watch(
    look: Callable[[], T],
    show: Callable[[T, str], None],
    interval: float,
    now: Callable[[], float],
    sleep: Callable[[float], None],
    passing: type[StreamsError] = BrokerUnavailable,
) -> None:
    """Look again and again until Ctrl-C, and show the last answer with the problem there is now, if any. A broker that
    goes away later is reported and waited for; ``passing``: the error of that."""
    seen: list[T] = []
    try:
        while True:
            problem, began = "", now()
            try:
                seen = [look()]
            except passing as error:
                if not seen:
                    raise
                problem = str(error)
            show(seen[0], problem)
            sleep(max(interval - (now() - began), 0.05))
    except KeyboardInterrupt:
        return  # how a watch ends
