"""``Monitor``: the pages and the interface of one event source, or of any group, on a thread of their own."""

from __future__ import annotations

import asyncio
import re
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec

from streams.errors import ConfigError, RegistrationError
from streams.observability import PrometheusMetrics
from streams.observability.http_server import parse_address
from streams.source.event_source import EventSource
from streams.statistics import SourceState
from streams.views.view import View
from streams.web.actions import Action, RegisteredAction
from streams.web.board import Board
from streams.web.doors import Address
from streams.web.facts import MemberFacts, Members, SourceFacts
from streams.web.group_client import GroupClient
from streams.web.jobs import JobTable
from streams.web.letters import DeadLetters
from streams.web.look_up import OwnerReads
from streams.web.pages import DROP, REPLAY, Pages
from streams.web.parked import ParkedTable
from streams.web.serving import ServerThread, is_loopback
from streams.web.site import Probes, Site
from streams.web.tokens import Tokens

ADDRESS: Final = "127.0.0.1:8780"
"""The address unless another one is named."""
ActionT = TypeVar("ActionT", bound=Action)

DRAIN: Final = "drain-this-member"
"""The built-in action that stops the source of this process."""

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_LOOPBACK_NAMES: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_made: weakref.WeakValueDictionary[int, Monitor] = weakref.WeakValueDictionary()
"""By the id of the source, which its monitor keeps alive."""


class WebOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The place of the pages, and who may see them.

    ``address``: ``HOST:PORT`` or ``PORT`` (of 127.0.0.1; 0: a free one). An address that other machines can reach needs
    ``certificate`` (and ``key``, unless it is in the same file), or ``behind_tls_proxy``. ``token_file``: see the
    guide; without one a token is made. ``names``: further names that the monitor is reached by.
    """

    address: str = ADDRESS
    token_file: str = ""
    certificate: str = ""
    key: str = ""
    names: tuple[str, ...] = ()
    behind_tls_proxy: bool = False

    def checked(self) -> Self:
        """Return these options. Raises ``ConfigError``."""
        host, _ = parse_address(self.address)
        host = host or "127.0.0.1"
        if not (is_loopback(host) or self.certificate or self.behind_tls_proxy):
            raise ConfigError(
                f"the monitor does not serve at {self.address} without TLS, since others could read the token: name a "
                "certificate, say that a proxy before it ends TLS (behind_tls_proxy), or use 127.0.0.1"
            )
        if self.certificate and self.behind_tls_proxy:
            raise ConfigError("a certificate, or behind_tls_proxy: choose one")
        if host in ("0.0.0.0", "::") and not self.names:
            raise ConfigError(
                f"the monitor at {self.address} has to know by which names it is reached: name them (names), or serve "
                "at one address"
            )
        return self

    def reached(self, port: int) -> Address:
        """Return what a request may name as its host."""
        host = parse_address(self.address)[0] or "127.0.0.1"
        names = {name.lower() for name in (host, *self.names)} - {"0.0.0.0", "::"}
        if is_loopback(host):
            names |= _LOOPBACK_NAMES
        is_tls = bool(self.certificate) or self.behind_tls_proxy
        # A cookie counts for all ports of a host; by its name it is of this one.
        cookie = f"{'__Host-' if is_tls else ''}kes-monitor-{port}"
        return Address(frozenset(names), is_tls, cookie, is_proxied=self.behind_tls_proxy)


class _OwnMembers:
    def __init__(self, facts: SourceFacts) -> None:
        self._facts = facts

    async def read(self) -> tuple[MemberFacts, ...]:
        return (await asyncio.to_thread(self._facts.read),)


class Monitor:
    """Pages about one event source in the browser, the same facts as JSON, and actions::

        monitor = Monitor(source, views=[prices], address="127.0.0.1:8780")

        @monitor.action("rebuild-index")
        async def rebuild(order: Rebuild, run: ActionRun) -> str: ...

        with monitor:            # or async with; or lifespan=monitor.lifespan of a FastAPI application
            source.run()

    It has a thread and an event loop of its own; actions run there too. Start it before the source. ``kes run
    --http`` and ``kes web`` take the monitor that was made for the source, with its views and actions. See
    ``WebOptions`` for the other settings. Without a token file a token is made, shown once if standard error is a
    terminal, and in ``link``. Raises ``ConfigError``.
    """

    def __init__(
        self,
        source: EventSource[Any] | None = None,
        *,
        group: str = "",
        views: Sequence[View[Any, Any]] = (),
        address: str = ADDRESS,
        token_file: str = "",
        certificate: str = "",
        key: str = "",
        names: Sequence[str] = (),
        behind_tls_proxy: bool = False,
        bootstrap_servers: str = "",
    ) -> None:
        if bool(group) == (source is not None):
            raise ConfigError("a monitor has a source, or the name of a group")
        self._options = WebOptions(
            address=address,
            token_file=token_file,
            certificate=certificate,
            key=key,
            names=tuple(names),
            behind_tls_proxy=behind_tls_proxy,
        ).checked()
        self._source, self._group = source, group or (source.config.group_id if source else "")
        self._views = tuple(views)
        self._servers = bootstrap_servers
        self._actions: dict[str, RegisteredAction] = {}
        self._members: Members | None = None
        self._probes: Probes | None = None
        self._is_elsewhere = False  # the source runs in other processes, if at all
        self._server: ServerThread | None = None
        self._token = ""
        if source is not None:
            _made[id(source)] = self

    def action(self, name: str) -> Callable[[ActionT], ActionT]:
        """Register an ``async`` function as an action that may be started from the pages, one run at a time. Its
        argument, if it has one, is a class such as events are; the form is made of it. A last argument that is an
        ``ActionRun`` reports progress. Raises ``RegistrationError``."""

        def register(function: ActionT) -> ActionT:
            if not _NAME.fullmatch(name):
                raise RegistrationError(f"the action {name!r} must have a name of small letters, digits and dashes")
            if name in self._actions or name in (REPLAY, DROP, ParkedTable.action, JobTable.action, DRAIN):
                raise RegistrationError(f"there is an action {name!r} already")
            if self._server is not None:
                raise RegistrationError(f"the action {name!r} comes too late: the monitor has started")
            self._actions[name] = RegisteredAction(name, function)
            return function

        return register

    @property
    def port(self) -> int:
        """Return the port, once it serves; 0 before."""
        return 0 if self._server is None else self._server.port

    @property
    def address(self) -> str:
        """Return the address for a browser, once it serves."""
        options = self._options
        host = options.names[0] if options.names else parse_address(options.address)[0] or "127.0.0.1"
        scheme = "https" if options.certificate or options.behind_tls_proxy else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}/"

    @property
    def link(self) -> str:
        """Return the address with the token that was made, for a browser: a secret. The part with the token never goes
        over the line. With a token file it is the address alone."""
        return f"{self.address}login#{self._token}" if self._token else self.address

    def start(self) -> None:
        """Serve until ``close``. Raises ``ConfigError``; ``RegistrationError`` when it serves already."""
        if self._server is not None:
            raise RegistrationError("this monitor serves already")
        options = self._options
        if options.token_file:
            tokens, self._token = Tokens.of_file(options.token_file), ""
        else:
            tokens, self._token = Tokens.made()
        if self._source is not None and self._members is None and not self._is_elsewhere:
            self._members, self._probes = _OwnMembers(SourceFacts(self._source)), PrometheusMetrics(self._source)
        application = _Application(self._site)
        self._server = server = ServerThread(
            options.address,
            application,
            certificate=options.certificate,
            key=options.key,
            opened=application.open,
            closing=application.close,
        )
        application.admit(tokens, options.reached(server.port))
        if not self._is_elsewhere and sys.stderr.isatty():  # once, where only its user sees it: a log would keep it
            sys.stderr.write(f"monitor: {self.link}\n")

    def close(self) -> None:
        """Stop serving: running actions are cancelled, viewers are left."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    @asynccontextmanager
    async def lifespan(self, *application: Any) -> AsyncIterator[Mapping[str, Any]]:
        """Serve during a lifespan: ``FastAPI(lifespan=monitor.lifespan)``."""
        async with self:
            yield {}

    def ask(self, bootstrap_servers: str) -> None:
        """Ask these brokers for the group, not those of the source."""
        self._servers = bootstrap_servers

    def serve_for(self, options: WebOptions, members: Members | None, probes: Probes | None) -> None:
        """Serve elsewhere, for other members: for ``kes run`` and ``kes web``, which show the link themselves."""
        self._options, self._members, self._probes = options.checked(), members, probes
        self._is_elsewhere = True

    def _site(self) -> Site:
        """Make what is shown. On the loop."""
        config = self._source.config if self._source else None
        group_client = GroupClient(self._group, config, self._servers)
        source = self._source
        letters = None if source is None else DeadLetters(source, group_client)
        owners = None if source is None else OwnerReads(source, group_client)
        actions = dict(self._actions)
        if letters is not None:
            actions[REPLAY] = RegisteredAction(REPLAY, letters.replay)
            actions[DROP] = RegisteredAction(DROP, letters.drop)
        waiting: dict[str, Any] = {}
        if source is not None:
            waiting = {"parked keys": ParkedTable(source, group_client), "jobs": JobTable(source, group_client)}
        for table in waiting.values():
            actions[table.action] = RegisteredAction(table.action, table.act)
        if source is not None and not self._is_elsewhere:
            actions[DRAIN] = RegisteredAction(DRAIN, _draining(source))
        board = Board(self._group, self._members, group_client, self._views)
        return Site(self._group, board, source, self._views, letters, owners, waiting, self._probes, actions)


class _Application:
    """The pages, made on the loop that serves them."""

    def __init__(self, site: Callable[[], Site]) -> None:
        self._make_site = site

    def open(self) -> None:
        self._site = self._make_site()
        self._pages = Pages(self._site)

    def admit(self, tokens: Tokens, address: Address) -> None:
        """Let requests in. Before that nothing has a name, so all of them are refused."""
        doors = self._pages.doors
        doors.tokens, doors.address = tokens, address

    def close(self) -> None:
        for action in self._site.actions.values():
            action.cancel("the end of the monitor")
        self._pages.close()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._pages.doors(scope, receive, send)


def _draining(source: EventSource[Any]) -> Action:
    async def drain() -> str:
        """Stop the source of this process: what has begun is committed, and its partitions go to other members."""
        if source.state is not SourceState.RUNNING:
            raise RegistrationError(f"the source is {source.state.value}, not running")
        await source.stop()
        return "drained"

    return drain


def monitor_of(source: EventSource[Any]) -> Monitor:
    """Return the monitor that was made for a source; make one if there is none."""
    return _made.get(id(source)) or Monitor(source)
