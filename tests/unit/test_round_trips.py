"""What codecs write comes back, or is refused: the type when it is declared, a value when it is written."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, TypeVar, cast
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from msgspec import Meta, Raw
from pydantic import AliasChoices, AliasGenerator, AliasPath, BaseModel, ConfigDict, Field, Json, SecretBytes, SecretStr

from streams import DEAD_LETTER, STOP, EventContext, EventSource, EventSourceConfig, Retry, Table
from streams.codecs import JsonCodec, MsgpackCodec, PydanticCodec, codec_for
from streams.errors import ConfigError, EncodeError, EventFailure, RegistrationError, StateUnreadable
from streams.events import EventType, event_type_of
from streams.records import Change, TopicPartition
from streams.testing import TestDriver
from tests.unit.handlers_kit import letters
from tests.vocabulary import Added

T = TypeVar("T")
SECONDS = timezone(timedelta(minutes=19, seconds=32))  # Amsterdam before 1937
LONG = 2**53 + 1


class Base(msgspec.Struct):
    n: int = 0


class Sub(Base):
    more: int = 1


@dataclasses.dataclass
class Counted:
    n: int = 0
    name: str = ""


class Omits(msgspec.Struct, omit_defaults=True):
    n: list[int] = []
    b: bool = True


class Pair(msgspec.Struct, Generic[T], omit_defaults=True):
    one: T
    more: list[T] = []
    b: bool = True

    def __post_init__(self) -> None:
        if self.more:
            raise ValueError("there is more")


class Even(msgspec.Struct):
    n: int = 0

    def __post_init__(self) -> None:
        if self.n % 2:
            raise ValueError("odd")


def struct(**fields: Any) -> type[Any]:
    return msgspec.defstruct("S", list(fields.items()), kw_only=True)


def changed(value: Any, **fields: Any) -> Any:
    for name, field in fields.items():
        setattr(value, name, field)
    return value


# The type, the value (of its fields, or itself), and the field that the error names; "": it comes back.
VALUES: list[tuple[Any, Any, str]] = [
    (struct(n=int), {"n": 5}, ""),
    (struct(n=int), {"n": 2**60}, ""),
    (struct(n=int), {"n": True}, "n"),
    (struct(n=int, b=bool), {"n": False, "b": True}, "n"),
    (struct(n=int, b=bool), {"n": 1, "b": True}, ""),
    (struct(n=int | None), {"n": None}, ""),
    (struct(n=int | None), {"n": True}, "n"),
    (struct(n=list[int]), {"n": [1, True]}, "n"),
    (struct(n=list[int], b=bool), {"n": [1, True], "b": True}, "n"),
    (struct(n=list[int], b=bool, s=str), {"n": [1, 0], "b": True, "s": "true"}, ""),
    (struct(n=list[int], b=bool, s=str), {"n": [1, True], "b": False, "s": "true"}, "n"),
    (struct(n=list[int], b=bool | None), {"n": [1, True], "b": None}, "n"),
    (Omits, Omits(n=[True]), "n"),  # one boolean is written, and b is not
    (Omits, Omits(n=[1]), ""),
    (struct(n=dict[str, int]), {"n": {"true": 1}}, ""),
    (struct(n=dict[str, int]), {"n": {"a": False}}, "n"),
    (struct(n=int | bool), {"n": True}, ""),
    (struct(n=int | str | None), {"n": "a"}, ""),
    (struct(n=int | str | None), {"n": False}, "n"),
    (struct(d=date | None), {"d": datetime(2026, 1, 2, 3)}, "d"),
    (struct(n=int, a=Any), {"n": True, "a": True}, "n"),
    (struct(a=Any), {"a": (1, {"x": datetime(2026, 1, 1)})}, ""),
    (struct(n=Base), {"n": Base(True)}, "n"),
    (Counted, Counted(True), "n"),
    (Counted, Counted(3, "true"), ""),
    (list[int], [True], r"\$\[0\]"),
    (struct(x=float), {"x": 5}, ""),
    (struct(x=float), {"x": 1e300}, ""),
    (struct(x=float), {"x": True}, "x"),
    (struct(x=float), {"x": LONG}, "x"),
    (struct(x=float | None), {"x": LONG}, "x"),
    (struct(x=list[float]), {"x": [0.5, LONG]}, "x"),
    (struct(x=int | float), {"x": LONG}, ""),
    (struct(x=Decimal), {"x": Decimal("1.50")}, ""),
    (struct(d=date), {"d": date(2026, 1, 2)}, ""),
    (struct(d=date), {"d": datetime(2026, 1, 2, 3)}, "d"),
    (struct(d=date, s=str), {"d": date(2026, 1, 2), "s": "The T"}, ""),
    (struct(t=datetime), {"t": datetime(2026, 1, 2, tzinfo=UTC)}, ""),
    (struct(t=datetime), {"t": datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=-5, minutes=-30)))}, ""),
    (struct(t=datetime | None), {"t": None}, ""),
    (struct(t=list[datetime]), {"t": [datetime(2026, 1, 2, tzinfo=UTC)]}, ""),
    (struct(a=datetime), {"a": datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Amsterdam"))}, ""),  # twice
    (struct(n=Annotated[int, Meta(ge=0)]), {"n": 0}, ""),
    (struct(n=Annotated[int, Meta(ge=0)]), {"n": -300}, "n"),
    (struct(s=Annotated[str, Meta(pattern="^a$")]), {"s": "b"}, "s"),
    (struct(s=Annotated[list[str], Meta(min_length=1)]), {"s": []}, "s"),
    (struct(t=Annotated[datetime, Meta(tz=True)]), {"t": datetime(2026, 1, 2)}, "t"),
    (struct(s=Literal["a", "b"]), {"s": "a"}, ""),
    (struct(s=Literal["a", "b"]), {"s": "c"}, "s"),
    (struct(n=list[Literal[1, 2]]), {"n": [1, True]}, "n"),
    (Even, Even(2), ""),
    (struct(s=Pair[int]), {"s": Pair(2)}, ""),
    (struct(s=list[Pair[str]]), {"s": [changed(Pair("a"), more=["b"])]}, "there is more"),
    (Pair[int], changed(Pair(2), more=[True]), "there is more|bool"),
    (struct(x=Base), {"x": Sub()}, "x is a Sub, and comes back as a Base"),
    (struct(x=list[Base]), {"x": [Base(), Sub()]}, "x is a Sub, and comes back as a Base"),
    (struct(x=Base | None), {"x": Base()}, ""),
]
JSON_ONLY: list[tuple[Any, Any, str]] = [
    (
        struct(t=datetime),
        {"t": datetime(1920, 1, 1, tzinfo=SECONDS)},
        "t comes back as another datetime.* give it in UTC",
    ),
    (struct(t=datetime | None), {"t": datetime(1920, 1, 1, tzinfo=SECONDS)}, "t"),
    (struct(t=list[datetime]), {"t": [datetime(1920, 1, 1, tzinfo=SECONDS)]}, "t"),
    (struct(r=Raw), {"r": Raw(b'{"a": 1}')}, ""),
    (struct(r=Raw), {"r": Raw(b"hello")}, "cannot be read back"),
    (struct(r=Raw), {"r": Raw()}, "cannot be read back"),
    (struct(r=Raw, n=int), {"r": Raw(b'1,"n":5'), "n": 6}, "r"),
]


MSGPACK_ONLY: list[tuple[Any, Any, str]] = [  # which has the instant
    (list[date], [datetime(2026, 1, 2, tzinfo=UTC)], r"\$\[0\]"),
    (struct(t=datetime), {"t": datetime(1920, 1, 1, tzinfo=SECONDS)}, ""),
    (struct(t=dict[datetime, int]), {"t": {datetime(1920, 1, 1, tzinfo=SECONDS): 1}}, ""),
    (struct(t=datetime), {"t": datetime.max.replace(tzinfo=timezone(-timedelta(hours=5)))}, "cannot be encoded"),
]


def writers(codec: Any) -> list[Callable[[Any], bytes]]:
    """Ways to write: the codec's own, those of a table and of an event, by their shortcuts."""

    def put(value: Any) -> bytes:
        table = Table.factory(key=str, value=object, value_codec=codec)(TopicPartition("t", 0))
        journal: list[Change] = []
        table.begin(journal)
        table.put("k", value)
        return cast(bytes, journal[0].value)

    return [codec.encode, put, EventType(codec._type, "E", 1, codec, {}).encode]


