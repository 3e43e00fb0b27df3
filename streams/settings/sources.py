"""Settings from outside of the code: variables of the environment, and a file.

What the code says wins, then the environment, then the file. A setting's variable is ``KES_`` and its path in
capitals: ``KES_POOL_POOL_SIZE`` for ``pool.pool_size``, ``KES_CLIENT_SETTINGS_SASL_PASSWORD`` for ``sasl.password`` in
``client_settings``; with ``_FILE`` behind it, it names a file that holds the value. The settings file is ``kes.toml``
in the current directory, or what ``KES_CONFIG`` names; ``{ file = "..." }`` in the place of a value has it read from
there.

TOML is read by the standard library and values are converted by msgspec, which holds the classes anyway.
"""

from __future__ import annotations

import difflib
import functools
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_origin

import msgspec

from streams.errors import ConfigError
from streams.outcomes import ErrorPolicy, Retry

PREFIX: Final = "KES_"
"""Text at the beginning of the variables of all settings."""
FILE_VARIABLE: Final = "KES_CONFIG"
"""Environment variable with the path of the settings file."""
FILE_NAME: Final = "kes.toml"
"""Name of the settings file in the current directory, unless ``KES_CONFIG`` names another one."""
COMMANDS: Final = "commands"
"""The table of the file that has the options of ``kes``, by command."""
PER_PROCESS: Final = frozenset({"instance_id"})
"""Settings that no file may have: each process needs a value of its own."""
RESOLVED_LATE: Final = frozenset({"bootstrap_servers", "instance_id"})
"""Settings that are looked up when the source runs, not when its settings are made."""
CLIENTS: Final = ("client_settings", "source_client_settings")
"""Tables of librdkafka's settings. They are joined: a key in the code leaves the others as they are outside."""

Path_ = tuple[str, ...]


class Found(NamedTuple):
    """A value and where it stands: the name of a variable, or the file and the path in it. ``is_text``: it has the type
    that it is written as only after conversion."""

    value: Any
    origin: str
    is_text: bool


class SettingsSources:
    """Environment and settings file, as they are now. Raises ``ConfigError`` for a file that cannot be read."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = os.environ if environment is None else environment
        named = self._environment.get(FILE_VARIABLE, "")
        self.path = Path(named or FILE_NAME)
        self.tables: dict[str, Any] = {}
        self.has_file = False
        try:
            self.tables = tomllib.loads(self.path.read_text(encoding="utf-8"))
            self.has_file = True
        except FileNotFoundError:
            if named:  # the file in the current directory may be missing, one that is named may not
                raise ConfigError(f"{FILE_VARIABLE} names {named}, which does not exist") from None
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{self.path} is no TOML: {error}") from None

    def find(self, path: Path_) -> Found | None:
        """Find the value of a setting; ``None``: there is none."""
        if (found := self.variable(path)) is not None:
            return found
        table: Any = self.tables
        for part in path[:-1]:
            table = table.get(part, {})
        return in_file(self.path, table[path[-1]], path) if path[-1] in table else None

    def variable(self, path: Path_) -> Found | None:
        """Find the value of a setting in the environment; ``None``: there is none."""
        name = variable(path)
        if name in self._environment:
            return Found(self._environment[name], name, True)
        if (file := self._environment.get(f"{name}_FILE")) is not None:
            return Found(_content(file, f"{name}_FILE"), f"{name}_FILE", True)
        return None

    def client_settings(self, table: str) -> dict[str, Found]:
        """Find librdkafka's settings of one of the two clients, by their names. Raises ``ConfigError``."""
        found = {key: in_file(self.path, value, (table, key)) for key, value in self.tables.get(table, {}).items()}
        for one in found.values():
            if not isinstance(one.value, str | int | float):
                raise ConfigError(f"{one.origin} must be text, a number, true or false, or {{ file = ... }}")
        begin = variable((table, ""))
        for name, text in self._environment.items():
            if name.startswith(begin):
                value = _content(text, name) if name.endswith("_FILE") else text
                key = name.removeprefix(begin).removesuffix("_FILE").lower().replace("_", ".")
                found[key] = Found(value, name, True)
        return found

    def check(self, known: Mapping[str, Iterable[str] | None]) -> None:
        """Raise ``ConfigError`` for a key of the file that is none. ``known``: the keys of each table; ``None``: it is
        no table, or one of any keys."""
        for key, value in self.tables.items():
            if key in PER_PROCESS:
                raise ConfigError(f"{self.path}: {key} cannot be there: each process needs one of its own")
            if key not in known:
                raise ConfigError(f"{self.path}: {unknown_setting(key, known)}")
            within = known[key]
            if isinstance(value, dict) and within is not None:
                for name in value:
                    if name not in within:
                        raise ConfigError(f"{self.path}: [{key}]: {unknown_setting(name, dict.fromkeys(within))}")
            elif within is not None or (key in (*CLIENTS, COMMANDS) and not isinstance(value, dict)):
                raise ConfigError(f"{self.path}: {key} must be a table: [{key}]")


