"""The description of an event source in the language of AsyncAPI 3.0: its topics, and the events that it takes.

It is made from the declarations alone and asks no broker. State is no interface: the changelog is left out. What
handlers send is known at run time only, so the channels of outputs have no messages.

https://www.asyncapi.com/docs/reference/specification/v3.0.0
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from streams.codecs import BytesCodec, IntCodec, JsonCodec, MsgpackCodec, PydanticCodec, StrCodec
from streams.events import EventType
from streams.formats.cloudevents import CloudEvents
from streams.formats.rules import Deleted, TypeRule
from streams.model.partitioners import name_of
from streams.model.reasons import reason
from streams.model.topics import InputSpec, TopicSpec
from streams.protocols import Codec
from streams.records import TYPE_HEADER, VERSION_HEADER
from streams.runtime import source_topics
from streams.source.event_source import EventSource

_SCHEMAS: Final = "#/components/schemas/"
_NOT_IN_A_NAME: Final = re.compile(r"[^a-zA-Z0-9.\-_]")
_JSON: Final = "application/json"
_BYTES: Final = "application/octet-stream"

Tree = dict[str, Any]


def asyncapi(source: EventSource[Any], version: str = "1.0.0", servers: str = "") -> Tree:
    """Return the description as plain values. ``version``: of the interface, as its owner counts it; ``servers``: the
    addresses to show, ``host:port,...``; empty: none. Contacts no broker."""
    made = _Document(source)
    info: Tree = {"title": source.config.group_id, "version": version}
    if crons := source.topology.crons:
        info["x-kes-schedules"] = crons
    document: Tree = {"asyncapi": "3.0.0", "info": info, "channels": made.channels, "operations": made.operations}
    hosts = [host.strip() for host in servers.split(",") if host.strip()]
    if hosts:
        is_safe = "ssl" in str(source.config.client_settings.get("security.protocol", "")).lower()
        protocol = "kafka-secure" if is_safe else "kafka"
        document["servers"] = {
            f"kafka{number}": {"host": host, "protocol": protocol} for number, host in enumerate(hosts)
        }
    return document | ({"components": {"schemas": made.schemas}} if made.schemas else {})


class _Document:
    """The parts of one description."""

    def __init__(self, source: EventSource[Any]) -> None:
        self.channels: Tree = {}
        self.operations: Tree = {}
        self.schemas: Tree = {}
        self._declared = declared = source._declared
        self._types: dict[EventType[Any], tuple[str, Tree]] = {}
        config, router, specs = declared.config, declared.router, declared.inputs.specs
        routes = [route for route in router.each if route.event_type is not None]
        toolkit = {route.name for route in routes if route.event_type and route.event_type.name.startswith("kes.")}
        self._events = {
            name: route.event_type
            for route in routes
            if route.event_type is not None and route.name not in toolkit
            for name in route.event_type.names
        }
        for topic in source_topics.specs(config):
            purpose = source_topics.purposes(config)[topic.name]
            if purpose == source_topics.SOURCE:
                self._input(topic, specs.get(topic.name), "The source's own topic")
            elif purpose == source_topics.LOOP:
                self._input(topic, None, "The loop: events that the source sends to itself")
                self._sends(topic.name)
            elif purpose == "dead letters":
                self._channel(topic, "Records that an error policy gave up on, as they came, with headers that say why")
                self._sends(topic.name)
        for topic in declared.inputs.topics():
            spec = specs[topic.name]
            if spec.table is None:
                self._input(topic, spec, "A further input")
            else:
                self._rows(topic, spec.table.codecs, "A joined table: the last record of a key is its row")
        for topic in declared.lookups.topics():
            self._channel(msgspec.structs.replace(topic, partitions=0), "A table that is looked up")
            self._receives(topic.name)
        for topic in declared.outputs.by_topic.values():
            self._output(topic)

    def _channel(self, topic: TopicSpec, description: str, messages: Mapping[str, Tree] | None = None) -> Tree:
        binding: Tree = {"topic": topic.name}
        if topic.partitions:
            binding |= {"partitions": topic.partitions, "replicas": topic.replication_factor}
        if cleanup := topic.configs.get("cleanup.policy"):
            binding["topicConfiguration"] = {"cleanup.policy": cleanup.split(",")}
        channel: Tree = {"address": topic.name, "description": description}
        if messages:
            channel["messages"] = dict(messages)
        channel["bindings"] = {"kafka": binding | {"bindingVersion": "0.5.0"}}
        self.channels[topic.name] = channel
        return channel

    def _input(self, topic: TopicSpec, spec: InputSpec | None, description: str) -> None:
        rule = None if spec is None else spec.types
        names = [*self._events]
        if isinstance(rule, TypeRule):
            description += f"; {rule.title} says the types of its records"
            # A rule without a table gives any type by its name.
            names = [name for name in rule.names if name in self._events] or names
        types = dict.fromkeys(self._events[name] for name in names)
        messages = {_named(found.name): self._message(found, rule) for found in types}
        if isinstance(rule, TypeRule) and Deleted.__name__ in {name.removeprefix("kes.") for name in rule.names}:
            description += "; a record without a value deletes its key"
        self._channel(topic, description, messages)
        self._receives(topic.name, messages)

    def _rows(self, topic: TopicSpec, codecs: tuple[Codec[Any], Codec[Any]], description: str) -> None:
        names = [f"{topic.name}.{part}" for part in ("key", "row")]
        (_, _), (content, row) = (self._schema(codec, name) for codec, name in zip(codecs, names, strict=True))
        # As it stands: a reference is both forms that AsyncAPI's own schema allows here, of which it wants one.
        binding = {"kafka": {"key": self.schemas[_named(names[0])], "bindingVersion": "0.5.0"}}
        messages: dict[str, Tree] = {
            "row": {"name": "row", "contentType": content, "payload": row, "bindings": binding}
        }
        self._channel(topic, description, messages)
        self._receives(topic.name, messages)

    def _output(self, topic: TopicSpec) -> None:
        declared, name = self._declared.outputs, topic.name
        form, place_of = declared.forms.get(name), declared.partitioners.get(name)
        description = "An output" + (f"; its events are CloudEvents of the source {form.source!r}" if form else "")
        channel = self._channel(topic, description)
        channel["x-kes-partitioner"] = "murmur2" if place_of is None else name_of(place_of)
        channel["x-kes-null-keys"] = declared.null_keys.get(name, "sticky")
        self._sends(name)

    def _message(self, found: EventType[Any], rule: object) -> Tree:
        if found not in self._types:
            self._types[found] = self._schema(found.codec, found.name)
        content, payload = self._types[found]
        names = {TYPE_HEADER: found.name} if rule is None else {}
        if rule is None and found.version > 1:
            names[VERSION_HEADER] = str(found.version)
        if isinstance(rule, CloudEvents):
            names = {"ce_type": found.name}
        message: Tree = {"name": found.name, "title": found.cls.__name__, "contentType": content}
        if names:
            properties = {name: {"type": "string", "const": content} for name, content in names.items()}
            message["headers"] = {"type": "object", "required": [*names], "properties": properties}
        message["payload"] = payload
        message["x-kes-version"] = found.version
        return message | ({"x-kes-aliases": [*found.names[1:]]} if found.names[1:] else {})

    def _schema(self, codec: Codec[Any], name: str) -> tuple[str, Tree]:
        """Return the content type of a codec, and a reference to the schema of its values. Those that it refers to have
        ``name`` in front, so that two classes of one name are two."""
        content, schema = self._described(codec, _named(name))
        self.schemas[_named(name)] = schema
        return content, {"$ref": _SCHEMAS + _named(name)}

    def _described(self, codec: Codec[Any], name: str) -> tuple[str, Tree]:
        if isinstance(codec, StrCodec):
            return "text/plain", {"type": "string"}
        if isinstance(codec, (JsonCodec, MsgpackCodec, PydanticCodec)):
            content = "application/msgpack" if isinstance(codec, MsgpackCodec) else _JSON
            try:
                return content, self._of_type(codec, name)
            except Exception as error:  # a class that writes itself by hooks of its own
                return content, {"description": f"There is no schema of this class: {reason(error)[:200]}"}
        if isinstance(codec, (BytesCodec, IntCodec)) or type(codec).__module__ == BytesCodec.__module__:
            return _BYTES, {"type": "string", "format": "binary"}
        own = f"Written by a codec of its own, {type(codec).__qualname__}"
        return _BYTES, {"type": "string", "format": "binary", "description": own}

    def _of_type(self, codec: JsonCodec[Any] | MsgpackCodec[Any] | PydanticCodec[Any], name: str) -> Tree:
        before = f"{_SCHEMAS}{name}."
        schema, further = codec.json_schema(before)
        # The class itself stands under the name of its type.
        root = schema.get("$ref", "").removeprefix(before)
        if schema.keys() == {"$ref"} and root in further:
            schema = further.pop(root)
            schema, further = _moved((schema, further), before + root, _SCHEMAS + name)
        self.schemas |= {f"{name}.{_named(part)}": found for part, found in further.items()}
        return dict(schema)

    def _receives(self, topic: str, messages: Iterable[str] = ()) -> None:
        self._operation("receive", topic, messages)

    def _sends(self, topic: str) -> None:
        self._operation("send", topic, ())

    def _operation(self, action: str, topic: str, messages: Iterable[str]) -> None:
        operation: Tree = {"action": action, "channel": {"$ref": f"#/channels/{topic}"}}
        if found := [{"$ref": f"#/channels/{topic}/messages/{name}"} for name in messages]:
            operation["messages"] = found
        self.operations[f"{action}.{topic}"] = operation


def _named(name: str) -> str:
    """Return the name as AsyncAPI allows it; others that would become the same one are kept apart."""
    if not _NOT_IN_A_NAME.search(name):
        return name
    return f"{_NOT_IN_A_NAME.sub('_', name)}-{hashlib.blake2b(name.encode(), digest_size=6).hexdigest()}"


def _moved(tree: Any, old: str, new: str) -> Any:
    """Return plain values whose references to one schema go to another name."""
    if isinstance(tree, dict):
        return {key: new if key == "$ref" and value == old else _moved(value, old, new) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_moved(value, old, new) for value in tree]
    return tree
