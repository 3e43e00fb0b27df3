"""Schemas of a registry on Spark: the driver asks for them when a query is planned, and sends them with it. Tasks ask
nothing: hundreds of them would, and each anew.
"""

from __future__ import annotations

from typing import Any

from streams.errors import ConfigError
from streams.events import EventType

OfNeeds = tuple[tuple[str, tuple[str, ...]], ...]


def of_event(event: EventType[Any], *, writes: bool) -> str:
    """Return what tasks need to read an event, or to write it; ``""``: nothing. Blocks while the registry is away.
    Raises ``ConfigError``, ``RegistryUnavailable``."""
    codec: Any = event.codec
    if not hasattr(codec, "registry"):
        return ""
    from streams.formats.registry import until_there

    if writes and not codec.subjects:
        raise ConfigError(f"{event.name} is not written: its codec does not say where its schema is registered: "
                          f"{type(codec).__name__}(subject=...)")  # fmt: skip
    until_there(codec.prepare if writes else lambda: codec.registry.fetch_subjects(codec.subjects), codec.registry)
    if codec.is_read_by_schema:
        _check(codec.registry, event.name, f"{type(codec).__name__}(subject=...), or types=BySchema(subjects=...)")
    sent: str = codec.registry.sent()
    return sent


def of_rule(rule: Any) -> None:
    """Fetch what a rule needs on the workers, which get it with the rule. Raises as ``of_event``."""
    if hasattr(rule, "registry"):
        from streams.formats.registry import until_there

        until_there(rule.prepare, rule.registry)
        _check(rule.registry, "types=BySchema", "BySchema(registry, subjects=...)")


def received(event: EventType[Any], sent: str) -> None:
    """Have an event's codec know what was sent, in a task."""
    codec: Any = event.codec
    if sent:
        codec.registry.receive(sent)


def of_needs(needs: list[Any]) -> OfNeeds:
    """Return what tasks need that run a source with these codecs and rules: for each registry what is known of it, and
    the titles of those that use it. Raises as ``of_event``."""
    if not needs:
        return ()
    from streams.formats.schema_codecs import prepare

    prepare(needs)
    registries = {id(each.registry): each.registry for each in needs}
    return tuple(
        (registry.sent(), tuple(each.title for each in needs if each.registry is registry))
        for registry in registries.values()
    )


def needs_received(needs: list[Any], sent: OfNeeds) -> None:
    """Have the codecs and rules of a source know what was sent, in a task."""
    registries = {each.title: each.registry for each in needs}
    for known, titles in sent:
        for title in titles:
            if title in registries:
                registries[title].receive(known)


def _check(registry: Any, what: str, how: str) -> None:
    if not registry.has_schemas:
        raise ConfigError(
            f"{what}: {registry.url} has no schema of the named subjects, and tasks do not ask for one: name those "
            f"whose versions are read, by {how}"
        )
