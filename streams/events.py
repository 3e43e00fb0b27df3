"""Event types: a class, its name and version on the wire, and the steps from older versions to the present one.

    @event_type("Deposited", version=2)
    class Deposited(msgspec.Struct, frozen=True):
        account: str
        cents: int
        currency: str

    @upcaster(Deposited, from_version=1)
    def add_currency(old: dict[str, Any]) -> dict[str, Any]:
        return old | {"currency": "EUR"}

The name travels in the header ``__grt__``, the version in ``__grv__`` (left out when it is 1). Data from the wire is
only looked up and decoded, never imported or executed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Set
from typing import Any, Final, Generic, TypeVar, cast, overload

import msgspec

from streams.codecs import codec_for, is_pydantic
from streams.errors import ConfigError, DecodeError, EncodeError, RegistrationError
from streams.model.reasons import reason
from streams.model.round_trips import Kinds
from streams.model.shortcuts import Shortcut, bare_decoder, encoder_of, shortcut_of
from streams.protocols import Codec
from streams.records import TYPE_HEADER, VERSION_HEADER, Headers, Record
from streams.sak.users_code import calling_location, location_of

T = TypeVar("T")
Upcaster = Callable[[dict[str, Any]], Any]
Parts = list[tuple[type[Any] | str, dict[str, Any]]]
"""Events that an upcaster has made of one: the class or the name of each, and its dict."""
U = TypeVar("U", bound=Upcaster)

MOST_PARTS: Final = 10_000
"""Events that upcasters make of one, at most."""
LONGEST_NAME: Final = 255
"""Bytes of an event's name, at most: it travels with every record."""


