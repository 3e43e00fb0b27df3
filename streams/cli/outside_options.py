"""Options of commands that stand in the settings file (``[commands.run]``, ``workers = 2``) or in the environment
(``KES_RUN_WORKERS``)."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from streams.cli.commands import COMMANDS as COMMAND_NAMES
from streams.cli.commands import build
from streams.errors import ConfigError
from streams.settings.sources import (
    CLIENTS,
    COMMANDS,
    FILE_VARIABLE,
    PREFIX,
    SettingsSources,
    fields_of,
    is_group,
    unknown_setting,
    variable,
)

OTHER_VARIABLES: Final = frozenset(
    {
        *("CACHE_DIR", "COMPILED_WHEEL", "DEBUG", "FAULT", "JAVA", "KAFKA_JARS", "PLAIN", "TEST_BROKER", "VERBOSE"),
        *("SOURCE", "WORKERS"),  # of the unit of systemd
        *("REGISTRY_AUTH", "REGISTRY_URL"),
    }
)
"""Variables of the toolkit that are no settings."""
_NEARLY: Final = 0.9
"""A variable that may be an option of a command that is not loaded is taken for one, unless it is as like to another
as this."""


def checked_options(sources: SettingsSources, command: Any) -> dict[str, Any]:
    """Return the options in the settings file, by command. Raises ``ConfigError`` for what no command has; only the
    options of commands that are loaded are known."""
    table = sources.tables.get(COMMANDS, {})
    _check(f"{sources.path}: [{COMMANDS}", table, command)
    return dict(table)


def locations_of(sources: SettingsSources, called: str) -> list[str]:
    """Return the locations of options of this command that are not on the command line."""
    begin = f"{PREFIX}{called.upper()}_"
    file = [f"[{COMMANDS}.{called}] in {sources.path}"] if called in sources.tables.get(COMMANDS, {}) else []
    return sorted(name for name in os.environ if name.startswith(begin)) + file


def unknown_variables(command: Any) -> Iterator[str]:
    """Yield a sentence for each variable that looks like a setting, or an option of the command, and is none."""
    from streams.settings.config import EventSourceConfig

    fields = fields_of(EventSourceConfig)
    settings = {variable((name,)) for name in fields}
    settings |= {variable((name, part)) for name, kind in fields.items() if is_group(kind) for part in fields_of(kind)}
    settings |= set(_variables(command, ()))
    known = settings | {f"{name}_FILE" for name in settings} | {PREFIX + name for name in OTHER_VARIABLES}
    clients = tuple(variable((name, "")) for name in CLIENTS)
    for name in sorted(os.environ):
        if not name.startswith(PREFIX) or name.startswith(clients) or name in known or name == FILE_VARIABLE:
            continue
        owner = next((each for each in COMMAND_NAMES if name.startswith(variable((each, "")))), "")
        near = difflib.get_close_matches(name, sorted(settings), 1, _NEARLY if owner else 0.75)
        if not owner or (near and not _may_be_option(name, owner)):
            yield f"{name} is no setting: it has no effect" + (f"; did you mean {near[0]}?" if near else "")


def _may_be_option(name: str, owner: str) -> bool:
    """Check whether a variable is an option of another command, which is loaded for that; so it may be if it cannot."""
    from typer.main import get_command

    try:
        return name in _variables(get_command(build([owner])), ())
    except (ConfigError, ImportError):  # an extra is missing
        return True


def _variables(command: Any, path: tuple[str, ...]) -> Iterator[str]:
    """Yield the variables of the options of a command, and of those below it."""
    yield from (variable((*path, parameter.name)) for parameter in command.params)
    for name, below in getattr(command, "commands", {}).items():
        yield from _variables(below, (*path, name))


def _check(location: str, table: object, command: Any) -> None:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{location}] must be a table, not {type(table).__name__}")
    below: Mapping[str, Any] = getattr(command, "commands", {})
    options = [parameter.name for parameter in command.params]
    for name, value in table.items():
        if name in below:
            if below[name].params or getattr(below[name], "commands", {}):  # others are not loaded
                _check(f"{location}.{name}", value, below[name])
            elif not isinstance(value, Mapping):
                raise ConfigError(f"{location}.{name}] must be a table, not {type(value).__name__}")
        elif name not in options:
            raise ConfigError(f"{location}]: {unknown_setting(name, dict.fromkeys([*below, *options]))}")
