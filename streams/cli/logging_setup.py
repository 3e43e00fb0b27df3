"""Log lines of a command: one handler at the root, so that the user's loggers work as the package's do."""

from __future__ import annotations

import configparser
import enum
import json
import logging
import logging.config
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from streams.errors import ConfigError
from streams.logs import FloodHandler, JsonFormatter
from streams.sak.harmless import harmless


class LogLevel(enum.StrEnum):
    """The levels of ``--log-level``."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


class LogFormat(enum.StrEnum):
    """The formats of ``--log-format``."""

    TEXT = "text"
    JSON = "json"


class LogOptions(msgspec.Struct, frozen=True):
    """Level and format of the lines on stderr, or a file of Python's logging configuration that decides in their place
    (an absolute path; empty: none)."""

    level: LogLevel = LogLevel.INFO
    format: LogFormat = LogFormat.TEXT
    config: str = ""


class _OursAtTheRoot(FloodHandler):
    """The handler that the command line has put at the root: the next configuration replaces it."""


class _TextFormatter(logging.Formatter):
    """Formats a record as text that a terminal cannot obey and a reader cannot take for several records: errors and
    messages may quote what is in an event."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record; its further lines are indented."""
        return one_record(super().format(record))


def one_record(text: str) -> str:
    """Return text that is one record: a terminal cannot obey it, and its further lines are indented. The spaces and
    joiners of numbers, scripts and emoji stay."""
    return harmless(text, keep="\n\t\xa0\u202f\u3000\u200c\u200d").replace("\n", "\n    ")


def configure_logging(options: LogOptions, worker: str = "") -> None:
    """Configure the loggers of this process. ``worker`` is in every line (for formats of a configuration file:
    ``%(worker)s``). Raises ``ConfigError`` for a file that cannot be applied."""
    _name_the_worker(worker)
    if options.config:
        apply(options.config)
        return
    stream = logging.StreamHandler()
    if options.format is LogFormat.JSON:
        stream.setFormatter(JsonFormatter())
    else:
        name = worker.replace("%", "%%") + " " if worker else ""
        stream.setFormatter(_TextFormatter(f"%(asctime)s %(levelname)-7s {name}%(name)s: %(message)s"))
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _OursAtTheRoot)]:
        root.removeHandler(handler)
    root.addHandler(_OursAtTheRoot(stream))
    root.setLevel(options.level.name)


def verbose_options(count: int) -> LogOptions:
    """The options of ``-v`` given so many times: warnings, information, everything."""
    return LogOptions((LogLevel.WARNING, LogLevel.INFO, LogLevel.DEBUG)[min(count, 2)])


def checked_file(path: Path) -> str:
    """The absolute path of a configuration file that can be read. Raises ``ConfigError`` with what is wrong with it."""
    read(str(path))
    return str(path.resolve())


def read(path: str) -> dict[str, Any] | configparser.RawConfigParser:
    """Read a configuration file: a dictionary (JSON, TOML) or sections (INI), as the functions of ``logging.config``
    take them. Raises ``ConfigError``."""
    kind = Path(path).suffix.lower()
    try:
        text = Path(path).read_text("utf-8")
        if kind in (".ini", ".conf", ".cfg"):
            sections = configparser.RawConfigParser()
            sections.read_string(text)
            return sections
        if kind not in (".json", ".toml"):
            raise ConfigError(f"--log-config {path}: the name must end with .json, .toml, .ini, .conf or .cfg")
        fields = json.loads(text) if kind == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"--log-config {path}: {error.strerror or error}") from error
    except (ValueError, configparser.Error) as error:
        raise ConfigError(f"--log-config {path} cannot be read as {kind[1:].upper()}: {error}") from error
    if not isinstance(fields, dict) or "version" not in fields:
        raise ConfigError(
            f"--log-config {path} is not a configuration for logging.config.dictConfig: it has no `version`"
        )
    return fields


def apply(path: str) -> None:
    """Apply a configuration file. Loggers that are there keep working, unless a dictionary says otherwise."""
    config = read(path)
    try:
        if isinstance(config, dict):
            logging.config.dictConfig({"disable_existing_loggers": False, **config})
        else:
            logging.config.fileConfig(config, disable_existing_loggers=False)
    except Exception as error:  # of a class that the file names as well
        cause = f": {error.__cause__}" if error.__cause__ is not None else ""
        raise ConfigError(f"--log-config {path} cannot be applied: {error}{cause}") from error


def _name_the_worker(worker: str) -> None:
    made = logging.getLogRecordFactory()
    if worker and not hasattr(made, "names_worker"):

        def named(*args: Any, **kwargs: Any) -> logging.LogRecord:
            record = made(*args, **kwargs)
            record.worker = worker
            return record

        vars(named)["names_worker"] = True
        logging.setLogRecordFactory(named)
