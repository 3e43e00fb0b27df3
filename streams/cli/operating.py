"""Lists of what waits in an event source, and an operator's acts on it: what ``kes parked`` and ``kes jobs`` share.

What waits is read from the owners where members run and answer, else from the changelog. An act names what the operator
has seen. Where members run, the owner carries it out, in the order of its partition; where all are stopped it is a
transaction as that of ``kes skip``, whose steps say why it is exactly once.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Generic, NamedTuple, TypeVar

import msgspec
import typer

from streams.cli.cluster import config_at
from streams.cli.console import complain, emit, notices
from streams.cli.skip import position_of, slot_of
from streams.cli.state_sources import state_of
from streams.cli.state_writing import Changes, StoppedPartition
from streams.errors import ConfigError, OffsetError, StoreError, StreamsError
from streams.kafka.questions.group_checks import GroupChecks
from streams.records import Output
from streams.settings.config import EventSourceConfig
from streams.source.event_source import EventSource

if TYPE_CHECKING:
    from streams.queries.operating import Listed, OperatorClient  # of the extra for queries

T = TypeVar("T")
E = TypeVar("E", bound="Listed")
Rows = list[dict[str, Any]]
Entries = Mapping[bytes, bytes]
"""The state of a partition, as the changelog has it."""
OWNERS_SECONDS: Final = 5.0
"""Owners answer in so many seconds, or the changelog does."""
PartitionOption = Annotated[int | None, typer.Option("--partition", "-p", min=0, help="Only this partition.")]


class Act(NamedTuple):
    """An act in the place of a partition's owner: its changes of the state, and what it writes elsewhere. ``is_whole``:
    all of it is one transaction, whatever its size."""

    changes: Changes
    outputs: Sequence[Output] = ()
    is_whole: bool = False


class Selection(Generic[E]):
    """Some of one kind of what waits in a source, or one entry of it, which a command lists or acts on. ``action``: of
    an act. ``partition``: where to look. ``only`` and ``more``: fields of the requests to owners that choose entries,
    and that say more of the act."""

    command: ClassVar[str]
    noun: ClassVar[str]
    absent: ClassVar[str]
    """The error where the one entry that was named is not there."""

    def __init__(
        self, source: EventSource[Any], action: str = "list", *, is_one: bool = False, partition: int | None = None
    ) -> None:
        self.source = source
        self.action = action
        self.is_one = is_one
        self.partition = partition
        self.only: dict[str, Any] = {}
        self.more: dict[str, Any] = {}

    def client(self, config: EventSourceConfig) -> OperatorClient[Any, Any, E]:
        """Make the client of the owners. Raises ``ModuleNotFoundError`` without the extra for queries."""
        raise NotImplementedError

    def chosen(self, number: int, entries: Entries) -> list[E]:
        """Return the chosen entries of a partition's state. Raises ``OffsetError`` for one that cannot be read."""
        raise NotImplementedError

    def row(self, number: int, entry: E) -> dict[str, Any]:
        """Return an entry as data."""
        raise NotImplementedError

    def table(self, rows: Rows) -> Any:
        """Return rows for people."""
        raise NotImplementedError

    @property
    def question(self) -> str:
        """Return what becomes of the entries that are acted on."""
        raise NotImplementedError

    @property
    def facts(self) -> dict[str, Any]:
        """Return further facts of an act."""
        return {}

    def changes(self, config: EventSourceConfig, number: int, entries: Entries, chosen: list[E], limit: int) -> Act:
        """Return what an act on these entries of a partition's state changes. ``limit``: bytes of a record."""
        raise NotImplementedError

    def rows(self, found: list[tuple[int, E]]) -> Rows:
        """Return entries as data."""
        return [self.row(number, entry) for number, entry in found]

    def named(self, found: list[tuple[int, E]]) -> list[tuple[int, E]]:
        """Check what was found. Raises ``StoreError`` where one entry was named, and there is none, or more."""
        if self.is_one and not found:
            raise StoreError(self.absent)
        if self.is_one and len(found) > 1:
            where = ", ".join(str(number) for number, _ in found)
            raise StoreError(f"partitions {where} have a {self.noun} of this name: choose one with --partition")
        return found

    def refuse_undone(self) -> None:
        """Raise ``StoreError``, where one entry was named and the act was not carried out."""
        if self.is_one:
            raise StoreError(
                f"the {self.noun} is another one by now, or has gone: by itself, by another operator, or by this "
                f"request, if it was put twice. Look again: {self.command} list"
            )