@pytest.mark.parametrize("make", [JsonCodec, MsgpackCodec])
def test_a_value_comes_back_or_is_refused_by_the_name_of_its_field(make: Any) -> None:
    for type_, value, wrong in VALUES + (JSON_ONLY if make is JsonCodec else MSGPACK_ONLY):
        codec, value = make(type_), type_(**value) if isinstance(value, dict) else value
        for write in writers(codec):
            codec._sample.count = 2  # this value is none of the sample
            if wrong:
                place = rf"\$\.{wrong}\b|: {wrong} comes back" if len(wrong) == 1 else wrong
                with pytest.raises(EncodeError, match=place) as caught:
                    write(value)
                assert len(str(caught.value)) < 500
            else:
                again = codec.decode(write(value))
                assert again == value or hasattr(value, "a"), value  # which may hold anything


def test_a_value_that_broke_its_rule_after_it_was_made_is_refused() -> None:
    even = Even()
    even.n = 3
    with pytest.raises(EncodeError, match="cannot be read back: ValidationError: odd"):
        JsonCodec(Even).encode(even)


def model(_config: Any = None, **fields: Any) -> type[BaseModel]:
    made: type[BaseModel] = cast(Any, pydantic.create_model)("M", __config__=_config, **fields)
    return made


class Inner(BaseModel):
    n: int = 0


