"""``kes config``: the settings that are in effect, and where each comes from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from streams.kafka.settings import is_secret
from streams.looks.cluster import Json, named_source
from streams.looks.console import emit
from streams.sak.harmless import harmless
from streams.settings.config import EventSourceConfig
from streams.settings.sources import (
    CLIENTS,
    RESOLVED_LATE,
    SettingsSources,
    defaults_of,
    fields_of,
    is_group,
    outside_settings,
)

app = typer.Typer()

CODE, DEFAULT = "code", "default"
DEFAULTS: Final = defaults_of(EventSourceConfig)
MASK: Final = "***"


class Setting(NamedTuple):
    """One line: path, value, and where that comes from."""

    setting: str
    value: Any
    origin: str


@app.command()
def config(
    source: Annotated[
        str,
        typer.Argument(metavar="MODULE:SOURCE", help="An event source. Default: show only environment and kes.toml."),
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="Include defaults.")] = False,
    json: Json = False,
) -> None:
    """Show the settings in effect and where each comes from: code, environment variable, kes.toml or default.

    Code overrides the environment, which overrides kes.toml. Secrets are masked. Variables that begin with KES_ and are
    no settings are reported, as by every command.

    Exit codes: 0 shown; 1 the file, a variable or the source cannot be used; 2 wrong usage.
    """
    sources = SettingsSources()
    outside = outside_settings(EventSourceConfig, sources)  # raises for what cannot be used
    found = named_source(source).config if source else None
    shown = [line for line in settings_of(found, sources, outside) if everything or line.origin != DEFAULT]
    emit([line._asdict() for line in shown], json, lambda: _table(shown, sources))


def settings_of(
    config: EventSourceConfig | None, sources: SettingsSources, outside: Mapping[str, Any]
) -> list[Setting]:
    """All settings with their origins, by comparison: one that equals what stands ``outside`` comes from there."""
    lines: list[Setting] = []
    for name, kind in fields_of(EventSourceConfig).items():
        if name in CLIENTS:
            lines += _client_lines(name, config, sources)
        elif is_group(kind):
            lines += [_line((name, part), config, sources, outside) for part in fields_of(kind)]
        else:
            lines.append(_line((name,), config, sources, outside))
    return lines


def _line(
    path: tuple[str, ...], config: EventSourceConfig | None, sources: SettingsSources, outside: Mapping[str, Any]
) -> Setting:
    name = ".".join(path)
    found, default = sources.find(path), _at(path, DEFAULTS)
    if config is None:
        value = default if found is None else _without_credentials(found.value)
        return Setting(name, value, DEFAULT if found is None else found.origin)
    value = _at(path, {field: getattr(config, field) for field in config.__struct_fields__})
    if found is not None and path[0] in RESOLVED_LATE and not value:
        return Setting(name, _without_credentials(found.value), found.origin)
    if found is not None and value == _at(path, outside):
        return Setting(name, value, found.origin)
    return Setting(name, value, DEFAULT if value == default and found is None else CODE)


def _at(path: tuple[str, ...], settings: Mapping[str, Any]) -> Any:
    value = settings.get(path[0])
    return value if len(path) == 1 or value is None else getattr(value, path[1])


def _without_credentials(value: Any) -> Any:
    """Mask the part of an address that may hold a password."""
    return re.sub(r"(^|,|://)[^,/@\s]+@", rf"\1{MASK}@", value) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value, enc_hook=str)


def _client_lines(table: str, config: EventSourceConfig | None, sources: SettingsSources) -> list[Setting]:
    found = sources.client_settings(table)
    values = {key: one.value for key, one in found.items()} if config is None else getattr(config, table)
    return [
        Setting(
            f"{table}.{key}",
            MASK if is_secret(key) else _without_credentials(value),
            found[key].origin if key in found and found[key].value == value else CODE,
        )
        for key, value in sorted(values.items())
    ]


def _table(lines: list[Setting], sources: SettingsSources) -> Table:
    table = Table(
        title=f"settings file: {sources.path}{'' if sources.has_file else ' (not there)'}", title_justify="left"
    )
    for column in ("setting", "value", "from"):
        table.add_column(column)
    for line in lines:
        table.add_row(line.setting, Text(harmless(str(_plain(line.value)))), Text(line.origin))
    return table
