"""``kes state get`` and ``scan`` with ``--ask-owner``: by a query to the running source, instead of its changelog."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from streams.cli.cluster import checked_partition_offset
from streams.errors import ConfigError, DecodeError, EncodeError
from streams.looks.addresses import brokers
from streams.looks.records import one_line, plain
from streams.model.answers import Answer
from streams.protocols import Codec
from streams.records import TopicPartition
from streams.source.event_source import EventSource

T = TypeVar("T")

AskOwner = Annotated[
    bool,
    typer.Option(
        "--ask-owner",
        help="Query the member that owns the key (kes run --queries). Needs the secret of the queries.",
    ),
]
AtLeast = Annotated[
    list[str] | None,
    typer.Option("--at-least", metavar="PARTITION@OFFSET", help="Wait until this input record is in the state."),
]
MaxStaleness = Annotated[
    float | None,
    typer.Option("--max-staleness", min=0.05, help="Accept the answer of a copy at most this many seconds old."),
]
Confirm = Annotated[bool, typer.Option("--confirm", help="Make the owner prove its ownership by a commit.")]


class OwnerOptions(NamedTuple):
    """Options of a query to the owner. Without ``ask_owner`` the others are refused."""

    ask_owner: bool
    at_least: list[str] | None
    max_staleness: float | None
    confirm: bool

    def check(self) -> bool:
        """Check whether the owner is to answer. Raises ``BadParameter``."""
        if not self.ask_owner and (self.at_least or self.max_staleness is not None or self.confirm):
            raise typer.BadParameter("--at-least, --max-staleness and --confirm need --ask-owner")
        if self.confirm and self.max_staleness is not None:
            raise typer.BadParameter("--confirm and --max-staleness exclude each other: a copy cannot confirm")
        return self.ask_owner


def get_of_owner(
    source: EventSource[Any],
    servers: str,
    key: str,
    partitions: list[int] | None,
    options: OwnerOptions,
    timeout: float,
) -> tuple[list[dict[str, Any]], str]:
    """Return the entries of a key, as facts, and what is known where there is none. Without ``--partition`` the key is
    looked up where its records go, and in all others where that is not known for sure."""
    least = {TopicPartition(source.config.topic, at.partition): at.offset + 1 for at in _least(options)}

    async def ask(reader: Any) -> tuple[list[dict[str, Any]], str]:
        from streams.queries.searching import search

        wanted = _key_of(reader.codecs[0], key)
        proof: dict[str, Any] = {"at_least": least, "confirm": options.confirm, "max_staleness": options.max_staleness}
        found, absences = [], []
        numbers: list[int | None] = list(partitions) if partitions else [None]
        for number in numbers:
            answers, absence = await search(reader, wanted, number, **proof, timeout_seconds=timeout)
            found += [_facts(answer, key) for answer in answers if answer.value is not None]
            absences += [absence] if absence else []
        return found, "" if found else "; ".join(absences)

    return asyncio.run(_asking(source, servers, ask))


def scan_of_owners(
    source: EventSource[Any], servers: str, prefix: str, options: OwnerOptions, limit: int, timeout: float
) -> list[dict[str, Any]]:
    """Return the first entries whose keys begin so, in the order of the keys; one more than the limit, if there are."""
    if options.at_least or options.confirm:
        raise typer.BadParameter(
            "--at-least and --confirm work for one key only: each page of a scan is as of another moment"
        )

    async def ask(reader: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        async for key, value in reader.range(max_staleness=options.max_staleness, timeout_seconds=timeout):
            name = one_line(plain(key))
            if name.startswith(prefix):
                found.append({"partition": _partition(reader, key), "key": plain(key), "value": plain(value)})
            if len(found) > limit:
                break
        return found

    return asyncio.run(_asking(source, servers, ask))


async def _asking(source: EventSource[Any], servers: str, ask: Callable[[Any], Awaitable[T]]) -> T:
    try:
        from streams.queries import StateReader
    except ModuleNotFoundError as error:
        raise ConfigError(f"--ask-owner: {error}") from None
    async with StateReader.of(source, bootstrap_servers=brokers(servers, source.config)) as reader:
        return await ask(reader)


def _least(options: OwnerOptions) -> list[Any]:
    return [checked_partition_offset(text) for text in options.at_least or ()]


def _key_of(keys: Codec[Any], text: str) -> Any:
    """Return the key that is shown as this text. Raises ``BadParameter``."""
    forms: list[Any] = [text, text.encode()]
    try:
        parsed = json.loads(text)
    except ValueError:
        pass
    else:
        forms += [parsed, tuple(parsed)] if isinstance(parsed, list) else [parsed]
    for form in forms:
        try:
            found = keys.decode(keys.encode(form))
        except (EncodeError, DecodeError):
            continue
        if one_line(plain(found)) == text:
            return found
    raise typer.BadParameter(f"{text!r} is not a key of this table as `scan` shows it")


def _partition(reader: Any, key: Any) -> int | None:
    try:
        number: int = reader.partition_of(key)
    except ConfigError:
        return None
    return number


def _facts(answer: Answer[Any], key: str) -> dict[str, Any]:
    return {
        "partition": answer.partition,
        "key": key,
        "value": plain(answer.value),
        "positions": {str(place): offset for place, offset in answer.positions.items()},
        "as_of": answer.as_of,
        "served_by": answer.served_by,
        "parked": answer.parked,
    }