class More(Inner):
    more: int = 1


class Forbids(BaseModel, extra="forbid"):
    n: int = 0

    @pydantic.computed_field
    def twice(self) -> int:
        return 2 * self.n


class Computes(BaseModel):
    n: int = 0

    @pydantic.computed_field
    def twice(self) -> int:
        return 2 * self.n


class Shows(BaseModel):
    password: SecretStr

    @pydantic.field_serializer("password", when_used="json")
    def show(self, value: SecretStr) -> str:
        return value.get_secret_value()


@pydantic.dataclasses.dataclass
class OneSided:
    n: Annotated[int, Field(serialization_alias="number")] = 0


class Nested(BaseModel):
    one: Inner = Inner()
    others: dict[str, list[OneSided]] = {}


ONE_SIDE = ConfigDict(alias_generator=AliasGenerator(serialization_alias=str.upper))
BOTH_SIDES = ConfigDict(alias_generator=str.upper)
BY_NAME = ConfigDict(validate_by_name=True, validate_by_alias=False)

# The type, and the field that is lost; "": none is.
TYPES: list[tuple[Any, str]] = [
    (struct(r=Raw | None), "S.r"),
    (struct(r=list[Raw | None]), "S.r"),
    (msgspec.defstruct("S", [("r", Raw, Raw())]), "S.r"),
    (msgspec.defstruct("S", [("r", Raw, Raw(b"null"))]), ""),
    (model(n=(int, Field(0, serialization_alias="number"))), "M.n"),
    (model(n=(int, Field(0, validation_alias="number"))), "M.n"),
    (model(n=(int, Field(0, alias="number"))), ""),
    (model(n=(int, Field(0, validation_alias=AliasChoices("a", "b")))), "M.n"),
    (model(n=(int, Field(0, validation_alias=AliasChoices("a", "n")))), ""),
    (model(n=(int, Field(0, validation_alias=AliasPath("a", 0)))), "M.n"),
    (model(ONE_SIDE, n=(int, 0)), "M.n"),
    (model(BOTH_SIDES, n=(int, 0)), ""),
    (model(BY_NAME, n=(int, Field(0, alias="number"))), "M.n"),
    (model(ConfigDict(validate_by_name=True), n=(int, Field(0, validation_alias="number"))), ""),
    (model(n=(int, Field(0, exclude=True))), "M.n"),
    (model(s=(SecretStr, SecretStr("x"))), "M.s"),
    (model(s=(list[SecretBytes], [])), "M.s"),
    (model(s=(SecretStr | None, None)), "M.s"),
    (Shows, ""),
    (model(j=(Json[list[int]], [])), "M.j"),
    (Forbids, "Forbids.twice"),
    (Computes, ""),
    (model(d=(dict[tuple[int, str], int], {})), "M.d"),
    (model(d=(dict[str | None, int], {})), "M.d"),
    (model(d=(dict[int, int], {})), ""),
    (OneSided, "OneSided.n"),
    (Nested, "Nested.others.n"),
]


