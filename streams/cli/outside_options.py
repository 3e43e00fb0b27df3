"""Options of commands that stand in the settings file (``[commands.run]``, ``workers = 2``) or in the environment
(``KES_RUN_WORKERS``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from streams.errors import ConfigError
from streams.settings_sources import COMMANDS, PREFIX, SettingsSources, unknown_setting


def checked_options(sources: SettingsSources, command: Any) -> dict[str, Any]:
    """Return the options in the settings file, by command. Raises ``ConfigError`` for what no command has; only the
    options of commands that are loaded are known."""
    table = sources.tables.get(COMMANDS, {})
    _check(f"{sources.path}: [{COMMANDS}", table, command)
    return dict(table)


def places_of(sources: SettingsSources, called: str) -> list[str]:
    """Return the places of options of this command that are not on the command line."""
    begin = f"{PREFIX}{called.upper()}_"
    file = [f"[{COMMANDS}.{called}] in {sources.path}"] if called in sources.tables.get(COMMANDS, {}) else []
    return sorted(name for name in os.environ if name.startswith(begin)) + file


def _check(place: str, table: object, command: Any) -> None:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{place}] must be a table, not {type(table).__name__}")
    below: Mapping[str, Any] = getattr(command, "commands", {})
    options = [parameter.name for parameter in command.params]
    for name, value in table.items():
        if name in below:
            if below[name].params or getattr(below[name], "commands", {}):  # others are not loaded
                _check(f"{place}.{name}", value, below[name])
            elif not isinstance(value, Mapping):
                raise ConfigError(f"{place}.{name}] must be a table, not {type(value).__name__}")
        elif name not in options:
            raise ConfigError(f"{place}]: {unknown_setting(name, dict.fromkeys([*below, *options]))}")
