"""The client of a schema registry, and what is kept of its answers: against a server that does what no real one does on
demand."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streams.errors import ConfigError, DecodeError, RegistryUnavailable
from streams.formats import SchemaRegistry, registry, registry_http
from streams.formats.registry_http import MOST_BYTES, NotInRegistry, Schema
from tests.unit.scripted_registry import Server, scripted

KEY = b"\0\0\0\0\7"
TEXT = '{"type":"record","name":"A","fields":[]}'


@pytest.fixture
def server() -> Iterator[Server]:
    with scripted() as running:
        yield running


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_http, "_PART_SECONDS", 0.3)
    monkeypatch.setattr(registry_http, "CALL_SECONDS", 0.6)


def cut(request: Any) -> None:
    request.send_response(200)
    request.send_header("Content-Length", "1000")
    request.end_headers()
    request.wfile.write(b'{"schema":')


def slow(request: Any) -> None:
    request.send_response(200)
    request.send_header("Content-Length", "100000")
    request.end_headers()
    for _ in range(100_000):
        request.wfile.write(b" ")
        request.wfile.flush()
        request.server.slowly.wait(0.1)


def elsewhere(request: Any) -> None:
    request.send_response(302)
    request.send_header("Location", "http://user:secret@elsewhere.example/schemas")
    request.send_header("Content-Length", "0")
    request.end_headers()


REFUSALS: Any = {
    "401": (lambda _: (401, {}), ConfigError, "answered GET /schemas/ids/7 with 401: give SchemaRegistry"),
    "403": (lambda _: (403, b"no"), ConfigError, "with 403"),
    "422": (lambda _: (422, {"message": "Invalid schema"}), ConfigError, "with 422: Invalid schema"),
    "500": (lambda _: (500, {"message": "no leader"}), RegistryUnavailable, "with 500: no leader"),
    "429": (lambda _: (429, b""), RegistryUnavailable, "with 429"),
    "404 of a proxy": (lambda _: (404, b"<html>"), RegistryUnavailable, "with 404"),
    "no JSON": (lambda _: (200, b"<html>"), RegistryUnavailable, "with 200"),
    "no schema": (lambda _: (200, {"id": 7}), RegistryUnavailable, "without the field 'schema'"),
    "deep": (lambda _: (200, b"[" * 100_000), RegistryUnavailable, "with 200"),
    "cut": (cut, RegistryUnavailable, "does not answer: IncompleteRead"),
    "slow": (slow, RegistryUnavailable, "does not answer"),
    "a redirect": (elsewhere, RegistryUnavailable, "302, to elsewhere.example: redirects are not followed"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_no_answer(server: Server, name: str) -> None:
    import threading

    server._server.slowly = threading.Event()  # type: ignore[attr-defined]
    server.answer, error, text = REFUSALS[name]
    with pytest.raises(error, match=text) as raised:
        SchemaRegistry(server.url, auth=("me", "hidden")).fetch(KEY)
    server._server.slowly.set()  # type: ignore[attr-defined]
    assert "hidden" not in str(raised.value)
    assert "secret" not in str(raised.value)
    assert len(server.requests) == 1, "a redirect was followed"


def test_nothing_listens() -> None:
    with scripted() as gone:
        pass
    with pytest.raises(RegistryUnavailable, match="Connection refused"):
        SchemaRegistry(gone.url).fetch(KEY)


def test_404_and_then_the_schema(server: Server) -> None:
    known = SchemaRegistry(server.url)
    assert "is not in the registry" in str(known.fetch(KEY))
    assert known.is_missing(KEY)
    server.answer = lambda _: (200, {"schema": TEXT})
    assert known.fetch(KEY) is None
    assert known.find(KEY) == Schema("AVRO", TEXT)
    asked = len(server.requests)
    assert SchemaRegistry(server.url).find(KEY) == Schema("AVRO", TEXT)
    assert len(server.requests) == asked, "ids are kept, by the address"


def test_the_largest_schema_and_one_beyond(server: Server) -> None:
    server.answer = lambda _: (200, {"schema": "x" * MOST_BYTES})
    known = SchemaRegistry(server.url)
    assert known.fetch(KEY) is None
    for size in (MOST_BYTES + 1, 3 * MOST_BYTES):
        server.answer = lambda _, size=size: (200, {"schema": "x" * size})
        key = b"\0\0\0\0" + bytes([size % 250 + 1])
        assert known.fetch(key) is None
        with pytest.raises(DecodeError, match=f"more than {MOST_BYTES} bytes"):
            known.find(key)


def test_references_and_a_circle_of_them(server: Server) -> None:
    def answer(request: Any) -> Any:
        refers = {"/schemas/ids/7": "b", "/subjects/b/versions/1": "c", "/subjects/c/versions/1": ends.get("c")}
        to = refers[request.path]
        return 200, {"schema": request.path, "references": [{"name": to, "subject": to, "version": 1}] if to else []}

    ends: dict[str, str] = {}
    server.answer = answer
    known = SchemaRegistry(server.url)
    known.fetch(KEY)
    assert known.find(KEY).references == ("/subjects/c/versions/1", "/subjects/b/versions/1")
    ends["c"] = "b"
    server.answer = lambda request: answer(request) if "ids" not in request.path else (
        200, {"schema": "", "references": [{"subject": "b", "version": 1}]})  # fmt: skip
    other = b"\0\0\0\0\x08"
    known.fetch(other)
    with pytest.raises(DecodeError, match="circle, by b version 1"):
        known.find(other)


def test_the_largest_id_and_ids_of_eight_bytes(server: Server) -> None:
    server.answer = lambda _: (200, {"schema": TEXT})
    SchemaRegistry(server.url).fetch(b"\0\xff\xff\xff\xff")
    long = SchemaRegistry(server.url, wire="apicurio8")
    assert long.key_of(b"\0" * 7 + b"\1\2value") == b"\0" * 7 + b"\1\2"
    long.fetch(b"\0" * 7 + b"\1\2")
    guid = bytes(range(16))
    long.fetch(b"\1" + guid)
    assert [each.rsplit("/", 1)[1] for each in server.requests] == [
        "4294967295", "258", "00010203-0405-0607-0809-0a0b0c0d0e0f"]  # fmt: skip


def test_credentials_are_sent_and_never_shown(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answer = lambda _: (200, {"schema": TEXT})
    host = server.url.removeprefix("http://")
    known = SchemaRegistry(f"http://me:p%40ss@{host}/")
    known.fetch(KEY)
    SchemaRegistry(server.url + "/a", auth="token").fetch(KEY)
    monkeypatch.setenv("KES_REGISTRY_URL", server.url + "/b")
    monkeypatch.setenv("KES_REGISTRY_AUTH", "me:from outside")
    outside = SchemaRegistry()
    outside.fetch(KEY)
    assert [headers["Authorization"] for headers in server.headers] == [
        "Basic bWU6cEBzcw==", "Bearer token", "Basic bWU6ZnJvbSBvdXRzaWRl"]  # fmt: skip
    for each in (known, outside):
        assert "ss" not in repr(each).replace("127", "")
        assert b"p@ss" not in pickle.dumps(each)
        assert b"from outside" not in pickle.dumps(each)


@pytest.mark.parametrize("url", ["", "registry:8081", "ftp://r", "http://:x@", "http://r:port", "http://r/?a=b"])
def test_an_address_that_is_none(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KES_REGISTRY_URL", raising=False)
    with pytest.raises(ConfigError):
        _ = SchemaRegistry(url).url
    assert SchemaRegistry("https://[::1]:8081/apis/").url == "https://[::1]:8081/apis"


def test_a_folder_is_enough_for_a_start(server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server.answer = lambda request: (200, {"id": 7, "schema": TEXT})
    first = SchemaRegistry(server.url, folder=tmp_path)
    first.fetch(KEY)
    assert first.look_up(["a-value"], Schema("AVRO", TEXT), "A") == 7
    registry._processes.clear()
    server.answer = lambda request: (500, {})
    again = SchemaRegistry(server.url, folder=tmp_path)
    assert again.find(KEY) == Schema("AVRO", TEXT)
    assert again.look_up(["a-value"], Schema("AVRO", TEXT), "A") == 7
    registry._processes.clear()
    [file] = (each for each in tmp_path.glob("registry-*/*.json") if b'"written":[]' in each.read_bytes())
    file.write_bytes(file.read_bytes().replace(b"record", b"recorx"))
    with caplog.at_level(logging.WARNING):
        assert SchemaRegistry(server.url, folder=tmp_path).is_missing(KEY)
    assert "another SHA-256" in caplog.text
    assert SchemaRegistry(server.url + "/other", folder=tmp_path).is_missing(KEY), "by the address of the registry"


def test_a_schema_that_changes_under_its_id_is_refused(server: Server) -> None:
    server.answer = lambda _: (200, {"schema": TEXT})
    known = SchemaRegistry(server.url)
    known.fetch(KEY)
    server.answer = lambda _: (200, {"schema": json.dumps(json.loads(TEXT), indent=4)})
    known.fetch(KEY)
    server.answer = lambda _: (200, {"schema": TEXT.replace("A", "B")})
    with pytest.raises(ConfigError, match="has another schema 7 than before"):
        known.fetch(KEY)
    assert known.find(KEY) == Schema("AVRO", TEXT)


def test_ids_that_differ_by_subject_are_refused(server: Server) -> None:
    server.answer = lambda request: (200, {"id": len(request.path), "schema": TEXT})
    with pytest.raises(ConfigError, match="written with one id, and its subjects"):
        SchemaRegistry(server.url).look_up(["a", "bb"], Schema("AVRO", TEXT), "A")


def test_registering_and_an_incompatible_schema(server: Server) -> None:
    client = SchemaRegistry(server.url).client
    server.answer = lambda _: (409, {"error_code": 409, "message": "Schema being registered is incompatible"})
    with pytest.raises(NotInRegistry, match="incompatible"):
        client.register("a/b", Schema("JSON", "{}"))
    assert server.requests == ["POST /subjects/a%2Fb/versions"]
    server.answer = lambda _: (200, {"is_compatible": False, "messages": ["READER_FIELD_MISSING"]})
    assert client.incompatible("a", Schema("AVRO", TEXT)) == "READER_FIELD_MISSING"


def test_another_process_asks_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answer = lambda _: (200, {"schema": TEXT})
    known = SchemaRegistry(server.url)
    known.fetch(KEY)
    sent = pickle.dumps(known)
    registry._processes.clear()
    monkeypatch.setattr(registry.os, "getpid", lambda: -1)
    there, asked = pickle.loads(sent), len(server.requests)
    assert there.find(KEY) == Schema("AVRO", TEXT)
    for each in (there, SchemaRegistry(server.url)):  # of the classes that it imports, too
        with pytest.raises(DecodeError, match="was not sent with the job"):
            each.find(b"\0\0\0\0\x09")
        with pytest.raises(ConfigError, match="the id of A under 'a-value' was not sent with the job"):
            each.look_up(["a-value"], Schema("AVRO", TEXT), "A")
        each.fetch_subjects(["a-value"])
        assert each.unknown(b"\0\0\0\0\x09value") is None, "nothing would end the wait"
    monkeypatch.delenv("KES_REGISTRY_URL", raising=False)
    nameless = SchemaRegistry()
    nameless.receive(known.sent().replace(registry._process_name(), "the driver"))
    assert nameless.find(KEY) == Schema("AVRO", TEXT)
    assert nameless.is_local
    assert len(server.requests) == asked


async def test_a_read_on_an_event_loop_has_its_schema_fetched(server: Server) -> None:
    """Of a view, or of a lookup in a handler: nothing else fetches it."""
    server.answer = lambda _: (500, {})
    known = SchemaRegistry(server.url)
    with pytest.raises(RegistryUnavailable, match=r"the schema 7 .* it is being fetched: read the value again"):
        known.find(KEY)
    while known._process.fetching:
        await asyncio.sleep(0.01)
    server.answer = lambda _: (200, {"schema": TEXT})
    with pytest.raises(RegistryUnavailable):
        known.find(KEY)
    while known.is_missing(KEY):
        await asyncio.sleep(0.01)
    assert known.find(KEY) == Schema("AVRO", TEXT)