def test_a_type_that_loses_a_field_is_refused_unless_it_may() -> None:
    for type_, lost in TYPES:
        if not lost:
            codec_for(type_)
            continue
        with pytest.raises(ConfigError, match=f"^{lost}: .*would not come back.*allow_lossy="):
            codec_for(type_)
        with pytest.raises(RegistrationError, match=f"event type .*: {lost}: "):
            event_type_of(type_)
        allowed = (lost.partition(".")[2],)
        codec_for(type_, allow_lossy=allowed)
        with pytest.raises(ConfigError, match="allow_lossy names 'other', which is none of its fields"):
            codec_for(type_, allow_lossy=(*allowed, "other"))


# A model's value, changed after it was made, and the field that the error names; "": it comes back.
CHANGED: list[tuple[Any, dict[str, Any], str]] = [
    (Inner, {"n": 5}, ""),
    (Inner, {"n": True}, ""),  # it is read as 1
    (Inner, {"n": None}, "n: Input should be a valid integer"),
    (model(d=(dict[int, int], {})), {"d": {True: 1}}, "cannot be read back"),  # by the key "True"
    (model(n=(int, Field(0, ge=0))), {"n": -5}, "n: Input should be greater than or equal to 0"),
    (model(n=(Annotated[list[int], Field(min_length=1)], [1])), {"n": []}, "n: List should have at least 1 item"),
    (model(x=(float, 0.0)), {"x": LONG}, "x comes back as another int"),
    (model(d=(date, date(2026, 1, 2))), {"d": datetime(2026, 1, 2, 3)}, "cannot be encoded"),
    (model(t=(datetime, datetime(2026, 1, 2))), {"t": datetime(1920, 1, 1, tzinfo=SECONDS)}, "t comes back as another"),
    (model(one=(Inner, Inner())), {"one": More()}, "one is a More, and comes back as a Inner"),
    (model(one=(pydantic.SerializeAsAny[Inner], Inner())), {"one": More()}, "one is a More, and comes back as a Inner"),
    (model(many=(list[Inner], [])), {"many": [Inner(n=2)]}, ""),
    (Shows, {"password": SecretStr("x")}, ""),
    (Computes, {"n": 4}, ""),
    (
        model(d=(Annotated[dict[str, int], pydantic.PlainSerializer(lambda _: {})], {})),
        {"d": {"a": 1}},
        "d has 1 items",
    ),
]


def test_a_model_that_was_changed_comes_back_or_is_refused() -> None:
    for type_, changes, wrong in CHANGED:
        codec, value = PydanticCodec(type_), type_.model_construct(**changes)
        codec._sample.count = 2  # this value is none of the sample
        if wrong:
            with pytest.raises(EncodeError, match=wrong):
                print(type_, changes, codec.encode(value))
        else:
            assert codec.decode(codec.encode(value)) == value


class Truncates(BaseModel):
    at: datetime = datetime(2026, 1, 2)

    @pydantic.field_serializer("at")
    def whole(self, value: datetime) -> str:
        return value.isoformat(timespec="seconds")


