"""Messages between users, after goka's example: a block list, translations, and a detector of spam.

Four event sources. The tables of two are joined by a third, which filters and translates; the fourth counts what users
send and receive, by its loop, and has spammers blocked.

kes broker start
for name in blocker translator messages detector; do kes topics apply examples.messaging:$name; done
kes run examples.messaging:messages             (and each of the others)
kes state scan examples.messaging:blocker
"""

from __future__ import annotations

import msgspec

from streams import EventContext, EventSource, EventSourceConfig, Table, event_type

PARTITIONS = 4
SENT, RECEIVED, BLOCKS, WORDS = "messages-sent", "messages-received", "block-user", "translate-word"
LEAST_MESSAGES, MOST_SENT = 200, 0.5
"""A user with so many messages, of which this part or more is sent, is a spammer."""


@event_type("Message")
class Message(msgspec.Struct, frozen=True):
    """Sent under the key of the sender, received under that of the receiver."""

    sender: str
    receiver: str
    content: str


@event_type("UserBlocked")
class UserBlocked(msgspec.Struct, frozen=True):
    """A user's messages are dropped from now on, or no longer."""

    user: str
    is_blocked: bool = True


@event_type("WordTranslated")
class WordTranslated(msgspec.Struct, frozen=True):
    """A word in the messages that a user sends becomes another one."""

    user: str
    word: str
    translation: str


@event_type("Counted")
class Counted(msgspec.Struct, frozen=True):
    """A message on its way through the detector's loop, from the sender's partition to the receiver's."""

    receiver: str


def config(group_id: str, topic: str, *, loop: bool = False) -> EventSourceConfig:
    """Settings of one of the four: all topics have the same partitions, so that tables can be joined."""
    return EventSourceConfig(group_id=group_id, topic=topic, num_partitions=PARTITIONS, loop=loop)


# -- the block list ----------------------------------------------------------------------------------------------------

blocker = EventSource(config("blocker", BLOCKS), store=Table.factory(key=str, value=bool))


@blocker.on
def user_blocked(ctx: EventContext[Table[str, bool]], event: UserBlocked) -> None:
    ctx.store.put(event.user, event.is_blocked)


# -- translations ------------------------------------------------------------------------------------------------------

Dictionary = dict[str, str]
translator = EventSource(config("translator", WORDS), store=Table.factory(key=str, value=Dictionary))


@translator.on
def word_translated(ctx: EventContext[Table[str, Dictionary]], event: WordTranslated) -> None:
    ctx.store.put(event.user, {**ctx.store.get(event.user, {}), event.word: event.translation})


# -- the filter: a source without state of its own, which joins the tables of the two above ----------------------------

messages: EventSource[None] = EventSource(config("messages", SENT))
block_list = messages.join(blocker.config.changelog, key=str, value=bool)
dictionaries = messages.join(translator.config.changelog, key=str, value=Dictionary)


@messages.on
def message_sent(ctx: EventContext[None], event: Message) -> None:
    if ctx.joined(block_list).get(event.sender):
        return
    words = ctx.joined(dictionaries).get(event.sender, {})
    content = " ".join(words.get(word, word) for word in event.content.split(" "))
    ctx.forward(RECEIVED, Message(event.sender, event.receiver, content), key=event.receiver)


# -- the detector ------------------------------------------------------------------------------------------------------


class Counts(msgspec.Struct):
    """State of one user."""

    sent: int = 0
    received: int = 0
    is_spammer: bool = False


detector = EventSource(config("detector", SENT, loop=True), store=Table.factory(key=str, value=Counts))
Detecting = EventContext[Table[str, Counts]]


@detector.on
def count_sent(ctx: Detecting, event: Message) -> None:
    counts = ctx.store.get(event.sender) or Counts()
    counts.sent += 1
    keep(ctx, event.sender, counts)
    ctx.loop(Counted(event.receiver), key=event.receiver)


@detector.on
def count_received(ctx: Detecting, event: Counted) -> None:
    counts = ctx.store.get(event.receiver) or Counts()
    counts.received += 1
    keep(ctx, event.receiver, counts)


def keep(ctx: Detecting, user: str, counts: Counts) -> None:
    """Store the counts of a user, and have a new spammer blocked: once, over any crash."""
    total = counts.sent + counts.received
    if not counts.is_spammer and total >= LEAST_MESSAGES and counts.sent >= MOST_SENT * total:
        counts.is_spammer = True
        ctx.forward(BLOCKS, UserBlocked(user), key=user)
    ctx.store.put(user, counts)
