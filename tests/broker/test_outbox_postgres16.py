"""The tests of stashing and of relays that are killed, on PostgreSQL 16: all others are on the newest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.broker.outbox_kit import PostgresServer
from tests.broker.test_outbox_relay import (  # noqa: F401 - tests and fixtures are found by their names
    ledger,
    start,
    test_a_database_that_is_killed,
    test_a_relay_that_is_killed,
    test_an_embedded_relay_is_awake_without_notifications_and_wakes_from_its_sleep,
    test_sessions_that_the_operator_ends,
)
from tests.broker.test_outbox_stash import *  # noqa: F403 - all of them

pytestmark = [pytest.mark.broker, pytest.mark.nightly, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A server of that version for this module."""
    server = PostgresServer(16)
    try:
        assert server.run("psql", "-d", server.address(), "-Atc", "SHOW server_version_num").startswith("16")
        yield server
    finally:
        server.close()
