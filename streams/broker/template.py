"""A formatted log folder for a new broker. Kafka's own tool makes it once per cache (a second of Java); then it is
copied, with an identity of its own for every copy.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path

from filelock import FileLock

from streams.broker.jars import JarSet, errors_named, require_space
from streams.broker.settings import CLUSTER_ID, NODE_ID, server_settings
from streams.errors import EmbeddedBrokerError
from streams.sak.cache import cache_folder
from streams.sak.java import Java

_FORMAT_SECONDS = 120
_NEEDED = 32 << 20  # a broker that has made its own topics and written a little


def formatted(folder: Path, java: Java, jars: JarSet, node: int = NODE_ID) -> None:
    """Make ``folder`` a formatted log folder of this node, unless it is one. Safe to repeat.

    Raises ``EmbeddedBrokerError``.
    """
    if (folder / "meta.properties").exists():
        return
    with errors_named(f"the data folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise EmbeddedBrokerError(
                f"the data folder {folder} holds files, but none of a broker's (no meta.properties); name an empty one"
            )
        require_space(folder, _NEEDED, "a broker's data")
        template = _template(java, jars)
        # Last of all the identity: a copy that was cut short has none, and is not taken for a broker's folder.
        draft = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
        try:
            shutil.copytree(template, draft)
            (draft / "meta.properties").write_text(_identity(node))
            folder.rmdir()
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def _identity(node: int) -> str:
    directory = "A" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")[1:]  # no "-" in front
    return f"version=1\nnode.id={node}\ncluster.id={CLUSTER_ID}\ndirectory.id={directory}\n"


def _template(java: Java, jars: JarSet) -> Path:
    root = cache_folder() / "templates"
    template = root / f"{jars.key}-java{java.major}"
    if template.exists():
        return template
    with errors_named(f"the cache folder {root}"):
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / "format.lock"):
            if not template.exists():
                for rubbish in root.glob("draft-*"):
                    shutil.rmtree(rubbish, ignore_errors=True)
                draft = Path(tempfile.mkdtemp(prefix="draft-", dir=root))
                try:
                    _format(draft, java, jars)
                    (draft / "data" / "meta.properties").unlink()
                    (draft / "data").rename(template)
                finally:
                    shutil.rmtree(draft, ignore_errors=True)
    return template


def _format(draft: Path, java: Java, jars: JarSet) -> None:
    settings = draft / "server.properties"
    settings.write_text(server_settings(draft / "data", 9092, 9093, {}))
    command = [str(java.binary), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", jars.classpath]
    command += ["kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", str(settings)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_FORMAT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise EmbeddedBrokerError(
            f"formatting a log folder took more than {_FORMAT_SECONDS} s; is the machine overloaded?"
        ) from None
    if done.returncode != 0:
        output = (done.stdout + done.stderr).strip()[-1500:]
        if "No space left on device" in output:
            raise EmbeddedBrokerError(f"the disk is full under {draft.parent}: free some space, or set KES_CACHE_DIR")
        raise EmbeddedBrokerError(f"Kafka's format tool failed with {java.binary} (exit {done.returncode}): {output}")
