"""The settings of a relay from outside of a program: a YAML file, and the environment, which wins over it.

The file has the settings of ``RelayConfig`` by their names, and no others. A setting's variable is ``KES_OUTBOX_`` and
its name in capitals; brokers and their security have the variables of every event source (``KES_BOOTSTRAP_SERVERS``,
``KES_CLIENT_SETTINGS_...``). ``_FILE`` behind a variable, or ``{file: ...}`` in the place of a value, has it read from
another file. A password has no place in this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, get_type_hints

import msgspec
import yaml  # type: ignore[import-untyped]

from streams.errors import ConfigError
from streams.outbox.config import RelayConfig
from streams.outbox.sessions import has_password
from streams.settings.sources import CLIENTS, Found, SettingsSources, in_file, unknown_setting

TABLE: Final = "outbox"


class _StrictLoader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """YAML without tags for objects, and without a key that comes twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Refuse a second value for a key: it would win silently."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for at, key in enumerate(keys):
            if key in keys[:at]:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is there twice", node.start_mark)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def relay_config(path: str = "", environment: Mapping[str, str] | None = None, **given: Any) -> RelayConfig:
    """Return the settings: those that are ``given`` (and not empty), else the environment's, else the file's.

    Raises ``ConfigError``, which names file or variable, and setting.
    """
    sources = SettingsSources(environment)
    tables = _content(path) if path else {}
    kinds = get_type_hints(RelayConfig)
    names = [field.name for field in fields(RelayConfig)]
    for name in tables:
        if name not in names:
            raise ConfigError(f"{path}: {unknown_setting(name, dict.fromkeys(names))}")
    settings: dict[str, Any] = {}
    for name in names:
        outside = sources.variable((name,) if name == "bootstrap_servers" else (TABLE, name))
        if outside is not None:
            settings[name] = _converted(outside, kinds[name])
        elif name in tables:
            found = in_file(path, tables[name], (name,))
            settings[name] = _converted(found, kinds[name])
            if name == "database" and not found.is_text and has_password(found.value):
                raise ConfigError(
                    f"{path}: database: a password has no place in this file; use {{file: ...}}, the variable "
                    "KES_OUTBOX_DATABASE, PGPASSWORD or PGPASSFILE"
                )
    if CLIENTS[0] in settings:  # its variables are those of every event source
        environment_wins = {key: found.value for key, found in sources.client_settings(CLIENTS[0]).items()}
        settings[CLIENTS[0]] = {
            **{key: in_file(path, value, (CLIENTS[0], key)).value for key, value in settings[CLIENTS[0]].items()},
            **environment_wins,
        }
    settings |= {name: value for name, value in given.items() if value not in ("", None)}
    if not settings.get("name"):
        raise ConfigError("an outbox has a name in Kafka: use --name, a file, or the variable KES_OUTBOX_NAME")
    return RelayConfig(**settings)


def _content(path: str) -> dict[str, Any]:
    try:
        content = _StrictLoader(Path(path).read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no YAML for settings: {_described(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must have settings by name, as in `name: shop`")
    return content


def _described(error: Exception) -> str:
    """Say where it is, without a line of the file, which may hold a secret."""
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return f"{where}{getattr(error, 'problem', None) or type(error).__name__}"


def _converted(found: Found, kind: Any) -> Any:
    try:
        return msgspec.convert(found.value, kind, strict=not found.is_text)
    except msgspec.ValidationError as error:  # its text has no value, which may be a secret in the wrong place
        raise ConfigError(f"{found.origin}: {error}") from None
