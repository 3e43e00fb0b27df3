"""``kes state get`` and ``scan`` with ``--ask-owner``: by a query to the running source, instead of its changelog."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from streams.cli.cluster import checked_partition_offset
from streams.errors import ConfigError, DecodeError, EncodeError, StoreError
from streams.looks.addresses import brokers
from streams.looks.records import one_line, plain
from streams.model.answers import Answer
from streams.protocols import Codec
from streams.records import TopicPartition
from streams.runtime.ownership.replicas import make_store
from streams.source.event_source import EventSource
from streams.stores import Stores

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
ByIndex = Annotated[
    str,
    typer.Option(
        "--by",
        metavar="INDEX[=VALUE]",
        help="Order by this index of the structure; with a value, only its entries. Needs --ask-owner.",
    ),
]
Confirm = Annotated[bool, typer.Option("--confirm", help="Make the owner prove its ownership by a commit.")]


class OwnerOptions(NamedTuple):
    """Options of a query to the owner. Without ``ask_owner`` the others are refused, but for ``table``."""

    ask_owner: bool
    at_least: list[str] | None
    max_staleness: float | None
    confirm: bool
    table: str = ""
    by: str = ""

    def check(self) -> bool:
        """Check whether the owner is to answer. Raises ``BadParameter``."""
        if not self.ask_owner and (self.at_least or self.max_staleness is not None or self.confirm or self.by):
            raise typer.BadParameter("--at-least, --max-staleness, --confirm and --by need --ask-owner")
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

    return asyncio.run(_asking(source, servers, options.table, ask))


def scan_of_owners(
    source: EventSource[Any], servers: str, prefix: str, options: OwnerOptions, limit: int, timeout: float
) -> list[dict[str, Any]]:
    """Return the first entries whose keys begin so, in the order of the keys or of an index; one more than the limit,
    if there are."""
    if options.at_least or options.confirm:
        raise typer.BadParameter(
            "--at-least and --confirm work for one key only: each page of a scan is as of another moment"
        )

    index, is_one, text = options.by.partition("=")
    more: dict[str, Any] = {"max_staleness": options.max_staleness, "timeout_seconds": timeout}
    wanted = _value_of(source, options.table, index, text) if is_one else None

    async def ask(reader: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        rows = reader.range(**more) if not index else reader.by_range(index, wanted, wanted, include_high=True, **more)
        async for row in rows:
            key, value = row
            name, due = one_line(plain(key)), {"due": True} if row.due else {}
            if name.startswith(prefix):
                found.append({"partition": _partition(reader, key), "key": plain(key), "value": plain(value)} | due)
            if len(found) > limit:
                break
        return found

    return asyncio.run(_asking(source, servers, options.table, ask))


async def _asking(source: EventSource[Any], servers: str, table: str, ask: Callable[[Any], Awaitable[T]]) -> T:
    try:
        from streams.queries import StateReader
    except ModuleNotFoundError as error:
        raise ConfigError(f"--ask-owner: {error}") from None
    async with StateReader.of(source, table=table, bootstrap_servers=brokers(servers, source.config)) as reader:
        return await ask(reader)


def _least(options: OwnerOptions) -> list[Any]:
    return [checked_partition_offset(text) for text in options.at_least or ()]


def _forms(text: str) -> list[Any]:
    """Return what a text may stand for: itself, its bytes, its JSON."""
    forms: list[Any] = [text, text.encode()]
    try:
        parsed = json.loads(text)
    except ValueError:
        return forms
    return [*forms, *([parsed, tuple(parsed)] if isinstance(parsed, list) else [parsed])]


def _value_of(source: EventSource[Any], table: str, index: str, text: str) -> Any:
    """Return the value of an index that a text stands for. Raises ``BadParameter``."""
    store: Any = make_store(source.program().store_factory, TopicPartition(source.config.topic, 0))
    if not isinstance(store, Stores):
        raise typer.BadParameter("--by needs a structure of a Stores: a table of its own has no index")
    problem: Exception | None = None
    for form in _forms(text):
        try:
            store.part_named(table)[1].places(index, form, form, include_high=True)
        except (EncodeError, StoreError) as error:
            problem = problem or error
        else:
            return form
    raise typer.BadParameter(f"--by {index}={text}: {problem}")


def _key_of(keys: Codec[Any], text: str) -> Any:
    """Return the key that is shown as this text. Raises ``BadParameter``."""
    for form in _forms(text):
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
        "due": answer.due,
    }