def test_a_field_whose_values_lose_something_may_be_allowed() -> None:
    """Nothing is to be seen of it in the type."""
    value = Truncates(at=datetime(2026, 1, 2, 3, 4, 5, 6))
    with pytest.raises(EncodeError, match=r"at comes back as another datetime; .*allow_lossy=\('at',\)") as caught:
        codec_for(Truncates).encode(value)
    assert "zone" not in str(caught.value)
    codec = codec_for(Truncates, allow_lossy=("at",))
    assert codec.decode(codec.encode(value)).at == datetime(2026, 1, 2, 3, 4, 5)


def test_private_attributes_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Caches(BaseModel):
        n: int = 0
        _seen: int = pydantic.PrivateAttr(default=0)

    with caplog.at_level(logging.WARNING):
        codec = codec_for(Caches)
    assert "the private attribute _seen is not written" in caplog.text
    value = Caches(n=1)
    value._seen = 5
    assert codec.decode(codec.encode(value)).n == 1


# -- in an event source ------------------------------------------------------------------------------------------------


class Lost(BaseModel):
    cents: int = Field(default=0, serialization_alias="amountCents")


class Kept(BaseModel):
    cents: int = Field(default=0, alias="amountCents")


class Large(msgspec.Struct):
    cents: int = 0
    large: int = 0


class Older(msgspec.Struct):
    cents: float = 0.5


class Ruled(msgspec.Struct):
    cents: Annotated[int, Meta(ge=0)] = 0


def banking(account: Any, policy: Retry = DEAD_LETTER) -> EventSource[Any]:
    """A bank whose accounts are of this class, and say whether the last deposit was large, where they can."""
    config = EventSourceConfig(group_id="g", topic="in", num_partitions=1, error_policy=policy)
    source = EventSource(config, store=Table.factory(key=str, value=account))

    @source.on
    def on(ctx: EventContext[Any], event: Added) -> None:
        found = ctx.store.get(event.name) or account()
        found.cents += event.amount
        if account is Large:
            found.large = event.amount > 3
        ctx.store.put(event.name, found)

    return source


@pytest.mark.parametrize(
    ("account", "amounts", "left", "refused"),
    [
        (Kept, (5, 7, 9), 21, []),
        (Large, (1, 5, 2), 0, ["Large is written so that it cannot be read back: .*`bool` - at .*large"] * 3),
        (Ruled, (500, -800, 100, 100), 700, ["Ruled is written so that it cannot be read back: .*>= 0 - at .*cents"]),
    ],
)
def test_state_that_would_not_come_back_is_the_failure_of_its_event(
    account: Any, amounts: tuple[int, ...], left: int, refused: list[str]
) -> None:
    """And of no event behind it."""
    with pytest.raises(ConfigError, match=r"^Lost\.cents: it is written as 'amountCents' and read as 'cents', so"):
        banking(Lost)
    with TestDriver(banking(account)) as driver:
        for amount in amounts:
            driver.send(Added("ada", amount), key="ada")
        found = driver.restored_store(0).get("ada")
        assert (0 if found is None else found.cents) == left
        errors = [message for (message,) in letters(driver, "message")]
        assert len(errors) == len(refused)
        assert all(re.search(pattern, error) for pattern, error in zip(refused, errors, strict=True)), errors
        driver.check()


def test_a_stored_value_that_cannot_be_read_names_its_key_and_what_helps() -> None:
    """And not `kes skip`, which would leave it where it is."""
    accounts: list[Any] = [Older]
    with TestDriver(lambda: banking(accounts[0], STOP)) as driver:
        driver.send(Added("it's\n", 5), key="it's\n")
        accounts[0] = Ruled
        driver.crash()
        driver.restart()
        with pytest.raises(EventFailure) as caught:
            driver.send(Added("it's\n", 1), key="it's\n")
    assert 'state of in[0], key "it\'s\\n": not a Ruled: ' in str(caught.value)
    assert "kes state repair MODULE:SOURCE 'it'\"'\"'s\\n' --partition 0 --previous" in str(caught.value)
    assert "kes skip" not in str(caught.value)
    assert isinstance(caught.value.__cause__, StateUnreadable)
