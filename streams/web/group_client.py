"""The whole group, whichever member serves the page: as its coordinator and the members' status notes have it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any

from streams.kafka.group.status_board import StatusBoard
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.questions.group_view import GroupQuestions, GroupView
from streams.kafka.settings import ClientSettings
from streams.kafka.wire.security import Security
from streams.looks.addresses import await_listener, brokers, client_settings_of
from streams.looks.group_live import Live, live_status
from streams.looks.group_picture import Picture
from streams.looks.group_reader import GroupReader, lags_of
from streams.settings.config import EventSourceConfig

READ_SECONDS = 4.0


class GroupClient:
    """Reads one group. Clients are made by the first read, and closed by ``close``; a later read makes new ones.
    Blocks; one thread at a time."""

    def __init__(self, group: str, config: EventSourceConfig | None, bootstrap_servers: str = "") -> None:
        self._group, self._config, self._servers = group, config, bootstrap_servers
        self._clients: ExitStack | None = None
        self._reader: GroupReader | None = None

    @property
    def client_settings(self) -> Mapping[str, Any]:
        """Return librdkafka's settings for the group's cluster."""
        return client_settings_of(self._config)

    @property
    def servers(self) -> str:
        """Return the brokers. Raises ``ConfigError`` when there are none."""
        return brokers(self._servers, self._config)

    def read(self) -> Picture:
        """Return the group of this moment. Raises ``BrokerUnavailable``, ``ConfigError``."""
        if self._reader is None:
            self._reader = self._made()
        return self._reader()

    def close(self) -> None:
        """Close the clients."""
        clients, self._clients, self._reader = self._clients, None, None
        if clients is not None:
            clients.close()

    def _made(self) -> GroupReader:
        servers = self.servers
        await_listener(servers, 0.0)
        security = Security.of(self.client_settings)
        with ExitStack() as stack:
            questions = stack.enter_context(closing(GroupQuestions(servers, security)))
            settings = ClientSettings(servers, self.client_settings, client_id="kes-web")
            admin = stack.enter_context(closing(TopicAdmin(settings)))
            lags = stack.enter_context(lags_of(self._config, admin))
            board = stack.enter_context(closing(StatusBoard(servers, "kes-web", security, self._group)))
            self._clients = stack.pop_all()

        topic = self._config.offsets_topic if self._config else ""

        def live(view: GroupView, seconds: float) -> tuple[Live, tuple[str, ...]]:
            return live_status(board, view, seconds, time.time(), topic)

        return GroupReader(questions, lags, live, self._group, READ_SECONDS)
