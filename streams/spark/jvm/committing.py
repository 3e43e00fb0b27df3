"""The driver's Python for writes whose tasks encode in Java (``streams/spark/jvm``): plans them, and commits them.

One process for a driver's JVM, started by it (``jvm/Python.java`` has the format of requests) and ended with it, when
its input ends. Writes are the objects of ``sink``, so options, guards, marker and transaction are those of the half in
Python. Between plan and commit nothing of a write is kept here: the JVM has all that it is made from. A process that
dies takes along a commit, at most; the marker tells how that ended.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import struct
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any, BinaryIO, Final

from pyspark.sql import types as t

from streams.errors import ConfigError, StreamsError
from streams.records import DEFAULT_MESSAGE_LIMIT, RECORD_OVERHEAD
from streams.sak import spark_jar
from streams.spark.writing.batch_encoding import compression_settings
from streams.spark.writing.folders import local_path
from streams.spark.writing.placing import MOST_BATCH_BYTES, topic_shapes
from streams.spark.writing.sink import BatchWriter, MicroBatchWriter, StreamWriter
from streams.spark.writing.staging import Staged, StagedBatch
from streams.spark.writing.write_options import (
    MICRO_BATCH,
    micro_batch_options,
    stream_write_options,
    write_options,
)

Writer = BatchWriter | MicroBatchWriter | StreamWriter
_HEAD: Final = struct.Struct(">qi")
_SIZE: Final = struct.Struct(">q")
BEAT: Final = 0
"""In the place of a request's number: nothing follows, the process is alive."""
BEAT_SECONDS: Final = 1.0

_log = logging.getLogger(__name__)


def plan(question: Mapping[str, Any], _: list[bytes]) -> tuple[dict[str, Any], bytes]:
    """Plan a write: return what its tasks must know, and what it is made from when it is committed.

    ``{"python": why}``: tasks in Java cannot do it. Raises what the making of a writer raises, and ``ConfigError`` for
    a jar that is not this package's.
    """
    _check(question["jars"], question["spark"])
    made = {name: question[name] for name in ("kind", "options", "schema", "local")}
    part = _made(made).task_part
    if part.run is not None:  # so that the write that is committed is the one that was planned
        options = {name: value for name, value in question["options"].items() if name.lower() != "runid"}
        made |= {"options": {**options, "runId": part.run}, "done": part.done}
    folder = None
    if part.folder is not None:
        root = local_path(part.folder.root)
        if root is None and any(name.lower() == "tasks" for name in question["options"]):
            raise ConfigError(
                f"option tasks=java: its tasks stage in folders only, and stagingDir is a store ({part.folder}): leave "
                "one of the two options out. Nothing was written"
            )
        if root is None:
            _log.warning("stagingDir is a store (%s): tasks encode in Python, which knows its address", part.folder)
            return {"python": "stagingDir is a store"}, b""
        folder = [root, part.folder.names, os.getuid() if part.folder.private else -1]
    kafka = part.options.kafka
    codec, level = compression_settings(kafka)
    return {
        "topic": part.options.topic,
        "codec": codec,
        "level": level,
        "record_limit": int(kafka.get("message.max.bytes", DEFAULT_MESSAGE_LIMIT)),
        "overhead": RECORD_OVERHEAD - 1,  # the number of headers is counted already
        "batch_limit": int(kafka.get("batch.size", MOST_BATCH_BYTES)),
        "doing": part.doing,
        "folder": folder,
        "threshold": part.options.staging_threshold,
        "streaming": part.streaming,
        "done": part.done,
        "shape": None if part.options.topic is None or part.done else topic_shapes(kafka)(part.options.topic),
    }, json.dumps(made).encode()


def shape(question: Mapping[str, Any], parts: list[bytes]) -> tuple[dict[str, Any], bytes]:
    """Return the shape of a topic that rows name. Raises as ``topic_shapes`` does."""
    kafka = _writer(parts).task_part.options.kafka
    return {"shape": topic_shapes(kafka)(question["topic"])}, b""


def commit(question: Mapping[str, Any], parts: list[bytes]) -> tuple[dict[str, Any], bytes]:
    """Commit a write. Raises as its ``commit`` does."""
    writer = _writer(parts)
    writer.commit(_messages(writer, question, parts), *_batch(question))
    return {}, b""


