"""Where snapshots are kept: folders, and a store of objects behind its protocol, with all its moods."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from streams.disk.blobs import Blobs, check_address, open_blobs
from streams.errors import ConfigError
from tests.broker.gate import gate
from tests.unit.s3_kit import ObjectStore, object_store
from tests.unit.waiting import PATIENCE


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    for name, value in {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "hidden", "EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with object_store() as found:
        yield found


@pytest.fixture(params=["folder", "file:", "s3:"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path, store: ObjectStore) -> Blobs:
    address = {"folder": str(tmp_path / "x"), "file:": f"file://{tmp_path}/x", "s3:": store.address}[request.param]
    return open_blobs(address)


def test_what_is_put_is_there(blobs: Blobs) -> None:
    assert blobs.list("a/b") == []
    with pytest.raises(FileNotFoundError):
        blobs.get("a/b/one", 10)
    before = time.time()
    blobs.put("a/b/one", b"12345")
    blobs.put("a/b/c/two%2F", b"x" * 100)
    blobs.put("a/b/one", b"123456")
    assert blobs.get("a/b/one", 10) == b"123456"
    assert blobs.get("a/b/c/two%2F", 10) == b"x" * 11, "no more than one byte too many"
    (one,) = blobs.list("a/b")
    assert (one.name, one.size) == ("one", 6)
    assert one.written_at > before - 400 * 86_400
    assert [blob.name for blob in blobs.list("a/b/c")] == ["two%2F"]
    for _ in range(2):
        blobs.delete("a/b/one")
    assert blobs.list("a/b") == []


@pytest.mark.parametrize("is_readable_only", [False, True])
def test_what_a_killed_writer_has_left_is_removed_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_readable_only: bool
) -> None:
    blobs = open_blobs(str(tmp_path))
    blobs.put("blocks/one", b"1")
    old, young, other = (tmp_path / "blocks" / f".{name}" for name in (f"{'0' * 16}.new", f"{'1' * 16}.new", "keep"))
    for path in (old, young, other):
        path.write_bytes(b"half")
    for path in (old, other):
        os.utime(path, (time.time() - 90_000, time.time() - 90_000))
    if is_readable_only:

        def refuses(path: str) -> None:
            raise PermissionError(path)

        monkeypatch.setattr(os, "unlink", refuses)
    assert [blob.name for blob in blobs.list("blocks")] == ["one"]
    assert old.exists() == is_readable_only
    assert young.exists()
    assert other.exists()


@pytest.mark.parametrize(
    ("status", "call"),
    gate(product([403, 404, 500], ["put", "get", "list"]), (403, "put"), (404, "get"), (403, "list"), (500, "put")),
)
def test_a_store_that_refuses(store: ObjectStore, status: int, call: str) -> None:
    blobs = open_blobs(store.address)
    store.status = status
    calls = {"put": lambda: blobs.put("a", b"x"), "get": lambda: blobs.get("a", 1), "list": lambda: blobs.list("a")}
    with pytest.raises(OSError, match=r".") as caught:
        calls[call]()
    assert "hidden" not in str(caught.value)


def test_a_store_that_hangs_is_given_up(store: ObjectStore) -> None:
    blobs = open_blobs(store.address, call_seconds=0.3)
    store.goes_on.clear()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"has not answered \(list\) for 0.3 s"):
        blobs.list("a")
    assert time.monotonic() - began < PATIENCE / 3


@pytest.mark.nightly
def test_a_store_that_nobody_serves() -> None:
    with pytest.raises(OSError, match=r"."):
        open_blobs("s3://bucket/kes?region=us-east-1&scheme=http&endpoint_override=127.0.0.1:1").list("a")


@pytest.mark.parametrize(
    "address",
    [
        "s3://KEY:hidden@bucket",
        "s3://KEY:ab/hidden@bucket",
        "s3://KEY%3Ahidden@bucket",
        "s3://hidden@bucket",
        "file://host:hidden@place/x",
        "abfs://:hidden@account.dfs.core.windows.net/x",
        "abfs://container:hidden@account.dfs.core.windows.net/x",
        "abfs://container@account.dfs.core.windows.net/x?client_secret=hidden",
        "abfs://container@account.dfs.core.windows.net/x?account_key=hidden",
        "abfs://container@account.dfs.core.windows.net/x?sv=2024&sig=hidden",
        "https://account.blob.core.windows.net/x?sv=2024&SIG=hidden",
        "s3://bucket/x?region=a&secret%5Fkey=hidden",
        "s3://bucket/x?region=a;session_token=hidden",
        "s3://bucket/x?endpoint_override=http://me:hidden@minio",
    ],
)
def test_credentials_in_an_address_are_refused_and_not_shown(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^StateConfig.snapshots has credentials in it") as caught:
        check_address(address)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "abfs://container@account.dfs.core.windows.net/x",
        "abfss://container@account.dfs.core.windows.net/x?enable_tls=true",
        "s3://bucket/kes?region=eu-west-1&endpoint_override=minio:9000&scheme=http",
        "hdfs://host:8020/keys/sig",
        "/mnt/me@host:1/x",
    ],
)
def test_addresses_without_credentials(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize("address", ["ftp://host/x?other=hidden", "s3://bucket/x?other=hidden", "s3:///x?other=hidden"])
def test_options_are_not_shown(address: str) -> None:
    with pytest.raises(ConfigError, match=r"://") as caught:
        open_blobs(address).list("a")
    assert "hidden" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_without_pyarrow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.fs", None)
    with pytest.raises(ConfigError, match=r"pip install 'kafka-event-source\[snapshots\]'"):
        open_blobs("s3://bucket/x")
