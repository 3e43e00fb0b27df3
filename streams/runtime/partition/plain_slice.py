"""A slice of plain handlers, run back to back without an await. A leaf (``sak/leaves.py``).

Why the loop looks as it does:

* The whole slice has one journal and one list of outputs, and is admitted once. An event's part begins at a mark
  (``written``, ``sent``); an event that fails is undone from there, and the complete ones before it are admitted.
  Nothing else runs in between, so the result is the same as with events that are admitted one by one.
* Everything is a local name, and every call of Python per event is one that the user could notice if it were missing.
  Functions that are kept in attributes (``route.handler``) are local names too: called as attributes they cost 130
  instructions more on Python 3.11, which takes them for methods.
* A record of a joined table without update handler has its turn in the slice, too (``HandlerKind.keep``).
* So has one whose key is parked: it is queued. Its place is known before the slice begins, so the others pay nothing:
  a key is parked, or opens, between two slices.
* Events that are handled once (``once=``) have their ids looked at in front of their handlers. An id counts from there
  on, so a copy further on in the slice is found; the ids of a slice go to the table together, at its end. That of an
  event that has failed is the last one, and does not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

from streams.core.policy import Answered
from streams.core.router import type_and_version
from streams.core.runs import Run, name_input
from streams.core.seen import encode
from streams.model.tracing import carried
from streams.outcomes import ExecutionState
from streams.records import TYPE_HEADER, Change, IncomingRecord, Output
from streams.runtime.changelog import SEEN_PREFIX
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.failures import RestartNeeded, change_too_large, of_policy
from streams.runtime.partition.host import Host
from streams.runtime.partition.merged_inputs import MergedInputs
from streams.runtime.partition.seen_ids import NOTE
from streams.runtime.partition.state import Partition
from streams.sak import leaves

CLASSES: Final = (Change, EventContext, IncomingRecord)
"""Whose fields are read by their places in memory when this is compiled. Contexts are only made that way: a handler may
have done anything to its own, so that is read like any object."""


def run(
    partition: Partition,
    host: Host,
    records: list[IncomingRecord],
    start: int,
    stop: int,
    inputs: MergedInputs | None = None,
    runs: Sequence[Run] = (),
    parked: Sequence[int] = (),
    queue: Callable[[IncomingRecord], list[Change] | None] | None = None,
) -> tuple[int, BaseException | None]:
    """Handle and admit records from ``start`` up to ``stop``. Returns the position of the first that was not handled;
    and if that one ended the slice because its handler failed, why. With ``inputs`` the records are theirs, from the
    first of ``runs`` on; else they are of the input that has its turn. ``parked``: the places of those whose keys are
    parked (with one input); ``queue`` returns the changes that let one wait, ``None``: it cannot wait here."""
    store, journalled, timers = partition.store, partition.is_journalled, partition.timers
    before_event = partition.before_event
    routes, limit, where = host.router.routes, host.message_limit, partition.reading
    tracer = host.router.tracer
    headers: Any = routes  # of the record before: at first something that no headers are
    route: Any = None  # of these headers
    decode = handler = keep = once = once_route = id_of = digest_of = has = route
    # The ids of the slice, duplicates, and events without an id: made at its first event that has ``once``.
    new = passed = missing = once
    id_value, room = b"", 0
    digest: bytes | None = None
    outputs: list[Output] = []
    journal: list[Change] = []
    sent = written = 0  # so many of them are of events that are complete
    number = input_number = first_sent = first_written = 0  # of the run
    next_run, wheres = (parked[0] if parked else stop, []) if inputs is None else (start, inputs.wheres)
    known: list[Any] = [(headers, route, decode, handler, keep)] * len(wheres)  # of each input, as its last run left it
    position = since = start  # since then the events are of this route
    failure: BaseException | None = None
    # Events that have failed before are still to come: ``Execution`` gives each its known failure.
    if partition.failures.events:
        return start, None
    if journalled:
        store.begin(journal)
    try:
        while position < stop:
            if position == next_run:  # only with several inputs, or with parked keys
                if inputs is None:
                    queued = None if queue is None else queue(records[position])
                    if queued is None:
                        break
                    journal += queued
                    number += 1
                    next_run = parked[number] if number < len(parked) else stop
                    # In one unit with the position, as what is complete: an event that fails behind it takes none back.
                    position, written, since = position + 1, len(journal), since + 1  # it is not handled
                    continue
                if input_number:
                    name_input(input_number, outputs, first_sent, sent, journal, first_written, written)
                # Counted here and where the headers change, and so at no price where they do not.
                if route is not None:
                    route.handled += position - since
                since = position
                # Each input keeps the route of its headers, since runs of two inputs alternate.
                known[input_number] = headers, route, decode, handler, keep
                input_number, next_run, _, _ = runs[number]
                headers, route, decode, handler, keep = known[input_number]
                where, number, first_sent, first_written = wheres[input_number], number + 1, sent, written
            record = records[position]
            # Mostly the same tuple as that of the record before (``kafka.reading.received``): its handler is known.
            if record.headers is not headers:
                if route is not None:
                    route.handled += position - since
                since = position
                headers = record.headers
                if headers is not None and len(headers) == 1 and headers[0][0] == TYPE_HEADER:  # nearly always
                    name, version = headers[0][1], None
                elif tracer is not None and carried(headers):
                    break  # Execution.one begins its span
                else:
                    name, version = type_and_version(headers)
                route = routes.get(name or b"")
                if route is None or version != route.wire_version:
                    break
                if route.plain:
                    decode, handler, keep = route.bare_decode, route.handler, None
                elif route.kind is not None:
                    if (keep := route.kind.keep) is None:
                        break
                elif inputs is not None or not journalled or not route.is_plain_once:
                    break
                else:
                    if once_route is not route:
                        if once is None:
                            new, passed, missing = {}, [], []
                            has, room = partition.seen.rows.has, partition.seen.room
                        else:
                            once.count(partition, host, once_route, passed, missing)
                            passed, missing = [], []
                        once_route, once = route, route.once
                        id_of, digest_of = once.id_of, once.digest_of
                        id_value = encode(timers.now_ms() // 1000 + 1 + once.within_s)
                    decode, handler, keep = route.bare_decode, route.handler, once
            if keep is None:
                value = record.value
                if value is None:
                    break  # it is no event: Execution.one applies the policy for nulls
                try:
                    event = decode(value)
                except Exception:
                    break  # decoded again by Execution.one, which handles the error
                offset = record.offset
            elif keep is once:
                value = record.value
                if value is None or room <= 0:
                    break
                offset = record.offset
                try:
                    event = decode(value)
                    id = id_of(record, event)
                    digest = None if id is None else digest_of(id)
                except Exception:
                    break  # as above
                if digest is None:
                    missing.append(record)
                elif digest in new or has(digest):
                    passed.append(record)
                    position, since = position + 1, since + 1  # it is not handled
                    continue
                else:
                    new[digest] = Change(SEEN_PREFIX + digest, id_value, None, "", offset)
                    room -= 1
            else:
                try:
                    kept = keep(partition, record, limit)
                except Exception:
                    break  # as above
                if kept is not None:
                    journal.append(kept)
                # Complete: an event that fails behind it does not take the row back.
                position, written = position + 1, len(journal)
                continue
            ctx = EventContext(store, where, record, outputs, journal, limit, 1, timers, written)
            try:
                if before_event is not None:
                    before_event(ctx)
                answer = handler(ctx, event)
                if answer is not None and answer is not ExecutionState.COMPLETE:
                    # A plain function around an async one, which is known from now on. Nothing of it has run.
                    if inspect.iscoroutine(answer):
                        answer.close()
                        route.plain, route.is_async = False, True
                        failure = None if journalled else RestartNeeded(offset, 0, Answered(answer, None))
                        break
                    raise Answered(answer, ctx._error)
                own = written
                while own < len(journal):  # half the price of journal[written:]
                    change = journal[own]
                    data = change.value  # before ``origin`` is set: see sak/compiling.py
                    change.origin = offset
                    if data is not None and len(data) > limit:
                        raise change_too_large(change, limit)
                    own += 1
            except BaseException as error:
                failure = of_policy(error, ctx.where)
                break
            finally:
                ctx._closed = True
            if ctx._timer_changes:
                if keep is not None and (note := ctx._timer_changes.pop(NOTE, None)) is not None and digest is not None:
                    room -= once.keep(new[digest], note.value)  # of ``keep_reply``
                if ctx._timer_changes:
                    journal += timers.admitted(ctx._timer_changes, offset)
            # One statement: an interrupt between two would leave the marks of different events.
            position, sent, written = position + 1, len(outputs), len(journal)
    finally:
        if journalled:
            store.end()
            # Of the event that failed, or that an interrupt has ended: the complete ones before it stay.
            if len(journal) > written:
                store.undo(journal[written:])
        if position > start:
            if route is not None:
                route.handled += position - since
            del outputs[sent:], journal[written:]  # what the failed event has left
            if inputs is None:
                partition.watermark = records[position - 1].offset + 1
                if new and once is not None:
                    journal += once.recorded(partition, new, id_value)
                host.pool.admit(partition.partition, partition.watermark, outputs, journal, events=position - start)
            else:
                name_input(input_number, outputs, first_sent, sent, journal, first_written, written)
                reached, done = inputs.advance(records, runs, position)
                host.pool.admit(partition.partition, reached, outputs, journal, None, position - start, done)
    if once is not None:
        if missing and missing[-1].offset >= partition.watermark:  # its event has failed
            missing.pop()
        once.count(partition, host, once_route, passed, missing)
    return position, failure


leaves.use(globals())
