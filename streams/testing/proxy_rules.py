"""Rules for spoiling requests and replies in a proxy: see ``streams.testing.proxy``."""

from __future__ import annotations

import fnmatch
import random
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Literal

from streams.errors import ConfigError
from streams.testing.proxy_wire import Api, RequestHeader

Side = Literal["request", "reply"]
Action = Literal["drop", "delay", "hold", "double", "slow"]

_SIDES: Final = ("request", "reply")
_ACTIONS: Final = ("drop", "delay", "hold", "double", "slow")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Spoils the requests, or the replies to them, that it applies to.

    ``apis``
        names of requests as the protocol has them (``"EndTxn"``, ``"JoinGroup"``; see ``Api``); none: all.
    ``on``
        ``"request"``: on its way to the broker; ``"reply"``: on its way back, when the broker has acted already.
    ``action``
        ``"drop"``: close the client's connection instead of passing it on. ``"delay"``: pass it on after ``seconds``.
        ``"hold"``: pass it on when ``ArmedRule.release`` is called. ``"double"``: pass it on twice; of the replies to a
        doubled request the client is given the one that ``answer`` names. ``"slow"``: pass it on after the time that it
        takes at ``bytes_per_second``, on each connection.
    ``client``
        pattern of client ids (``fnmatch``): ``"bank.member-0*"``.
    ``node``
        number of a broker: only what goes to it, or comes from it.
    ``nth``
        strikes from the n-th on (1 is the first) of those that it applies to.
    ``probability``
        of striking, drawn anew for each one; from ``seed``.
    ``times``
        how often it strikes at most; 0: without end.
    ``seconds``
        of a delay, or (least, most) to draw it from.
    ``bytes_per_second``
        of a slow line.

    Whatever comes later on a connection waits behind what is delayed or held, as on a slow line. Raises
    ``ConfigError``.
    """

    apis: Collection[str] = ()
    on: Side = "reply"
    action: Action = "drop"
    client: str = "*"
    node: int | None = None
    nth: int = 1
    probability: float = 1.0
    times: int = 0
    seconds: float | tuple[float, float] = 1.0
    bytes_per_second: float = 0.0
    answer: Literal["first", "last"] = "first"
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.apis, str):
            raise ConfigError(f"apis={self.apis!r}: give a collection of names, such as {{{self.apis!r}}}")
        for name in self.apis:
            if name not in Api.__members__:
                raise ConfigError(f"there is no request {name!r}; one of {', '.join(Api.__members__)}")
        if self.on not in _SIDES:
            raise ConfigError(f"on={self.on!r}: use one of {', '.join(_SIDES)}")
        if self.action not in _ACTIONS:
            raise ConfigError(f"action={self.action!r}: use one of {', '.join(_ACTIONS)}")
        if self.answer not in ("first", "last"):
            raise ConfigError(f"answer={self.answer!r}: use 'first' or 'last'")
        if self.action == "slow" and self.bytes_per_second <= 0:
            raise ConfigError(f"bytes_per_second={self.bytes_per_second}: a slow line needs a rate of more than 0")
        if not 0 <= self.probability <= 1:
            raise ConfigError(f"probability={self.probability} is not from 0 to 1")
        if self.nth < 1 or self.times < 0:
            raise ConfigError(f"nth={self.nth} must be 1 or more, times={self.times} 0 or more")


class ArmedRule:
    """A rule at work: what it has seen and done. Any thread may call its methods."""

    def __init__(self, rule: Rule, forget: Callable[[ArmedRule], None]) -> None:
        self.rule = rule
        self._forget = forget
        self._random = random.Random(rule.seed)
        self._changed = threading.Condition()
        self._seen = self._struck = 0
        self._releasers: list[Callable[[], None]] = []
        self._released = False

    def __repr__(self) -> str:
        return f"<{self.rule} seen={self._seen} struck={self._struck}>"

    @property
    def seen(self) -> int:
        """Number of requests or replies that it applied to."""
        return self._seen

    @property
    def struck(self) -> int:
        """Number of requests or replies that it spoiled."""
        return self._struck

    def wait_struck(self, count: int = 1, seconds: float = 30.0) -> bool:
        """Wait until it has struck so often; return whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._struck >= count, seconds)

    def release(self) -> None:
        """Pass on what is held now, and strike no more. Safe to repeat."""
        with self._changed:
            self._released = True
            releasers, self._releasers = self._releasers, []
        self._forget(self)
        for release in releasers:
            release()

    remove = release

    # -- the proxy's side ---------------------------------------------------------------------------------------------

    def strikes(self, on: Side, header: RequestHeader, node: int | None) -> bool:
        """Count a request or reply, and return whether it is to be spoiled."""
        rule = self.rule
        if (
            on != rule.on
            or (rule.apis and header.name not in rule.apis)
            or (rule.node is not None and rule.node != node)
            or not fnmatch.fnmatchcase(header.client_id, rule.client)
        ):
            return False
        with self._changed:
            self._seen += 1
            if self._released or self._seen < rule.nth or (rule.times and self._struck >= rule.times):
                return False
            if rule.probability < 1 and self._random.random() >= rule.probability:
                return False
            self._struck += 1
            self._changed.notify_all()
            return True

    def draw_seconds(self) -> float:
        """Draw the seconds of this delay."""
        seconds = self.rule.seconds
        if isinstance(seconds, tuple):
            with self._changed:
                return self._random.uniform(*seconds)
        return seconds

    def on_release(self, call: Callable[[], None]) -> None:
        """Register a callback for the release; it is called at once if that was before."""
        with self._changed:
            if not self._released:
                self._releasers.append(call)
                return
        call()
