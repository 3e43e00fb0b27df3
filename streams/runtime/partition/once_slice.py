"""A slice of plain handlers whose events are handled once, run back to back without an await.

The loop of ``plain_slice``, for records of one type, with the look at each event's id in front of its handler. An id is
known as soon as its event is complete, so a copy further on in the slice is found. They go to the table together at
its end, which is quicker. What ends the slice goes through ``Execution``: an event that cannot be read, a failure,
an id that is none, no room for a further id.
"""

from __future__ import annotations

import inspect
from typing import Any

from streams.core.origin import INTERJECTION
from streams.core.policy import Answered
from streams.core.router import Route
from streams.core.seen import BYTES_PER_ID, encode
from streams.model.tracing import carried
from streams.outcomes import ExecutionState
from streams.records import Change, IncomingRecord, Output
from streams.runtime.changelog import SEEN_PREFIX
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.failures import change_too_large, of_policy
from streams.runtime.partition.host import Host
from streams.runtime.partition.seen_ids import NOTE
from streams.runtime.partition.state import Partition


def run(
    rule: Any, partition: Partition, host: Host, route: Route, records: list[IncomingRecord], start: int, stop: int
) -> tuple[int, BaseException | None]:
    """Handle and admit records from ``start`` up to ``stop``, as ``plain_slice.run``. The store journals."""
    store, timers, seen, where = partition.store, partition.timers, partition.seen, partition.reading
    before_event, limit, tracer = partition.before_event, host.message_limit, host.router.tracer
    decode, handler, current, headers = route.bare_decode, route.handler, host.router.current, records[start].headers
    id_of, digest_of, has, room = rule.id_of, rule.digest_of, seen.rows.has, seen.room
    outputs: list[Output] = []
    journal: list[Change] = []
    passed: list[IncomingRecord] = []
    value_of_id = encode(timers.now_ms() // 1000 + 1 + rule.within_s)
    new: dict[bytes, Change] = {}  # the records of ids
    sent = written = missing = recorded = 0  # so many of them are of events that are complete
    position = start
    failure: BaseException | None = None
    store.begin(journal)
    try:
        while position < stop:
            record = records[position]
            if record.headers is not headers:
                if current(record.headers) is not route:
                    break
                headers = record.headers
            if tracer is not None and carried(headers):
                break  # Execution.one begins its span
            value = record.value
            if value is None or room <= 0:
                break
            try:
                event = decode(value)
                id = id_of(record, event)
                digest = None if id is None else digest_of(id)
            except Exception:
                break  # done again by Execution.one, which handles the error
            if digest is None:
                missing += 1
            elif digest in new or has(digest):
                passed.append(record)
                position += 1
                continue
            offset = record.offset
            ctx: EventContext[Any] = EventContext(store, where, record, outputs, journal, limit, 1, timers, written)
            try:
                if before_event is not None:
                    before_event(ctx)
                answer = handler(ctx, event)
                if answer is not None and answer is not ExecutionState.COMPLETE:
                    if inspect.iscoroutine(answer):  # a plain function around an async one: nothing of it has run
                        answer.close()
                        route.is_async = True
                        break
                    raise Answered(answer, ctx._error)
                own = written
                while own < len(journal):
                    change = journal[own]
                    data = change.value
                    change.origin = offset
                    if data is not None and len(data) > limit:
                        raise change_too_large(change, limit)
                    own += 1
            except BaseException as error:
                failure = of_policy(error, ctx.where)
                break
            finally:
                ctx._closed = True
            kept = value_of_id
            if ctx._timer_changes:
                note = ctx._timer_changes.pop(NOTE, None)
                if note is not None:  # of ``keep_reply``
                    kept += note.value
                    room -= 1 + len(kept) // BYTES_PER_ID
                if ctx._timer_changes:
                    journal += timers.admitted(ctx._timer_changes, offset)
            if digest is not None:
                new[digest] = change = Change(SEEN_PREFIX + digest, kept, origin=offset)
                journal.append(change)
                room -= 1
            # One statement: an interrupt between two would leave the marks of different events.
            position, sent, written, recorded = position + 1, len(outputs), len(journal), len(new)
    finally:
        store.end()
        if len(journal) > written:
            store.undo(journal[written:])
        if position > start:
            route.handled += position - start - len(passed)
            del outputs[sent:], journal[written:]  # what the failed event has left
            if len(new) > recorded:  # of the event that an interrupt has ended
                new.popitem()
            seen.rows.set_new(new, value_of_id)
            journal += seen.forget(recorded, INTERJECTION)
            partition.watermark = records[position - 1].offset + 1
            host.pool.admit(partition.partition, partition.watermark, outputs, journal, events=position - start)
    if missing:
        rule.unfiltered(partition, host, route, missing)
    if passed:
        rule.passed(partition, host, route, passed)
    return position, failure
