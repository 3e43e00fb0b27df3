"""The classes of Kafka's messages: attributes that say which bytes they are, and in which versions.

``streams/kafka/wire/schemas`` has the classes, ``streams/kafka/wire/codec.py`` writes and reads them.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar
from uuid import UUID

import msgspec

NEWEST: Final = 32767
"""The last version of a field that is still in use."""
_EMPTY: Final[dict[str, object]] = {
    **dict.fromkeys(("int8", "int16", "uint16", "int32", "int64"), 0),
    "float64": 0.0,
    "bool": False,
    "uuid": UUID(int=0),
    "string": "",
    "bytes": b"",
    "records": b"",
}


class WireField(NamedTuple):
    """One field of a message: its name, Kafka's name of its type (``[]`` before it: an array), and the versions that
    have it, that may have null in its place, and that have it among the tagged fields under ``tag`` (-1: none)."""

    name: str
    type: str
    first: int = 0
    last: int = NEWEST
    default: object = msgspec.UNSET
    nullable_from: int = NEWEST + 1
    tag: int = -1
    tagged_from: int = NEWEST + 1

    def value(self, structs: dict[str, Any]) -> object:
        """Return what the attribute is where nothing was given: its default, else what is empty for its type."""
        if self.default is not msgspec.UNSET:
            return self.default
        if self.type in _EMPTY:
            return _EMPTY[self.type]
        return msgspec.field(default_factory=list if self.type.startswith("[]") else structs[self.type])


def wire(kind: str, first: int = 0, **more: Any) -> Any:
    """Declare an attribute of a message: a ``WireField`` that gets its name from the class."""
    return WireField("", kind, first, **more)


class MessageMeta(msgspec.StructMeta):
    """Makes the table of fields from the attributes of a message, and leaves their defaults to msgspec."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> MessageMeta:
        fields = [item._replace(name=key) for key, item in namespace.items() if isinstance(item, WireField)]
        values = {field.name: field.value(namespace) for field in fields}
        return super().__new__(mcls, name, bases, {**namespace, **values, "FIELDS": tuple(fields)}, **options)


class Message(msgspec.Struct, metaclass=MessageMeta, kw_only=True):
    """A message, or a struct within one."""

    FIELDS: ClassVar[tuple[WireField, ...]] = ()
    """In the order of the bytes."""
    FLEXIBLE_FROM: ClassVar[int] = NEWEST + 1
    """The first version with compact lengths and tagged fields. Structs within a message follow the message."""


AnswerT = TypeVar("AnswerT", bound=Message)
MessageT = TypeVar("MessageT", bound=Message)


class Request(Message, Generic[AnswerT], kw_only=True):
    """A request; ``AnswerT`` is the class of its answer."""

    API_KEY: ClassVar[int] = -1
    ANSWER: ClassVar[type[Message]] = Message
    FIRST_VERSION: ClassVar[int] = 0
    LAST_VERSION: ClassVar[int] = 0


def is_flexible(kind: type[Message], version: int) -> bool:
    """Check whether a version of a message has compact lengths and tagged fields; so does the head of a request."""
    return version >= kind.FLEXIBLE_FROM


def api_name(request: Request[AnswerT]) -> str:
    """Return Kafka's name of a request, without ``Request``."""
    return type(request).__name__.removesuffix("Request")