def abort(question: Mapping[str, Any], parts: list[bytes]) -> tuple[dict[str, Any], bytes]:
    """Delete what tasks have staged."""
    writer = _writer(parts)
    writer.abort(_messages(writer, question, parts), *_batch(question))
    return {}, b""


_DONE: Final = {"plan": plan, "shape": shape, "commit": commit, "abort": abort}


def _check(jars: Mapping[str, str], spark: str) -> None:
    """Raises ``ConfigError`` unless every jar on the class path is of this package's sources, and for this Spark."""
    for jar, built in sorted(jars.items()):
        if refused := _refusal(built, spark):
            raise ConfigError(
                f"{jar} on Spark's class path {refused}. Take the package's own (kes spark jar), and only that one, or "
                "give the option tasks=python. Nothing was written"
            )


_refusal = functools.cache(spark_jar.refusal)


def _made(plan: Mapping[str, Any]) -> Writer:
    options = {name.lower(): value for name, value in plan["options"].items() if name.lower() != "tasks"}
    schema, local = t.StructType.fromJson(json.loads(plan["schema"])), plan["local"]
    if plan["kind"] == "stream":
        return StreamWriter(stream_write_options(options), schema, one_machine=local)
    if MICRO_BATCH.lower() in options:
        return MicroBatchWriter(*micro_batch_options(options), schema, one_machine=local)
    return BatchWriter(write_options(options), schema, one_machine=local, done=plan.get("done"))


def _batch(question: Mapping[str, Any]) -> tuple[int, ...]:
    return () if question["batch"] is None else (question["batch"],)


def _writer(parts: list[bytes]) -> Any:
    return _made(json.loads(parts[0]))


def _messages(writer: Any, question: Mapping[str, Any], parts: list[bytes]) -> list[Any]:
    """Return the tasks' messages as the half in Python makes them; ``None`` where Spark has none."""
    folder_of, data = writer.task_part.folder_of, iter(parts[1:])
    messages: list[Staged | None] = []
    for found in question["messages"]:
        if found is None:
            messages.append(None)
            continue
        batches = [StagedBatch(**batch) for batch in found["batches"]]
        query, batch, name = found["query"], found["batch"], found["name"]
        folder = None if name is None else folder_of(query, batch)
        messages.append(Staged(found["rows"], found["size"], next(data), folder, name, batches, query, batch))
    return messages


def answer(request: list[bytes]) -> list[bytes]:
    """Answer a request: JSON, and bytes. An error is an answer, too."""
    try:
        question = json.loads(request[0])
        found, data = _DONE[question["do"]](question, request[1:])
    except StreamsError as error:
        found, data = {"error": [type(error).__name__, str(error)]}, b""
    except BaseException as error:
        said = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        found, data = {"error": [StreamsError.__name__, said]}, b""
    return [json.dumps(found).encode(), data]


def serve(source: BinaryIO, target: BinaryIO, beat_seconds: float = BEAT_SECONDS) -> None:
    """Answer requests, each in a thread of its own, until there are no more. In between give a sign of life: by it the
    JVM tells a long commit from a process that stands still."""
    lock, ended = threading.Lock(), threading.Event()

    def beat() -> None:
        with contextlib.suppress(OSError, ValueError):  # the driver is gone: seen where requests are read
            while not ended.wait(beat_seconds):
                with lock:
                    target.write(_SIZE.pack(BEAT))
                    target.flush()

    def reply(number: int, request: list[bytes]) -> None:
        parts = answer(request)
        with lock:
            target.write(_SIZE.pack(number) + b"".join(_SIZE.pack(len(part)) + part for part in parts))
            target.flush()

    threading.Thread(target=beat, daemon=True).start()
    while len(head := source.read(_HEAD.size)) == _HEAD.size:
        number, count = _HEAD.unpack(head)
        request = [_read(source, _SIZE.unpack(_read(source, _SIZE.size))[0]) for _ in range(count)]
        threading.Thread(target=reply, args=(number, request), daemon=True).start()
    ended.set()


def _read(source: BinaryIO, size: int) -> bytes:
    data = source.read(size)
    if len(data) < size:
        os._exit(0)  # the driver died in the middle of a request
    return data


def main() -> None:
    """Serve the JVM that has started this process."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed here is no answer
    serve(sys.stdin.buffer, answers)
    os._exit(0)  # what is being committed now has no driver any more: it ends by its timeout, or by a successor


if __name__ == "__main__":
    main()
