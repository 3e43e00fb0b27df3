"""Explain from its log why a broker did not start: one sentence each, with the remedy."""

from __future__ import annotations

import shutil
from pathlib import Path

from streams.broker.probe import HOST
from streams.errors import EmbeddedBrokerError

_LINES = 15
_FULL = 1 << 20
_BROKEN_JAR = ("NoClassDefFoundError", "ClassNotFoundException", "ZipException", "error in opening zip")


class PortTaken(EmbeddedBrokerError):
    """Another process listens on the port."""


def port_taken(port: int) -> PortTaken:
    """Build the error for a client port that is in use."""
    return PortTaken(f"port {port} on {HOST} is taken by another process: stop that one, or name another port")


def folder_taken(folder: Path) -> EmbeddedBrokerError:
    """Build the error for a data folder that another broker works on."""
    return EmbeddedBrokerError(f"the data folder {folder} is in use by another broker: stop that one first")


def tail(path: Path, start: int) -> str:
    """Return the last lines of the log after byte ``start``."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-400:])


def ended(port: int, folder: Path, output: str) -> EmbeddedBrokerError:
    """Build the error for a process that ended before it served; ``output`` is the end of its log."""
    if "Address already in use" in output or "java.net.BindException" in output:
        return port_taken(port)
    if "No space left on device" in output or "Disk quota exceeded" in output or _is_full(folder):
        return EmbeddedBrokerError(f"the disk is full under {folder}: free some space, or name another folder")
    if "Failed to acquire lock on file" in output:
        return folder_taken(folder)
    if "UnsupportedClassVersionError" in output:
        return EmbeddedBrokerError(f"the Java is too old for this Kafka: name a newer one in KES_JAVA.{_last(output)}")
    if any(name in output for name in _BROKEN_JAR):
        return EmbeddedBrokerError(f"jars of Kafka are missing or broken: check KES_KAFKA_JARS.{_last(output)}")
    if "insufficient memory" in output or "Could not reserve enough space" in output:
        return EmbeddedBrokerError(
            f"there is too little memory for the broker: lower heap_mb, or free some.{_last(output)}"
        )
    if "ConfigException" in output:
        return EmbeddedBrokerError(f"the broker refuses a server property.{_last(output)}")
    return EmbeddedBrokerError(f"the broker ended while it started.{_last(output)}")


def timed_out(seconds: float, output: str) -> EmbeddedBrokerError:
    """Build the error for a process that runs but does not serve in time; ``output`` is the end of its log."""
    return EmbeddedBrokerError(
        f"the broker did not serve within {seconds:g} s (is the machine overloaded? raise start_timeout)."
        f"{_last(output)}"
    )


def _is_full(folder: Path) -> bool:
    # Files that are mapped into memory give an access fault on a full disk, and no word of the reason.
    try:
        return shutil.disk_usage(folder).free < _FULL
    except OSError:
        return False


def _last(output: str) -> str:
    lines = output.splitlines()[-_LINES:]
    return "\nIts last lines:\n" + "\n".join(f"    {line}" for line in lines) if lines else " It wrote nothing."
