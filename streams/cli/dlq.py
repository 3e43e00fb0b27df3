"""``kes dlq``: the dead letters of an event source: list and show them, send them again, drop them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Annotated, Any, Final, NamedTuple

import typer
from rich.console import Group
from rich.text import Text

from streams.cli.cluster import Json, Servers, Timeout, await_listener, named_source, refuse_to_ask
from streams.cli.console import complain, emit, notices, print_whole
from streams.cli.letter_tables import described, table_of
from streams.errors import ConfigError, OffsetError, TopicError, TransactionFailed
from streams.kafka.settings import ClientSettings
from streams.looks.addresses import brokers, client_settings_of
from streams.looks.letter_choice import (
    ChosenLetters,
    LetterChoice,
    collect,
    explained,
    originals_of,
    problems_of,
    record_of,
)
from streams.looks.letter_facts import summary_of, whole
from streams.looks.letters import Letter, LetterBox, resent
from streams.looks.records import Decoder, partition_offset_of
from streams.records import Output
from streams.runtime.partition.dead_letters import PREFIX
from streams.sak.harmless import harmless
from streams.source.event_source import EventSource

app = typer.Typer(no_args_is_help=True)

_MOST_NAMED: Final = 10
_NO_LIMIT: Final = 10**12

_Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODULE:SOURCE] [PARTITION@OFFSET]...", help="The source, and letters by their place in the topic."
    ),
]
_Topic = Annotated[str, typer.Option("--topic", help="Dead-letter topic, if no source is given.")]
_Partition = Annotated[int | None, typer.Option("--partition", "-p", min=0, help="Select letters of this partition.")]
_Key = Annotated[str | None, typer.Option("--key", help="Select letters with this key (text).")]
_Type = Annotated[str | None, typer.Option("--type", help="Select letters with this event type.")]
_All = Annotated[bool, typer.Option("--all", help="Select all open letters that match the other options.")]
_Limit = Annotated[int, typer.Option(min=1, max=100_000, help="Maximum number of letters, oldest first.")]
_Yes = Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")]


class _Task(NamedTuple):
    """A command line, understood."""

    source: EventSource[Any] | None
    settings: ClientSettings
    topic: str
    wanted: LetterChoice
    timeout: float


@app.callback()
def dlq() -> None:
    """Dead letters: the records that an error policy gave up on."""


@app.command("list")
def list_letters(
    words: _Words = None,
    topic: _Topic = "",
    partition: _Partition = None,
    key: _Key = None,
    type_: _Type = None,
    limit: _Limit = 50,
    settled: Annotated[
        bool, typer.Option("--settled", help="Include letters that were sent again or dropped.")
    ] = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """List open letters: neither sent again nor dropped. Changes nothing.

    Exit codes: 0 listed, also if there are none; 1 no such topic, not a dead-letter topic, or no broker answers; 2
    wrong usage.
    """
    task = _understood(words, topic, bootstrap_servers, timeout, LetterChoice((), partition, key, type_))
    with LetterBox(task.settings, task.topic, timeout) as box:
        collected = collect(box, task.wanted, limit, settled=settled)
    _refuse_other_topic(task, collected)
    facts = {
        "topic": task.topic,
        "open": collected.open,
        "letters": [summary_of(letter) for letter in collected.letters],
    }
    summary = Text(_counted(collected, len(collected.letters)))
    emit(facts, json, lambda: Group(table_of(collected.letters), summary) if collected.letters else summary)


@app.command()
def show(
    words: _Words = None,
    topic: _Topic = "",
    partition: _Partition = None,
    key: _Key = None,
    type_: _Type = None,
    limit: _Limit = 10,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Show letters in full: the event as the source would decode it now, the error, its place and the stack trace.

    Exit codes: 0 shown; 1 no such letter or topic, not a dead-letter topic, or no broker answers; 2 wrong usage.
    """
    task = _understood(words, topic, bootstrap_servers, timeout, LetterChoice((), partition, key, type_))
    decoder = Decoder(task.source)
    with LetterBox(task.settings, task.topic, timeout) as box:
        collected = collect(box, task.wanted, limit, settled=bool(task.wanted.positions))
        found = collected.letters
        _refuse_missing(task, found)
        _refuse_other_topic(task, collected)
        originals = originals_of(box, found)
    shown = [whole(letter, decoder, originals.get(letter.position)) for letter in found]
    emit(
        {"topic": task.topic, "letters": shown},
        json,
        lambda: Group(*(described(facts) for facts in shown)) if shown else Text("no open letters"),
    )