def about(make: Callable[..., T]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of ``make``, of which it gets what that makes, beside its own."""

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        # typer reads names, types and order from here.
        shared = inspect.signature(make, eval_str=True).parameters
        _, *own = inspect.signature(function, eval_str=True).parameters.values()

        def command(**given: Any) -> None:
            asked = make(**{name: given.pop(name) for name in shared})
            function(asked, **given)

        options = (*shared.values(), *own)
        command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in options}
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        return command

    return decorated


# -- reading -----------------------------------------------------------------------------------------------------------


def found_of(selection: Selection[E], servers: str, timeout: float) -> list[tuple[int, E]]:
    """Return what waits, with its partitions: from the owners, or from the changelog if no member answers."""

    async def ask(client: OperatorClient[Any, Any, E]) -> list[tuple[int, E]]:
        return await client.find(OWNERS_SECONDS, selection.partition, **selection.only)

    found = of_owners(selection, servers, timeout, ask)
    if found is not None:
        return selection.named(found)
    kept = kept_of(selection, servers, timeout)
    return selection.named(
        [(number, each) for number, there in kept.items() for each in selection.chosen(number, there)]
    )


def of_owners(
    selection: Selection[E],
    servers: str,
    timeout: float,
    ask: Callable[[Any], Awaitable[T]],
) -> T | None:
    """Return what the owners answer. ``None``: there are none to ask, or one does not answer."""
    config = _config_of(selection, servers)
    with GroupChecks(config, seconds=timeout) as checks:
        if not checks.described(config.group_id).members or not config.queries.secret_file:
            return None
    try:
        client = selection.client(config)
    except ModuleNotFoundError:  # without the extra for queries
        return None

    async def asked() -> T:
        async with client:
            return await ask(client)

    try:
        return asyncio.run(asked())
    except StreamsError as error:  # members of an older release refuse what they do not know
        complain(f"read from the changelog: {error}")
        return None


def kept_of(selection: Selection[E], servers: str, timeout: float) -> dict[int, Entries]:
    """Return the state of the partitions to look at, as the changelog has it."""
    number = selection.partition
    states = state_of(selection.source, "changelog", servers, timeout, None if number is None else [number])
    return {number: state.entries for number, state in sorted(states.items())}


def _config_of(selection: Selection[E], servers: str) -> EventSourceConfig:
    """Return the settings of the source. Raises ``OffsetError`` for a partition that it does not have."""
    config = config_at(servers, selection.source)
    if selection.partition is not None and selection.partition >= config.num_partitions:
        there = f"0 to {config.num_partitions - 1}"
        raise OffsetError(f"{config.topic} has the partitions {there}, not {selection.partition}")
    return config


# -- acts --------------------------------------------------------------------------------------------------------------


def operate(selection: Selection[E], servers: str, timeout: float, *, json: bool, yes: bool) -> None:
    """Act on the chosen entries: by the members that run, or in their place. ``yes``: do not ask before."""
    config = _config_of(selection, servers)

    def confirm(rows: Rows) -> None:
        if rows and not yes:
            notices().print(selection.table(rows))
            typer.confirm(f"These {selection.noun}s {selection.question}. Continue?", abort=True, err=True)

    with GroupChecks(config, seconds=timeout) as checks:
        if checks.described(config.group_id).members:
            rows = _by_owners(selection, config, timeout, confirm)
        else:
            rows = _on_stopped(selection, config, checks, servers, timeout, confirm)
    emit(
        {"action": selection.action, **selection.facts, f"{selection.noun}s": rows}, json, lambda: selection.table(rows)
    )


def _by_owners(
    selection: Selection[E], config: EventSourceConfig, timeout: float, confirm: Callable[[Rows], None]
) -> Rows:
    if not config.queries.secret_file:
        raise OffsetError(
            f"group {config.group_id} has members that run: stop them all first, or let them act: QueryConfig.operate "
            "and secret_file, and kes run --queries"
        )

    def client() -> OperatorClient[Any, Any, E]:
        try:
            return selection.client(config)
        except ModuleNotFoundError as error:
            raise ConfigError(f"acts of running members: {error}") from None

    async def find() -> list[tuple[int, E]]:
        async with client() as owners:
            return await owners.find(timeout, selection.partition, **selection.only)

    async def act(found: list[tuple[int, E]]) -> set[tuple[int, str]]:
        async with client() as owners:
            done = set[tuple[int, str]]()
            for number in sorted({number for number, _ in found}):
                there = [each.named for at, each in found if at == number]
                names = await owners.act(number, selection.action, there, timeout_seconds=timeout, **selection.more)
                done |= {(number, name) for name in names}
            return done

    found = selection.named(asyncio.run(find()))
    confirm(selection.rows(found))
    done = asyncio.run(act(found))
    acted = [(number, each) for number, each in found if (number, each.named[0]) in done]
    if not acted:
        selection.refuse_undone()
    return selection.rows(acted)


def _on_stopped(
    selection: Selection[E],
    config: EventSourceConfig,
    checks: GroupChecks,
    servers: str,
    timeout: float,
    confirm: Callable[[Rows], None],
) -> Rows:
    checks.refuse_if_alive()
    numbers = list(range(config.num_partitions)) if selection.partition is None else [selection.partition]
    committed = checks.committed(numbers)
    before = {number: position_of(config, checks, config.topic, number, committed[number]) for number in numbers}
    kept = kept_of(selection, servers, timeout)
    chosen = {number: selection.chosen(number, kept[number]) for number in kept}
    found = selection.named([(number, each) for number, entries in chosen.items() for each in entries])
    confirm(selection.rows(found))
    limit = selection.source.program().message_limit
    with slot_of(config, selection.command.replace(" ", "-"), timeout) as slot:
        for number, acted in chosen.items():
            if acted:
                position, act = before[number], selection.changes(config, number, kept[number], acted, limit)
                partition = StoppedPartition(config, checks, slot, number, committed[number])
                if act.is_whole:
                    carried = msgspec.UNSET if position.record is None else position.record.inputs
                    partition.write_whole(position, act.changes, carried, act.outputs)
                else:
                    partition.write(position, act.changes)
    return selection.rows(found)