def in_file(file: Path | str, value: Any, path: Path_) -> Found:
    """Return a value that stands in a settings file, or in the file that is named in its place."""
    origin = f"{file}: {'.'.join(path)}"
    if isinstance(value, dict) and value.keys() == {"file"}:
        return Found(_content(str(value["file"]), origin), origin, True)
    return Found(value, origin, False)


def variable(path: Path_) -> str:
    """Return the name of a setting's environment variable."""
    return PREFIX + "_".join(path).upper().replace(".", "_")


def without_credentials(setting: str, servers: str) -> str:
    """Return the brokers' addresses, which are shown in logs and errors. Raises ``ConfigError``: a password may be in
    them."""
    if "@" in servers:
        raise ConfigError(f"{setting} must not hold credentials; use the sasl.* settings")
    return servers


def checked_addresses(servers: str) -> str:
    """Return the brokers' addresses. Raises ``ConfigError`` if they are not ``host:port``, several with commas."""
    if not servers.strip(", "):
        raise ConfigError("bootstrap_servers is empty; it must be like 'host:9092' or 'host1:9092,host2:9092'")
    for address in without_credentials("bootstrap_servers", servers).split(","):
        host, _, port = address.strip().rpartition(":")
        if not (host.isprintable() and host and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise ConfigError(f"bootstrap_servers must be host:port, several with commas, not {address.strip()!r}")
    return servers


def bootstrap_servers(given: str = "", environment: Mapping[str, str] | None = None) -> str:
    """Return the brokers' addresses: those that are given, else those from outside. Raises ``ConfigError``: none."""
    if given:
        return without_credentials("bootstrap_servers", given)
    found = SettingsSources(environment).find(("bootstrap_servers",))
    if found is None or not found.value:
        raise ConfigError(
            f"no broker is named: set bootstrap_servers or the variable {variable(('bootstrap_servers',))}"
        )
    return without_credentials(f"bootstrap_servers ({found.origin})", _converted(found, str))


def joined_client_settings(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return librdkafka's settings from outside, with those that are given on top."""
    outside = SettingsSources().client_settings(CLIENTS[0])
    return {**{key: found.value for key, found in outside.items()}, **(given or {})}


# -- in classes of settings --------------------------------------------------------------------------------------------


class TakesOutsideSettings(msgspec.StructMeta):
    """A class of settings in groups. What its constructor is not given comes from outside; a group that is given is
    taken as it is."""

    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **settings: Any) -> Any:  # noqa: N805 (a metaclass)
            outside = outside_settings(cls)
            for table in CLIENTS:
                if isinstance(given := settings.get(table), Mapping):
                    settings[table] = {**outside.get(table, {}), **given}
            settings = {**outside, **settings}
            # What stands outside is for all sources of a program. One whose topic is on the group's cluster has no use
            # for these, and would be refused with them.
            if not settings.get("source_bootstrap_servers"):
                for table in CLIENTS[1:]:
                    if settings.get(table) == outside.get(table):
                        settings.pop(table, None)
            try:
                return super().__call__(*args, **settings)
            except TypeError as error:
                raise _wrong_settings(cls, args, settings) or error from None


def _wrong_settings(cls: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> ConfigError | None:
    """Make the error of settings that do not exist or are missing; ``None`` if that is not the mistake."""
    fields = cls.__struct_fields__
    if args:
        return ConfigError(f"{cls.__name__} takes its settings by name: {cls.__name__}({fields[0]}=..., ...)")
    grouped = {
        key: f"{name}={kind.__name__}({key}=...)"
        for name, kind in fields_of(cls).items()
        if is_group(kind)
        for key in kind.__struct_fields__
    }
    for name in [name for name in settings if name not in fields]:
        near = difflib.get_close_matches(name, [*fields, *grouped], 1)
        hint = f"did you mean {grouped.get(near[0], near[0])}?" if near else f"its settings are {', '.join(fields)}"
        return ConfigError(f"{cls.__name__} has no setting {name!r}; {hint}")
    required = len(fields) - len(cls.__struct_defaults__)
    missing = [name for name in fields[:required] if name not in settings]
    return ConfigError(f"{cls.__name__} needs {' and '.join(missing)}") if missing else None


def defaults_of(cls: Any) -> dict[str, Any]:
    """Return the defaults of a class of settings."""
    return dict(zip(reversed(cls.__struct_fields__), reversed(cls.__struct_defaults__), strict=False))


def outside_settings(cls: Any, sources: SettingsSources | None = None) -> dict[str, Any]:
    """Return the settings of a class that stand outside, converted. Raises ``ConfigError``, which names the place."""
    sources = SettingsSources() if sources is None else sources
    fields = fields_of(cls)
    groups = {name: fields_of(kind) for name, kind in fields.items() if is_group(kind)}
    sources.check({**dict.fromkeys((*fields, COMMANDS)), **groups})
    settings: dict[str, Any] = {}
    defaults = defaults_of(cls)
    for name, kind in fields.items():
        if name in CLIENTS:
            if found := sources.client_settings(name):
                settings[name] = {key: setting.value for key, setting in found.items()}
        elif name in groups:
            changes, origins = {}, []
            for key, of in groups[name].items():
                if (one := sources.find((name, key))) is not None:
                    changes[key] = _converted(one, of)
                    origins.append(one.origin)
            if changes:
                try:
                    settings[name] = msgspec.structs.replace(defaults[name], **changes)
                except ConfigError as error:
                    raise ConfigError(f"{error} ({', '.join(origins)})") from None
        elif (one := sources.find((name,))) is not None:
            value = _converted(one, kind)
            if name not in RESOLVED_LATE:
                settings[name] = value
    return settings


@functools.cache
def fields_of(cls: type) -> dict[str, Any]:
    """Return the settings of a class that can stand outside of the code, with their types: all but functions."""
    found = {field.name: field.type for field in msgspec.structs.fields(cls)}
    return {
        name: Retry if kind == ErrorPolicy else kind  # policies that are functions stand in the code only
        for name, kind in found.items()
        if "Callable" not in str(kind)
    }


def is_group(kind: Any) -> bool:
    """Check for a class of settings that has nothing but defaults: a group."""
    return isinstance(kind, type) and kind.__name__.endswith("Config") and issubclass(kind, msgspec.Struct)


def _converted(found: Found, kind: Any) -> Any:
    value = found.value
    try:
        if isinstance(value, str) and getattr(kind, "__name__", "") == "Retry":
            value = {"attempts": 1, "then": value}  # a policy may be named by its last word
        elif found.is_text and get_origin(kind) is not None and "tuple" in str(kind) and "," in value:
            value = [part.strip() for part in value.split(",")]
        return msgspec.convert(value, kind, strict=not found.is_text, str_keys=True)
    except ConfigError as error:
        raise ConfigError(f"{found.origin}: {error}") from None
    except msgspec.ValidationError as error:  # its text has no value, which may be a secret in the wrong place
        raise ConfigError(f"{found.origin}: {error}") from None


def _content(file: str, origin: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").rstrip("\r\n")  # editors end the last line of a secret
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{origin} names the file {file}, which cannot be read: {error}") from None


def unknown_setting(key: str, known: Mapping[str, Iterable[str] | None]) -> str:
    """Return the message for a setting that does not exist; it names the nearest one that does, also within a group.
    ``known``: as of ``SettingsSources.check``."""
    places = {name: f"{name!r} in [{group}]" for group, names in known.items() for name in names or ()}
    places |= {name: repr(name) for name in known}
    near = difflib.get_close_matches(key, places, 1)
    return f"there is no setting {key!r}" + (f"; did you mean {places[near[0]]}?" if near else "")
