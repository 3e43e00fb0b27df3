"""The ground of all declarations of an event source: its settings and its routes."""

from __future__ import annotations

from streams.core.router import Router
from streams.outcomes import ErrorPolicy
from streams.runtime import source_topics
from streams.settings.config import EventSourceConfig


class Registry:
    """The settings and routes that the parts of ``Declarations`` share. ``config`` may be replaced until the start.

    ``has_store``: the source is not stateless.
    """

    def __init__(self, config: EventSourceConfig, *, has_store: bool) -> None:
        self.config = config
        self.router = Router()
        self.has_store = has_store

    def policy(self, on_error: ErrorPolicy | None) -> ErrorPolicy:
        """Return the error policy of a handler: its own, or that of the settings."""
        return self.config.error_policy if on_error is None else on_error

    def check_declarable(self, method: str, topic: str, cannot: str) -> None:
        """Check that this method of the source can declare a topic now. Raises ``ConfigError``,
        ``RegistrationError``."""
        source_topics.check_declarable(self.router, self.config, method, topic, cannot)
