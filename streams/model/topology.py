"""The topology of an event source as a value: topics, handlers, state; as a drawing too."""

from __future__ import annotations

from typing import Final

import msgspec


class TopologyTopic(msgspec.Struct, frozen=True):
    """A topic of an event source. ``purpose``: ``source``, ``input``, ``table``, ``lookup``, ``loop``, ``visits``
    (requests for them), ``output``, ``changelog``, ``dead letters``, or ``offsets`` (the stand-in of a source on
    another cluster). ``partitions``: 0 for a lookup, which has any number of them. ``policies``: the functions that
    decide about its records that cannot be read, ``module.function`` each."""

    name: str
    purpose: str
    partitions: int
    policies: tuple[str, ...] = ()

    @property
    def size(self) -> str:
        """Return ``4 partitions``, or ``all partitions``."""
        if not self.partitions:
            return "all partitions"
        return f"{self.partitions} partition{'' if self.partitions == 1 else 's'}"


class TopologyHandler(msgspec.Struct, frozen=True):
    """A handler. ``event``: the event type, or ``(default)``; ``function``: ``module.function``; ``kind``: ``plain``,
    ``async``, ``blocking``, ``batch``, ``concurrent``, or the name of the scheduler that works ahead. ``policies``: the
    functions that decide about its failures, ``module.function`` each; other policies are not named."""

    event: str
    function: str
    kind: str
    policies: tuple[str, ...] = ()


class Topology(msgspec.Struct, frozen=True):
    """An event source from outside (``EventSource.topology``). Without an ``output`` among ``topics`` handlers may
    forward to any topic. ``interjections``: names of those that are scheduled; ``crons``: of those that have one, by
    name, with the zone."""

    group_id: str
    topics: tuple[TopologyTopic, ...]
    handlers: tuple[TopologyHandler, ...]
    interjections: tuple[str, ...]
    has_store: bool
    crons: dict[str, str] = {}

    def mermaid(self) -> str:
        """Draw it as a flowchart of Mermaid, which GitHub and many wikis show."""
        lines = ["flowchart LR", f"    source{_quoted(self.group_id, '([', '])')}"]
        for number, topic in enumerate(self.topics):
            node = f"topic{number}"
            lines.append(f"    {node}{_quoted(f'{topic.name}<br/>{topic.purpose}, {topic.size}')}")
            lines += [f"    {edge}" for edge in self._edges(node, topic.purpose)]
        return "\n".join(lines) + "\n"

    def _edges(self, node: str, purpose: str) -> list[str]:
        if purpose in ("source", "input", "loop"):
            types = "<br/>".join(_escaped(handler.event) for handler in self.handlers)
            edge = f'{node} -- "{types}" --> source' if types else f"{node} --> source"
            return [edge, f"source --> {node}"] if purpose == "loop" else [edge]
        if purpose in ("table", "lookup", "visits"):
            return [f'{node} -- "{"requests" if purpose == "visits" else "rows"}" --> source']
        return [f"{node} <--> source" if purpose == "changelog" else f"source --> {node}"]


_ESCAPES: Final = str.maketrans({"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "\n": " ", "`": "#96;"})


def _escaped(text: str) -> str:
    return text.translate(_ESCAPES)


def _quoted(text: str, begin: str = "[", end: str = "]") -> str:
    shown = "<br/>".join(_escaped(part) for part in text.split("<br/>"))
    return f'{begin}"{shown}"{end}'
