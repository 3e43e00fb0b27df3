"""Declared outputs and the topology: what may be declared, what is refused, what is shown."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from streams import (
    DEAD_LETTER,
    AsyncJobScheduler,
    EventContext,
    EventSource,
    MissedRuns,
    Record,
    SchedulerConfig,
    event_type,
)
from streams.errors import ConfigError, EventFailure, RegistrationError, StreamsError
from streams.model.partitioners import PARTITIONERS
from streams.model.topology import Topology, TopologyHandler, TopologyTopic
from streams.testing import TestDriver
from tests.unit.cli_kit import FakeCluster, Kes, admin, source_of, spec
from tests.unit.handlers_kit import OUT, config, counts, driven, letters, send, totals
from tests.vocabulary import KINDS, TOTALS, Added, Named, tell_total

__all__ = ["admin"]  # the fixture


# -- declarations ------------------------------------------------------------------------------------------------------


def test_what_is_not_given_is_as_the_settings_of_the_source_have_it() -> None:
    source = source_of()
    assert source.outputs == []
    assert source.output("boards") == "boards"
    source.output("gates", num_partitions=9, replication_factor=1, configs={"min.insync.replicas": "1", "a.b": "c"})
    assert source.outputs == [
        spec("boards"),
        spec("gates", 9, replication_factor=1, configs={"min.insync.replicas": "1", "a.b": "c"}),
    ]
    assert [topic.name for topic in source.specs()] == [
        "flights",
        "demo.flights.changelog",
        "demo.flights.dead-letters",
    ]


@pytest.mark.parametrize(
    ("topic", "options", "error", "said"),
    [
        ("no name", {}, ConfigError, "the topic of source.output is 'no name'; it must be 1 to 249 characters"),
        (5, {}, ConfigError, "the topic of source.output is 5"),
        ("o", {"num_partitions": 0}, ConfigError, r"num_partitions of source.output\('o'\) is 0; it must be a whole"),
        ("o", {"num_partitions": True}, ConfigError, "is True"),
        ("o", {"replication_factor": 1.5}, ConfigError, r"replication_factor of source.output\('o'\) is 1.5"),
        ("o", {"configs": {"retention.ms": 5}}, ConfigError, "has 'retention.ms': 5; names and settings are texts"),
        ("there", {}, RegistrationError, "the output 'there' is declared twice"),
        ("flights", {}, RegistrationError, "is the event source's own"),
        ("demo.flights.changelog", {}, RegistrationError, "is the event source's own"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused(
    topic: Any, options: dict[str, Any], error: type[StreamsError], said: str
) -> None:
    source = source_of()
    source.output("there")
    with pytest.raises(error, match=said):
        source.output(topic, **options)
    assert [output.name for output in source.outputs] == ["there"]


def test_a_declaration_after_the_start_is_refused() -> None:
    source = source_of()
    source._declared.router.freeze()
    with pytest.raises(RegistrationError, match=r"source.output\('o'\) comes too late"):
        source.output("o")


def test_a_copy_of_declarations_is_open_and_apart() -> None:
    """Members of a ``TestDriver`` stand on copies of what a source declares, whether it runs or not."""
    source = source_of()
    source.output("there", partitioner="fnv1a")
    source.input("more")
    declared = source._declared
    declared.router.freeze()
    copied = declared.copy()
    assert copied.topology == declared.topology
    assert copied.outputs.partitioners == declared.outputs.partitioners == {"there": PARTITIONERS["fnv1a"]}
    copied.outputs.declare("own", None, None, None, "crc32", None)
    copied.inputs.declare("other", None, None, None)
    copied.handlers.schedule(
        lambda ctx: None, every=1.0, jitter=0.0, missed=MissedRuns.SKIP, on_error=None, blocking=False
    )
    assert (source.outputs, source.inputs) == ([spec("there")], ["more"])
    assert source.topology.interjections == ()
    assert [topic.name for topic in copied.topology.topics][-4:] == ["more", "other", "there", "own"]


# -- records for other topics ------------------------------------------------------------------------------------------


def stray(ctx: EventContext[Any], event: Added) -> None:
    tell_total(ctx, event, OUT)
    if event.deed == "stray":
        ctx.forward("otu", event, key="k")
    if event.deed == "ready":
        ctx.forward(Record("otu", b"x"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("deed", ["stray", "ready"])
def test_only_the_event_that_sends_to_another_topic_meets_its_policy(kind: str, deed: str) -> None:
    with driven(stray, kind, DEAD_LETTER, outputs=[OUT]) as driver:
        for number in range(30):
            send(driver, "n", deed=deed if number == 17 else "", wait=False)
        driver.settle()
        assert letters(driver, "offset") == [("17",)]
        [(text,)] = letters(driver, "message")
        assert "the topic 'otu' is not declared" in text
        assert "source.output('otu')" in text
        assert [amount for _, amount in totals(driver)] == list(range(1, 30))
        assert counts(driver) == {"n": 29}
        assert list(driver.outputs("otu")) == []
        driver.check()


def test_the_source_stops_by_the_name_of_topic_and_event() -> None:
    with driven(stray, outputs=[OUT]) as driver:
        send(driver, "n")
        with pytest.raises(EventFailure, match=r"in\[0\]@1.*the topic 'otu' is not declared"):
            send(driver, "n", deed="stray")


def test_own_topics_need_no_declaration_and_without_one_all_topics_are_taken() -> None:
    def echo(ctx: EventContext[Any], event: Named) -> None:
        if event.name:
            ctx.forward("in", Named(event.name[1:]), key="k")
        ctx.forward(OUT, event, key="k")

    for declared in (True, False):
        source = EventSource(config(), TOTALS)
        source.register_event_type(Named, echo)
        if declared:
            source.output(OUT, num_partitions=3)
        with TestDriver(source) as driver:
            driver.send(Named("abc"), key="k")
            assert [event.name for event in driver.outputs(OUT, Named)] == ["abc", "bc", "c", ""]
            assert driver._world.broker.topics == ({OUT: 3} if declared else {})


# -- the topology ------------------------------------------------------------------------------------------------------


def made() -> EventSource[Any]:
    source = EventSource(config(4), TOTALS)
    kinds: dict[str, dict[str, Any]] = {
        "Plain": {},
        "Batch": {"batch": True},
        "Blocking": {"blocking": True},
    }
    for name, options in kinds.items():
        event_class = event_type(f"topology.{name}")(msgspec.defstruct(name, []))
        source.register_event_type(event_class, handle, **options)
    source.register_event_type(event_type("topology.Async")(msgspec.defstruct("A", [])), handle_async)
    source.register_event_type(event_type("topology.Beside")(msgspec.defstruct("B", [])), handle_async, concurrency=2)
    source.register_default_handler(handle)
    source.schedule_interjection(report, every=5.0)
    source.output(OUT, num_partitions=1)
    return source


def handle(ctx: EventContext[Any], event: Any) -> None: ...


async def handle_async(ctx: EventContext[Any], event: Any) -> None: ...


def report(ctx: EventContext[Any]) -> None: ...


def test_the_topology_has_topics_handlers_and_interjections() -> None:
    here = __name__
    assert made().topology == Topology(
        "g",
        (
            TopologyTopic("in", "source", 4),
            TopologyTopic("g.in.changelog", "changelog", 4),
            TopologyTopic("g.in.dead-letters", "dead letters", 4),
            TopologyTopic(OUT, "output", 1),
        ),
        (
            TopologyHandler("topology.Plain", f"{here}.handle", "plain"),
            TopologyHandler("topology.Batch", f"{here}.handle", "batch"),
            TopologyHandler("topology.Blocking", f"{here}.handle", "blocking"),
            TopologyHandler("topology.Async", f"{here}.handle_async", "async"),
            TopologyHandler("topology.Beside", f"{here}.handle_async", "concurrent"),
            TopologyHandler("(default)", f"{here}.handle", "plain"),
        ),
        ("report",),
        True,
    )


def test_a_source_on_another_cluster_and_a_scheduler() -> None:
    source = source_of(source_bootstrap_servers="there:9092")
    scheduler: AsyncJobScheduler[Any, Any, Any] = AsyncJobScheduler(
        source, run, finish, config=SchedulerConfig(concurrency=1), name="calls"
    )
    scheduler.register_event_type(Named, lambda ctx, event: (event.name, event))
    found = source.topology
    assert [topic.purpose for topic in found.topics] == ["source", "changelog", "dead letters", "offsets"]
    assert [handler.kind for handler in found.handlers] == ["calls"]
    assert not found.has_store


async def run(job: Any) -> Any: ...


def finish(ctx: EventContext[Any], job: Any, result: Any) -> None: ...


def test_a_drawing_takes_any_name() -> None:
    found = Topology(
        'a "group"',
        (TopologyTopic("in", "source", 4), TopologyTopic("log", "changelog", 4), TopologyTopic("out", "output", 1)),
        (TopologyHandler('<b>"x"#`\n', "m.f", "plain"), TopologyHandler("y", "m.f", "plain")),
        (),
        False,
    )
    assert found.mermaid().splitlines() == [
        "flowchart LR",
        '    source(["a #quot;group#quot;"])',
        '    topic0["in<br/>source, 4 partitions"]',
        '    topic0 -- "#lt;b#gt;#quot;x#quot;#35;#96; <br/>y" --> source',
        '    topic1["log<br/>changelog, 4 partitions"]',
        "    topic1 <--> source",
        '    topic2["out<br/>output, 1 partition"]',
        "    source --> topic2",
    ]


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def fleet(admin: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> EventSource[Any]:
    """The source that commands load, with a declared output."""
    import fleet  # type: ignore[import-not-found]

    source: EventSource[Any] = source_of()
    source.output("boards", num_partitions=2)
    source.register_event_type(Named, handle)
    monkeypatch.setattr(fleet, "source", source)
    return source


def test_the_command_shows_text_json_and_a_drawing(kes: Kes, fleet: EventSource[Any]) -> None:
    assert kes("topology", "fleet:source").lines == [
        "part name details",
        "group demo stateless",
        "source flights 4 partitions",
        "changelog demo.flights.changelog 4 partitions",
        "dead letters demo.flights.dead-letters 4 partitions",
        "output boards 2 partitions",
        f"handler Named {__name__}.handle (plain)",
    ]
    assert msgspec.convert(kes("topology", "fleet:source", "--json").data, Topology) == fleet.topology
    assert kes("topology", "fleet:source", "--mermaid").out == fleet.topology.mermaid()
    assert "choose either --json or --mermaid" in kes("topology", "fleet:source", "--mermaid", "--json", code=2).words


@pytest.mark.usefixtures("admin")
def test_the_command_says_that_no_output_is_declared(kes: Kes) -> None:
    assert "handlers may forward to any topic" in kes("topology", "fleet:source").words
    assert kes("topology", "fleet:source", "--json").err == ""


@pytest.mark.usefixtures("fleet")
def test_declared_outputs_are_planned_and_made_like_those_of_the_option(kes: Kes, admin: FakeCluster) -> None:
    at = ("fleet:source", "--bootstrap-servers", "there:9092")
    answer = kes("topics", "apply", *at, "--output", "gates:3", "--json").data
    assert [(topic["name"], topic["purpose"], topic["state"]) for topic in answer["topics"]][3:] == [
        ("boards", "output", "created"),
        ("gates", "output", "created"),
    ]
    assert admin.there["boards"] == spec("boards", 2)
    assert "declared" in kes("topics", "plan", *at, "--output", "boards:2", code=1).words
    admin.there["boards"] = spec("boards", 3)
    assert "topic boards has 3 partitions, settings say 2" in kes("topics", "plan", *at, code=1).words