class EventType(Generic[T]):
    """One event class as the wire knows it. Made by ``event_type_of``, one per class, never changed afterwards.

    ``headers`` is shared by all records of the type: copy it before adding to it. May be used from any thread.
    """

    __slots__ = (
        "_codec",
        "_decode",
        "_upcasters",
        "bare_decode",
        "bare_encode",
        "cls",
        "encode",
        "headers",
        "kinds",
        "name",
        "names",
        "splits",
        "version",
    )

    def __init__(
        self,
        cls: type[T],
        name: str,
        version: int,
        codec: Codec[T],
        upcasters: dict[int, Upcaster],
        aliases: Iterable[str] = (),
        splits: Set[int] = frozenset(),
    ) -> None:
        self.cls = cls
        self.name = name
        self.names = (name, *aliases)
        """The name that is written, and those that are read besides."""
        self.splits = splits
        """The versions whose upcaster makes several events, or none."""
        self.version = version
        self.headers: Headers = [(TYPE_HEADER, name.encode())]
        if version > 1:
            self.headers.append((VERSION_HEADER, b"%d" % version))
        self._codec = codec
        self._upcasters = upcasters
        self._decode = codec.decode
        self.bare_decode = bare_decoder(codec)
        """``decode`` of a value of the present version, for hot paths: see ``shortcuts.bare_decoder``."""
        careful = encoder_of(codec)
        found = shortcut_of(codec)
        has_shortcut = found.of is cls
        self.encode: Callable[[T], bytes] = _by_shortcut(found, careful) if has_shortcut else careful
        """The event as bytes of the present version. Raises ``EncodeError``."""
        self.bare_encode: Callable[[T], bytes] = found.encode if has_shortcut else careful
        """``encode`` for hot paths, with ``kinds``: see ``shortcuts.Shortcut``; or just ``encode``."""
        self.kinds: Kinds = found.kinds if has_shortcut else ()

    @property
    def codec(self) -> Codec[T]:
        """The codec of the present version."""
        return self._codec

    def __repr__(self) -> str:
        return f"EventType({self.name!r}, version={self.version})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the class only: another process looks it up, and has its declaration there."""
        return event_type_of, (self.cls,)

    def decode(self, value: bytes | None, version: int = 1) -> T:
        """Decode an event and bring it up to the present version. Raises ``DecodeError``, and nothing else."""
        if version != self.version or value is None:
            return self._decode_other(value, version)
        return self._decode(value)

    def _decode_other(self, value: bytes | None, version: int) -> T:
        if value is None:
            raise DecodeError(f"{self.name}: the value is null; an event has a value")
        if not 1 <= version < self.version:
            raise DecodeError(
                f"{self.name} version {version} is newer than version {self.version}, the newest known here; "
                "update this program before the writers"
                if version > self.version
                else f"{self.name} version {version}: versions start at 1"
            )
        codec: Any = self._codec
        plain = codec.decode_dict(value)
        for step in range(version, self.version):
            if step in self.splits:
                raise DecodeError(
                    f"{self.name}: the upcaster from version {step} makes several events of one, which only an event "
                    "source handles"
                )
            plain = self._upcast(plain, step)
        return cast(T, codec.from_dict(plain))

    def parts(self, value: bytes | None, version: int) -> Parts:
        """Return what the upcasters make of a value of an older version, each event of its present version. Raises
        ``DecodeError``."""
        if value is None or not 1 <= version < self.version:
            self._decode_other(value, version)  # which says why not
        codec: Any = self._codec
        done: Parts = []
        self._bring_up(codec.decode_dict(value), version, done)
        return done

    def _bring_up(self, plain: dict[str, Any], version: int, done: Parts) -> None:
        for step in range(version, self.version):
            plain = self._upcast(plain, step)
            if step in self.splits:
                parts: Parts = self._checked_parts(plain, step)
                for target, part in parts:
                    if target is self.cls or target in self.names:  # of the next version, and goes on from there
                        self._bring_up(part, step + 1, done)
                    else:
                        done.append((target, part))
                if len(done) > MOST_PARTS:
                    raise DecodeError(f"{self.name}: upcasters make more than {MOST_PARTS} events of one")
                return
        done.append((self.cls, plain))

    def _checked_parts(self, given: Any, step: int) -> Parts:
        parts = [part for part in given if isinstance(part, tuple) and len(part) == 2]
        if len(parts) != len(given) or not all(isinstance(part[0], type | str) for part in parts):
            raise DecodeError(
                f"{self.name}: the upcaster from version {step} returned something else than (class or name, dict)"
            )
        return parts

    def _upcast(self, plain: dict[str, Any], step: int) -> Any:
        upcast = self._upcasters.get(step)
        if upcast is None:
            raise DecodeError(
                f"{self.name} version {step} is older than version {self.version}, and there is no upcaster for it: "
                f"@upcaster({self.cls.__name__}, from_version={step})"
            )
        try:
            result = upcast(plain)
        except (MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a cancellation, too, which would end the partition's task
            raise DecodeError(f"{self.name}: the upcaster from version {step} failed: {reason(error)}") from error
        wanted = list if step in self.splits else dict
        if not isinstance(result, wanted):
            raise DecodeError(
                f"{self.name}: the upcaster from version {step} returned {type(result).__name__}, not a "
                f"{wanted.__name__}"
            )
        return result


class _Declaration(msgspec.Struct):
    """Arguments of the decorator. The codec is built at first use, when all names in annotations are defined."""

    name: str
    version: int
    codec: Any
    upcasters: dict[int, Upcaster]
    allow_lossy: Collection[str] = ()
    aliases: tuple[str, ...] = ()
    splits: set[int] = set()


_declared: Final[dict[type, _Declaration]] = {}
_ready: Final[dict[type, EventType[Any]]] = {}


@overload
def event_type(cls: type[T], /) -> type[T]: ...


@overload
def event_type(
    name: str | None = None,
    /,
    *,
    version: int = 1,
    codec: Codec[Any] | None = None,
    allow_lossy: Collection[str] = (),
    aliases: tuple[str, ...] = (),
) -> Callable[[type[T]], type[T]]: ...


def event_type(
    name: type[T] | str | None = None,
    /,
    *,
    version: int = 1,
    codec: Codec[Any] | None = None,
    allow_lossy: Collection[str] = (),
    aliases: tuple[str, ...] = (),
) -> type[T] | Callable[[type[T]], type[T]]:
    """Declare an event class: its name on the wire (default: the class's), version (default 1) and codec. May stand
    without brackets.

    The codec is JSON unless given; a class that is no dataclass, ``msgspec.Struct`` or pydantic model needs one. Put
    it above ``@dataclass``. ``aliases`` are further names that are read, and never written. ``allow_lossy`` is handed
    to ``codec_for``, which makes the codec. Raises ``RegistrationError``. Two classes may have one name: one event
    source takes only one of them.
    """
    if isinstance(name, type):
        return _declare(name, name.__name__, version, codec, allow_lossy, aliases)

    def decorate(cls: type[T]) -> type[T]:
        return _declare(cls, cls.__name__ if name is None else name, version, codec, allow_lossy, aliases)

    return decorate


def _declare(
    cls: type[T],
    name: str,
    version: int,
    codec: Codec[Any] | None,
    allow_lossy: Collection[str],
    aliases: tuple[str, ...],
) -> type[T]:
    if cls in _declared:
        raise RegistrationError(f"{cls.__qualname__} is an event type already: {_declared[cls].name!r}")
    if cls in _ready:
        raise RegistrationError(f"{cls.__qualname__} was used as an event before @event_type was applied to it")
    for each in (name, *_checked_aliases(cls, name, aliases)):
        _check_name(cls, each)
    if type(version) is not int or version < 1:
        raise RegistrationError(f"{cls.__qualname__}: version={version!r}; versions are integers from 1")
    if codec is None:
        _check_class(cls)
    _declared[cls] = _Declaration(name, version, codec, {}, allow_lossy, aliases, set())
    return cls


def _checked_aliases(cls: type, name: str, aliases: Any) -> tuple[str, ...]:
    is_fine = isinstance(aliases, tuple) and all(isinstance(alias, str) for alias in aliases)
    if not is_fine or len({name, *aliases}) <= len(aliases):
        raise RegistrationError(
            f"{cls.__qualname__}: aliases={aliases!r}; they are a tuple of further names, each once, and not {name!r}"
        )
    checked: tuple[str, ...] = aliases
    return checked


def _check_name(cls: type, name: str) -> None:
    try:
        fits = 0 < len(name.encode()) <= LONGEST_NAME and name.isprintable()
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise RegistrationError(
            f"{cls.__qualname__}: an event's name has 1 to {LONGEST_NAME} printable bytes of UTF-8, not {name[:60]!r}"
        )


def _check_class(cls: type) -> None:
    if not (issubclass(cls, msgspec.Struct) or is_pydantic(cls) or "__dataclass_params__" in vars(cls)):
        raise RegistrationError(
            f"{cls.__qualname__}{calling_location()} is no dataclass, msgspec.Struct or pydantic model: make it one of "
            "them (@event_type stands above @dataclass), or give a codec: @event_type(codec=...)"
        )


def upcaster(cls: type, *, from_version: int, many: bool = False) -> Callable[[U], U]:
    """Register a function as the step from one version of an event to the next. It gets the decoded dict, and may
    change it.

    ``many=True``: it returns a list of (class or name of an event type, dict) instead: several events, or none. An
    event source handles them one after the other as one event: they take effect together or not at all. A dict of the
    class itself is of the next version; others are of the present versions of their classes. Handlers of such events,
    and of their parts, have their turn: no ``concurrency=``, ``batch=`` or ``blocking=``.

    Steps are chained up to the class's version. Raises ``RegistrationError`` if the class is not declared with a higher
    version, if the step exists already, or if the class's codec has no dict form (JSON, msgpack and pydantic have one).
    """
    declaration = _declared.get(cls)
    if declaration is None:
        raise RegistrationError(f"{cls.__qualname__} has no versions: apply @event_type(version=...) to it first")
    if type(from_version) is not int or not 1 <= from_version < declaration.version:
        raise RegistrationError(
            f"upcasters of {declaration.name} start from version 1 to {declaration.version - 1}, not {from_version!r}"
        )
    if declaration.codec is not None and not hasattr(declaration.codec, "decode_dict"):
        raise RegistrationError(f"the codec of {declaration.name} has no dict form that an upcaster could work on")
    steps = declaration.upcasters

    def register(function: U) -> U:
        if from_version in steps:
            raise RegistrationError(f"{declaration.name} has an upcaster from version {from_version} already")
        steps[from_version] = function
        if many:
            declaration.splits.add(from_version)
        return function

    return register


def _by_shortcut(shortcut: Shortcut, careful: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Return a function that encodes as ``careful`` does, at half its price where the shortcut serves."""
    bare, cls, kinds = shortcut

    def encode(event: Any) -> bytes:
        if event.__class__ is cls:
            try:
                value = bare(event)
                # As in ``Table.put`` and ``ctx.forward``: written out, since this runs once a value.
                for name, kind, others in kinds:
                    part = getattr(event, name)
                    found = type(part)
                    if found is not kind:
                        if found in others:
                            continue
                    elif kind is not float or part - part == 0.0:  # finite
                        continue
                    return careful(event)  # which reads it back
                return value
            except Exception:  # the careful one finds the right words
                pass
        return careful(event)

    return encode


def event_type_of(cls: type[T]) -> EventType[T]:
    """Return the event type of a class; one dict lookup after the first call.

    Dataclasses, structs and pydantic models without ``@event_type`` get their own name and version 1. Raises
    ``RegistrationError`` for other classes, and for those whose fields cannot be decoded. A subclass is a type of its
    own.
    """
    found = _ready.get(cls)
    return _prepare(cls) if found is None else found


def needy_codecs() -> list[Any]:
    """Return the codecs of declared events that need something before a start (``formats.schema_codecs``)."""
    needy = [cls for cls, declaration in _declared.items() if hasattr(declaration.codec, "for_event")]
    return [event_type_of(cls).codec for cls in needy]


known_type: Final[Callable[[type], EventType[Any] | None]] = _ready.get
"""``event_type_of`` for hot paths: ``None`` for a class that was never looked up."""


def to_record(
    topic: str,
    event: object,
    /,
    *,
    key: str | bytes | None = None,
    headers: Iterable[tuple[str, bytes | None]] = (),
    partition: int | None = None,
    timestamp_ms: int | None = None,
) -> Record:
    """Make the record of an event object, with its type header, as ``ctx.forward`` does.

    Raises ``EncodeError`` and ``RegistrationError`` (not an event class).
    """
    kind = known_type(type(event)) or event_type_of(type(event))
    if isinstance(key, str):
        try:
            key = key.encode()
        except UnicodeEncodeError as error:
            raise EncodeError(f"the key for {topic} has no form in UTF-8: {error}") from None
    elif key is not None and not isinstance(key, bytes):
        raise EncodeError(
            f"the key for {topic} is a {type(key).__name__}; use str, bytes or None, or encode it yourself"
        )
    more = [*kind.headers, *headers] if headers else kind.headers
    return Record(topic, kind.encode(event), key, more, partition, timestamp_ms)


def _prepare(cls: type[T]) -> EventType[T]:
    if not isinstance(cls, type):
        raise RegistrationError(
            f"{getattr(cls, '__qualname__', repr(cls))}{location_of(cls)} is no class, as an event type must be. A "
            "decorator that registers a handler names the class: @source.register_event_type(Deposited), or takes it "
            "from the handler's annotation: @source.on"
        )
    declaration = _declared.get(cls)
    if declaration is None:
        _check_class(cls)
        _check_name(cls, cls.__name__)
        declaration = _Declaration(cls.__name__, 1, None, {})
    try:
        codec: Codec[T] = declaration.codec or codec_for(cls, allow_lossy=declaration.allow_lossy)
        if bind := getattr(codec, "for_event", None):  # it is of no class yet (formats.schema_codecs)
            codec = bind(cls, declaration.name, declaration.version)
    except ConfigError as error:
        raise RegistrationError(f"event type {declaration.name}: {error}") from error
    known = declaration
    made = EventType(cls, known.name, known.version, codec, known.upcasters, known.aliases, known.splits)
    return _ready.setdefault(cls, made)


def parse_version(header: bytes | None) -> int:
    """Parse the version in a ``__grv__`` header: decimal digits, from 1. Raises ``DecodeError``. Not called without a
    header.
    """
    if header is None or not header.isdigit() or len(header) > 9 or (version := int(header)) < 1:
        raise DecodeError(f"header {VERSION_HEADER}: decimal digits from 1 expected, got {(header or b'null')[:20]!r}")
    return version
