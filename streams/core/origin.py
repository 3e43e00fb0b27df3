"""The origin of an effect: which work of a partition has sent a record or changed a store.

Every output and every change carries its origin, so that a record that the broker refuses is traced back to the event
that sent it. Two origins are made per event, so an origin is one integer. This module alone knows the ranges:

* an event: its offset, below 2**52; of a source's further inputs plus the input's number (1, 2 ...) times
  ``OF_EACH_INPUT``, 2**52;
* an interjection: -1;
* the event of a timer: a hash of its name and time, below -1;
* the event of a visited key: a hash of the run and the key, below those of timers; so is that of a window that closes;
* an attempt at the head of a parked key's queue: a hash of the event and the attempt, below those of visits;
  so is that of a job's end;
* a batch of several events: 2**62 plus the origin of the last one.
"""

from __future__ import annotations

import hashlib
from typing import Final, TypeAlias

Origin: TypeAlias = int

INTERJECTION: Final[Origin] = -1
OF_EACH_INPUT: Final = 1 << 52
"""The distance between the origins of two inputs' events at one offset. Offsets are smaller."""
_FIRST_BATCH: Final = 1 << 62
_HASH_BYTES: Final = 7
"""Bytes of the hash that names the event of a timer, or of a visited key."""
_FIRST_VISIT: Final = -2 - (1 << 8 * _HASH_BYTES)
_FIRST_PARKED: Final = _FIRST_VISIT - (1 << 8 * _HASH_BYTES)


def timer_origin(due_ms: int, name: str, by: Origin = 0) -> Origin:
    """Return the origin of a timer's event: the same after a restart, another one once the timer is set for another
    time, or by another event."""
    # With the time and what has set it: a timer that is set again under its name is another event, with attempts and
    # CloudEvents of its own.
    text = f"{due_ms} {name} {by}" if by else f"{due_ms} {name}"
    digest = hashlib.blake2b(text.encode(), digest_size=_HASH_BYTES).digest()
    return -2 - int.from_bytes(digest)


def visit_origin(run: str, key: bytes) -> Origin:
    """Return the origin of a visited key's event: the same after a restart, another one in the next run."""
    digest = hashlib.blake2b(key, digest_size=_HASH_BYTES, salt=hashlib.blake2b(run.encode(), digest_size=16).digest())
    return _FIRST_VISIT - int.from_bytes(digest.digest())


def window_origin(name: str, key: bytes, start_ms: int, end_ms: int) -> Origin:
    """Return the origin of a window that closes: the same after a restart. Like a visited key it comes once."""
    return visit_origin(f"window {name} {start_ms} {end_ms}", key)


def parked_origin(place: str, attempts: int) -> Origin:
    """Return the origin of the effects of a parked event of a partition, behind so many failed attempts: the same after
    a restart."""
    # Not by its number in the queue: a key that is parked again begins with 0 again, and a failure that is known from
    # before would be taken for that of another event. And each attempt fails for itself.
    digest = hashlib.blake2b(f"{place} {attempts}".encode(), digest_size=_HASH_BYTES).digest()
    return _FIRST_PARKED - int.from_bytes(digest)


def batch_origin(last: int) -> Origin:
    """Return the origin of several events that one call handles, the last one at this offset."""
    return _FIRST_BATCH + last


def batch_end(origin: Origin) -> int:
    """Return the offset of a batch's last event."""
    return origin - _FIRST_BATCH


def in_input(number: int, origin: Origin) -> Origin:
    """Return the origin of an event or a batch, made of its offset, in the input at this place. All others belong to
    no input, and stay as they are."""
    return origin + number * OF_EACH_INPUT if origin >= 0 else origin


def input_and_offset(origin: Origin) -> tuple[int, int]:
    """Return the place of an event's input, and its offset there."""
    return divmod(origin, OF_EACH_INPUT)


def input_of(origin: Origin) -> int:
    """Return the place of the input of an event or a batch; 0 for all others."""
    return input_and_offset(batch_end(origin) if is_batch(origin) else origin)[0] if origin >= 0 else 0


def is_event(origin: Origin) -> bool:
    """Check for one event with an input record."""
    return 0 <= origin < _FIRST_BATCH


def is_interjection(origin: Origin) -> bool:
    """Check for an interjection; which one is not known."""
    return origin == INTERJECTION


def is_timer(origin: Origin) -> bool:
    """Check for the event of a timer, of a visited key, or of a parked one."""
    return origin < INTERJECTION


def is_visit(origin: Origin) -> bool:
    """Check for the event of a visited key, or of a parked one."""
    return origin <= _FIRST_VISIT


def is_batch(origin: Origin) -> bool:
    """Check for several events: none of them is to blame before they are handled one by one."""
    return origin >= _FIRST_BATCH


def describe(origin: Origin, partition: object) -> str:
    """Name the origin in an error message; ``partition``: ``topic[number]``, with the topic of its input."""
    if is_batch(origin):
        return f"the batch of events of {partition} that ends at offset {input_and_offset(batch_end(origin))[1]}"
    if is_event(origin):
        return f"the event {partition}@{input_and_offset(origin)[1]}"
    return f"an interjection, a timer, a job, a visit, or a parked event, of {partition}"
