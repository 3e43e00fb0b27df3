"""A schema registry in memory, for tests: ``registry.client = FakeRegistry()``."""

from __future__ import annotations

from streams.events import needy_codecs
from streams.formats.registry_http import NotInRegistry, Schema


class FakeRegistry:
    """``RegistryClient`` that keeps schemas in memory, and takes any for compatible. ``calls``: the requests so far;
    ``error``: what each call raises instead of an answer. ``hidden``: ids that it does not show yet."""

    is_local = True

    def __init__(self) -> None:
        self.ids: dict[Schema, int] = {}
        self.subjects: dict[str, list[int]] = {}
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.hidden: set[int] = set()

    def register_declared(self) -> None:
        """Register the schemas of all declared events, as ``kes schema register`` does."""
        for codec in needy_codecs():
            for subject in codec.subjects:
                self.register(subject, codec.schema)

    def schema(self, key: bytes, /) -> Schema:
        self._called(f"schema {int.from_bytes(key[1:], 'big')}")
        for schema, number in self.ids.items():
            if number == int.from_bytes(key[1:], "big") and number not in self.hidden and not key[0]:
                return schema
        raise NotInRegistry("Schema not found")

    def lookup(self, subject: str, schema: Schema, /) -> int:
        self._called(f"lookup {subject}")
        number = self.ids.get(schema)
        if number is None or number not in self.subjects.get(subject, ()):
            raise NotInRegistry("Schema not found" if subject in self.subjects else "Subject not found")
        return number

    def register(self, subject: str, schema: Schema, /) -> int:
        self._called(f"register {subject}")
        number = self.ids.setdefault(schema, len(self.ids) + 1)
        versions = self.subjects.setdefault(subject, [])
        versions += [number] if number not in versions else []
        return number

    def versions(self, subject: str, /) -> dict[int, Schema]:
        self._called(f"versions {subject}")
        if subject not in self.subjects:
            raise NotInRegistry("Subject not found")
        texts = {number: schema for schema, number in self.ids.items()}
        return {number: texts[number] for number in self.subjects[subject]}

    def incompatible(self, subject: str, schema: Schema, /) -> str:
        self._called(f"incompatible {subject}")
        return ""

    def _called(self, what: str) -> None:
        self.calls.append(what)
        if self.error is not None:
            raise self.error
