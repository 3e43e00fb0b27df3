"""What commands about a cluster say when nothing listens at its address."""

from __future__ import annotations

import socket

import pytest

from streams.cli import cluster
from tests.unit.cli_kit import Kes

NOBODY = "nothing listens at 127.0.0.1:1: is it running? (kes broker start)"


@pytest.mark.parametrize(
    "command",
    [
        "topics plan examples.bank:source",
        "lag examples.bank:source",
        "offsets accept examples.bank:source",
        "group demo",
        "transactions abort examples.bank:source --topic t --partition 1 --start-offset 40 --yes",
    ],
)
def test_nobody_at_the_address_is_said_in_time(kes: Kes, command: str) -> None:
    """Port 1 refuses, and the wait is bounded."""
    assert (
        kes(*command.split(), "--bootstrap-servers", "127.0.0.1:1", "--timeout", "0.5", code=1).err
        == f"kes: broker unavailable: {NOBODY}\n"
    )


def test_the_first_refusal_is_told_at_once_and_a_broker_that_starts_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    refusals = iter([True, True, False])

    def refuses(servers: str) -> bool:
        said.append(capsys.readouterr().err)
        return next(refusals)

    monkeypatch.setattr(cluster, "_all_refuse", refuses)
    cluster.await_listener("127.0.0.1:1", 30.0)
    assert said == ["", f"kes: {NOBODY}; waiting 30 s for it\n", ""]


def test_only_brokers_that_all_refuse_are_known_to_be_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
        assert not cluster._all_refuse(f"127.0.0.1:1, {there}")
    assert cluster._all_refuse("127.0.0.1:1, 127.0.0.1:2")
    assert not cluster._all_refuse("127.0.0.1")
