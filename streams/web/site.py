"""The things that pages and interface show: one monitor's source, views, owners, letters, actions, settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from streams.looks.settings import Setting, settings_of
from streams.observability.health import Verdict
from streams.sak.harmless import harmless
from streams.settings.config import EventSourceConfig
from streams.settings.sources import SettingsSources, outside_settings
from streams.source.event_source import EventSource
from streams.views.view import View
from streams.web.actions import RegisteredAction
from streams.web.board import Board
from streams.web.letters import DeadLetters
from streams.web.look_up import OwnerReads
from streams.web.waiting import WaitingTable


class Probes(Protocol):
    """Metrics and probes of the members within reach."""

    registry: CollectorRegistry

    @property
    def live(self) -> Callable[[dict[str, str]], Verdict]:
        """Return the probe that checks whether the processes go on."""
        ...

    @property
    def ready(self) -> Callable[[dict[str, str]], Verdict]:
        """Return the probe that checks whether the source works."""
        ...


@dataclass
class Site:
    """Everything that one monitor shows. On its loop."""

    group: str
    board: Board
    source: EventSource[Any] | None = None
    views: Sequence[View[Any, Any]] = ()
    letters: DeadLetters | None = None
    owners: OwnerReads | None = None
    waiting: Mapping[str, WaitingTable[Any]] = field(default_factory=dict)
    """By the names of their pages."""
    probes: Probes | None = None
    actions: dict[str, RegisteredAction] = field(default_factory=dict)

    @property
    def is_source(self) -> bool:
        """Check whether the group is that of a source that is known here."""
        return self.source is not None

    def settings(self) -> list[Setting]:
        """Return the settings in effect, secrets masked, with where each comes from."""
        sources = SettingsSources()
        outside = outside_settings(EventSourceConfig, sources)
        return settings_of(self.source.config if self.source else None, sources, outside)

    def view_of(self, topic: str) -> View[Any, Any] | None:
        """Return the view of a topic."""
        return next((view for view in self.views if view.topic == topic), None)

    @staticmethod
    def who(request: Request) -> str:
        """Name who sent a request, for the log: the name of the token, and the address."""
        return harmless(f"{request.state.session.name} at {request.state.client}")
