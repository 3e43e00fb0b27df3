"""Records what Kafka's Java clients say and are answered: ``python -m tests.wire.record`` writes ``java_frames.json``.

``JavaClient.java`` speaks through the proxy with the embedded broker, once with each client below. Of each version of a
request two frames are kept, the shortest and the longest that are answered. DescribeLogDirs is left out: it has the
folders of the machine. Takes a minute; needs ``javac`` on the path.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from unittest.mock import patch

from streams.broker import KafkaBroker
from streams.testing import proxy
from streams.testing.proxy import KafkaProxy
from streams.testing.proxy_wire import RequestHeader, request_header
from tests.broker.kafka_versions import jars_of

CLIENTS = (("3.0.2", "-"), ("3.9.1", "classic"), ("3.9.1", "consumer"), ("4.1.1", "classic"), ("4.1.1", "consumer"))
"""Version of kafka-clients, and its ``group.protocol``."""
FRAMES = Path(__file__).with_name("java_frames.json")
LEFT_OUT = {"DescribeLogDirs"}


class Recorder(KafkaProxy):
    """Keeps requests with their answers, as the broker gave them."""

    def __init__(self, bootstrap_servers: str) -> None:
        super().__init__(bootstrap_servers)
        self.sent: dict[RequestHeader, bytes] = {}
        self.heard: dict[tuple[str, int], list[tuple[bytes, bytes]]] = {}

    def note(self, frame: bytes) -> RequestHeader:
        header = request_header(frame)
        self.sent[header] = frame
        return header

    async def _translated(self, header: RequestHeader, reply: bytes) -> bytes:
        if header in self.sent:
            self.heard.setdefault((header.name, header.version), []).append((self.sent.pop(header), reply))
        return await super()._translated(header, reply)


def record(version: str, protocol: str) -> Recorder:
    with tempfile.TemporaryDirectory() as folder, KafkaBroker() as kafka, Recorder(kafka.bootstrap_servers) as recorder:
        classpath = f"{jars_of(version)}/*"
        source = Path(__file__).with_name("JavaClient.java")
        subprocess.run(["javac", "-cp", classpath, "-d", folder, source], check=True)
        with patch.object(proxy, "request_header", recorder.note):
            command = ["java", "-cp", f"{folder}:{classpath}", "JavaClient", recorder.bootstrap_servers, protocol]
            subprocess.run(command, check=True, timeout=120)
        return recorder


def main() -> None:
    found = []
    for version, protocol in CLIENTS:
        print(f"kafka-clients {version}, {protocol}", flush=True)
        for (name, number), pairs in sorted(record(version, protocol).heard.items()):
            if name not in LEFT_OUT:
                pairs.sort(key=lambda pair: (len(pair[1]), len(pair[0]), pair))
                found += [
                    {"client": version, "api": name, "version": number, "request": sent.hex(), "answer": heard.hex()}
                    for sent, heard in dict.fromkeys((pairs[0], pairs[-1]))
                ]
    FRAMES.write_text("[\n" + ",\n".join(json.dumps(one) for one in found) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