@app.command()
def replay(
    words: _Words = None,
    topic: _Topic = "",
    all_: _All = False,
    partition: _Partition = None,
    key: _Key = None,
    type_: _Type = None,
    limit: _Limit = 10_000,
    force: Annotated[bool, typer.Option("--force", help="Send letters that the source still cannot read.")] = False,
    yes: _Yes = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Send letters again to the topic and partition that they came from, in order, each exactly once.

    Key, value and headers are those of the record, without `__kes_dlq_*` headers; `__kes_origin` names the place of the
    first failure. Records and the note that their letters are settled are one transaction: the command can be repeated,
    also at the same time or after a crash. The source may be running.

    Nothing is sent if a selected letter cannot be sent: its topic is gone, a part of it was left out and is no longer
    in the source topic, or (with a source and without --force) the source could not read it.

    Exit codes: 0 sent, or all were settled before; 1 refused, not confirmed, or no broker answers; 2 wrong usage.
    """
    task = _understood(words, topic, bootstrap_servers, timeout, LetterChoice((), partition, key, type_))
    if task.source is not None and task.source.config.source_is_elsewhere:
        raise ConfigError(
            "the source topic is on another cluster than the dead letters: no transaction spans both, so a replay "
            "could send a letter twice. Send it with a tool of your own, then `kes dlq drop` it"
        )
    decoder = None if force or task.source is None else Decoder(task.source)

    def prepared(box: LetterBox, letters: list[Letter]) -> list[tuple[Letter, Output | None]]:
        originals = originals_of(box, letters)
        _refuse_problems(problems_of(box, letters, originals, decoder))
        return [(letter, resent(letter, record_of(originals.get(letter.position)))) for letter in letters]

    _settle(task, prepared, "sent again", limit, chosen=all_, yes=yes, json=json)


@app.command()
def drop(
    words: _Words = None,
    topic: _Topic = "",
    all_: _All = False,
    partition: _Partition = None,
    key: _Key = None,
    type_: _Type = None,
    limit: _Limit = 10_000,
    yes: _Yes = False,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Mark letters as settled without sending them. They stay in the topic until its retention deletes them.

    Exit codes: 0 dropped, or settled before; 1 not confirmed, or no broker answers; 2 wrong usage.
    """
    task = _understood(words, topic, bootstrap_servers, timeout, LetterChoice((), partition, key, type_))
    _settle(
        task, lambda box, letters: [(each, None) for each in letters], "dropped", limit, chosen=all_, yes=yes, json=json
    )


# -- choosing ----------------------------------------------------------------------------------------------------------


def _understood(words: list[str] | None, topic: str, servers: str, timeout: float, wanted: LetterChoice) -> _Task:
    positions = [position for word in words or () if (position := partition_offset_of(word)) is not None]
    names = [word for word in words or () if partition_offset_of(word) is None]
    if len(names) > 1:
        raise typer.BadParameter(f"{names[1]!r} is not PARTITION@OFFSET, as in 2@1473", param_hint="PARTITION@OFFSET")
    if bool(names) == bool(topic):
        raise typer.BadParameter(
            "name MODULE:SOURCE, or its dead-letter topic with --topic", param_hint="MODULE:SOURCE"
        )
    source = named_source(names[0]) if names else None
    config = None if source is None else source.config
    addresses = brokers(servers, config)
    settings = ClientSettings(addresses, client_settings_of(config), client_id="kes-dlq")
    await_listener(addresses, timeout)
    return _Task(
        source, settings, config.dead_letters if config else topic, wanted._replace(positions=positions), timeout
    )


def _refuse_missing(task: _Task, found: list[Letter]) -> None:
    missing = sorted(set(task.wanted.positions) - {letter.position for letter in found})
    if missing:
        raise OffsetError(f"{task.topic} has no dead letter at {', '.join(map(str, missing[:_MOST_NAMED]))}")


# -- settling ----------------------------------------------------------------------------------------------------------


def _settle(
    task: _Task,
    prepared: Callable[[LetterBox, list[Letter]], list[tuple[Letter, Output | None]]],
    deed: str,
    limit: int,
    *,
    chosen: bool,
    yes: bool,
    json: bool,
) -> None:
    if not chosen and not task.wanted.positions:
        raise typer.BadParameter("name letters by PARTITION@OFFSET, or use --all", param_hint="PARTITION@OFFSET")
    refuse_to_ask(json=json, yes=yes)
    with LetterBox(task.settings, task.topic, task.timeout) as box:
        if not yes:
            collected = _open_ones(task, box, limit)
            prepared(box, collected.letters)
            if collected.letters:
                print_whole(notices(), table_of(collected.letters))
                notices().print(Text(_counted(collected, len(collected.letters))))
                typer.confirm(f"{_letters(len(collected.letters))} will be {deed}. Continue?", abort=True, err=True)
            task = task._replace(wanted=task.wanted._replace(positions={each.position for each in collected.letters}))
        done, left, positions = 0, 0, []
        if yes or task.wanted.positions:
            with closing(
                box.settler(complain)
            ) as settler:  # from here on no other process settles letters, so look now
                collected = _open_ones(task, box, limit)
                pairs = prepared(box, collected.letters)
                positions = [str(letter.position) for letter in collected.letters]
                try:
                    done = settler.settle(pairs, collected.ranges)
                except TransactionFailed as error:
                    raise explained(error, task.topic) from error
                left = collected.open - done
    more = f"; {left:,} more are open" if left else ""
    emit(
        {"topic": task.topic, "settled": done, "left": left, "letters": positions},
        json,
        lambda: Text(f"{deed}: {_letters(done)}{more}" if done else "nothing to do: no selected letter is open"),
    )


def _open_ones(task: _Task, box: LetterBox, limit: int) -> ChosenLetters:
    """Look for the letters that are chosen and open. Raises ``OffsetError`` for a position without a letter."""
    by_position = bool(task.wanted.positions)
    collected = collect(box, task.wanted, _NO_LIMIT if by_position else limit, settled=by_position)
    _refuse_missing(task, collected.letters)
    _refuse_other_topic(task, collected)
    return collected._replace(letters=[letter for letter in collected.letters if not letter.is_settled])


def _refuse_other_topic(task: _Task, collected: ChosenLetters) -> None:
    """Raise ``TopicError`` for a topic of other records: they are no letters, and the note that some are settled would
    stop its readers."""
    is_known = task.source is not None or any(settled.ranges for settled in collected.ranges.values())
    if collected.letters and not is_known and not any(letter.facts for letter in collected.letters):
        raise TopicError(
            f"{task.topic} is not a dead-letter topic: {collected.letters[0].record.where} has no header "
            f"{PREFIX}*, nor has any other selected record"
        )


def _refuse_problems(problems: list[str]) -> None:
    if not problems:
        return
    for problem in problems[:_MOST_NAMED]:
        complain(harmless(problem))
    more = f" ({len(problems) - _MOST_NAMED} more)" if len(problems) > _MOST_NAMED else ""
    raise TopicError(
        f"{_letters(len(problems))} cannot be sent again{more}, so nothing is: fix the causes, select others, or "
        "drop them; --force sends what the source cannot read"
    )


def _counted(collected: ChosenLetters, shown: int) -> str:
    more = f", {shown:,} of them shown" if shown < collected.open else ""
    return f"open: {_letters(collected.open)}{more}" if collected.open else "no open letters"


def _letters(count: int) -> str:
    return f"{count:,} letter" + ("" if count == 1 else "s")
