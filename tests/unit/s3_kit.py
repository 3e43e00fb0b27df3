"""A store of objects that speaks as much of S3's protocol as its clients need here; and one that is in trouble."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase, BytesIO
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class ObjectStore:
    """Objects of one bucket, by their keys. ``status``: what every request is answered with instead, if it is not 0;
    ``hangs``: answers come when it is unset."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}  # of uploads that are under way
        self.status = 0
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.requests: list[str] = []


class _Requests(BaseHTTPRequestHandler):
    store: ClassVar[ObjectStore]
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        store, url = self.store, urlsplit(self.path)
        _, _, key = unquote(url.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        body = self._body()
        store.requests.append(f"{self.command} {key} {url.query}")
        store.goes_on.wait(20)
        if store.status:
            self._answer(store.status, b"<Error><Code>Trouble</Code><Message>in trouble</Message></Error>")
        elif "list-type" in query:
            self._answer(200, _listing(store.objects, query))
        elif "uploads" in query:
            self._answer(200, b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>")
        elif "partNumber" in query:
            store.parts.setdefault(key, {})[int(query["partNumber"])] = body
            self._answer(200, b"", ETag=f'"{query["partNumber"]}"')
        elif "uploadId" in query:
            store.objects[key] = b"".join(part for _, part in sorted(store.parts.pop(key).items()))
            self._answer(200, b"<CompleteMultipartUploadResult><ETag>1</ETag></CompleteMultipartUploadResult>")
        elif self.command == "PUT":
            store.objects[key] = body
            self._answer(200, b"", ETag=f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"')
        elif self.command == "DELETE":
            store.objects.pop(key, None)
            self._answer(204, b"")
        elif key not in store.objects:
            self._answer(404, b"<Error><Code>NoSuchKey</Code><Message>not there</Message></Error>")
        else:
            self._give(store.objects[key])

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = _without_chunks(self.rfile)
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        signed = "aws-chunked" in (self.headers.get("Content-Encoding") or "")
        return _without_chunks(BytesIO(data)) if signed else data

    def _give(self, data: bytes) -> None:
        asked = self.headers.get("Range", "").removeprefix("bytes=")
        if not asked:
            self._answer(200, data)
            return
        first, _, last = asked.partition("-")
        part = data[int(first) : int(last or len(data)) + 1]
        self._answer(206, part, **{"Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"})

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Last-Modified": formatdate(usegmt=True), **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


def _without_chunks(stream: BufferedIOBase) -> bytes:
    """The body that comes in chunks, of HTTP or of S3."""
    found = b""
    while size := int(stream.readline().strip().partition(b";")[0] or b"0", 16):
        found += stream.read(size)
        stream.readline()
    while stream.readline().strip():  # trailers
        pass
    return found


def _listing(objects: dict[str, bytes], query: dict[str, str]) -> bytes:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    folders: set[str] = set()
    rows = ""
    for key, data in sorted(objects.items()):
        if key.startswith(prefix):
            head, mark, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if mark:
                folders.add(prefix + head + mark)
            else:
                when = "2026-01-01T00:00:00.000Z"
                rows += f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size>"
                rows += f"<LastModified>{when}</LastModified></Contents>"
    rows += "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders))
    count = rows.count("<Contents>") + len(folders)
    head = f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{count}</KeyCount><IsTruncated>false</IsTruncated>"
    return f'<?xml version="1.0"?><ListBucketResult>{head}{rows}</ListBucketResult>'.encode()


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A store at an address of ``pyarrow.fs``, as long as the block runs."""
    handler = type("Requests", (_Requests,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        end = f"127.0.0.1:{server.server_port}"
        store = ObjectStore(f"s3://bucket/kes?region=us-east-1&scheme=http&endpoint_override={end}")
        handler.store = store  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield store
        finally:
            store.goes_on.set()
            server.shutdown()
