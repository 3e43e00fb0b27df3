"""A broker that is not who it should be: the member says so and stops, it does not try for ever."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from streams.core.assignor import sticky_plan
from streams.errors import ConfigError
from streams.kafka.group.connect import connect_group
from streams.kafka.wire.security import Security
from streams.model.group import Fatal, GroupEvent
from tests.unit.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for another host, signed by nobody, with its key in the same file."""
    path = tmp_path / "server.pem"
    name, out = "elsewhere.example", str(tmp_path / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}", "-keyout", str(path), "-out", out]
    subprocess.run(command, check=True, capture_output=True)
    path.write_text(path.read_text() + (tmp_path / "cert.pem").read_text())
    return path


@pytest.fixture
def server(certificate: Path) -> Iterator[str]:
    """Shakes hands with whoever comes, and says nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection = listener.accept()[0]
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(PATIENCE)
                    context.wrap_socket(connection, server_side=True).close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("trusted", [False, True], ids=["unknown authority", "wrong host"])
def test_a_certificate_that_does_not_fit_is_fatal(server: str, certificate: Path, trusted: bool) -> None:
    settings = {"security.protocol": "ssl"}
    if trusted:
        settings["ssl.ca.location"] = str(certificate.with_name("cert.pem"))
    membership, _ = connect_group(
        server, "g", "t", 1, "a", {"cooperative-sticky": sticky_plan}, security=Security.of(settings)
    )
    heard: list[GroupEvent] = []
    membership.start(heard.append)
    try:
        wait_until(lambda: bool(heard))
    finally:
        membership.close(2.0)
    (event,) = heard
    assert isinstance(event, Fatal)
    assert isinstance(event.error, ConfigError)
    assert f"{server}: the broker's certificate is refused: " in str(event.error)
    assert "check ssl.ca.location" in str(event.error)
