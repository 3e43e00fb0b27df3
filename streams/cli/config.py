"""``kes config``: the settings that are in effect, and where each comes from."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from streams.cli.cluster import Json, named_source
from streams.cli.console import emit, frameless
from streams.looks.settings import DEFAULT, Setting, settings_of
from streams.sak.harmless import harmless
from streams.settings.config import EventSourceConfig
from streams.settings.sources import SettingsSources, outside_settings

app = typer.Typer()


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


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value, enc_hook=str)


def _table(lines: list[Setting], sources: SettingsSources) -> Table:
    title = f"settings file: {sources.path}{'' if sources.has_file else ' (not there)'}"
    table = frameless("setting", "value", "from", title=title)
    for line in lines:
        table.add_row(line.setting, Text(harmless(str(_plain(line.value)))), Text(line.origin))
    return table
