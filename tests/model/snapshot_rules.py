"""The snapshots of one partition as a model: ``keeping/snapshots/bundles.py`` step by step, each rule a switch.

A world has processes that make snapshots of the same partition at once, as owner and standby do, and each of them
removes what is too much when it is done. A process may stand still between any two of its steps for as long as the
others like: a frozen one needs no action of its own. Luck is a death at any step, and a hold that expires.

Assumed: listing the few names of a folder is one look, and no hold expires while its maker is between its look for it
and its end, unless the maker is dead. (It looks right before its manifest, and a hold lasts for a day.)
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from tests.model.search import Broken, Steps, put


class SnapshotConfig(NamedTuple):
    """``saves``: snapshots that are begun in all. ``passes``: of collecting, besides those that follow snapshots.
    ``contents``: what the data of each snapshot may be, a letter each."""

    name: str
    processes: int = 2
    saves: int = 3
    keep: int = 1
    deaths: int = 0
    expiries: int = 0
    passes: int = 0
    contents: tuple[str, ...] = ("ab",) * 4


PLAIN = SnapshotConfig("plain")
DEATHS = SnapshotConfig("deaths", saves=2, deaths=1, expiries=1)
TWO_KEPT = SnapshotConfig("two kept", keep=2)
PASS = SnapshotConfig("a pass more", passes=1)
PASS_AND_DEATH = SnapshotConfig("a pass more, deaths", passes=1, deaths=1, expiries=1, contents=("a", "b", "a"))
STANDARD = (PLAIN, DEATHS, TWO_KEPT)
DEEP = (PASS, PASS_AND_DEATH, SnapshotConfig("three processes", processes=3, contents=("a", "b", "a")))


class SnapshotRule(Enum):
    """A rule of the protocol: what happens when it is out, and the world where it is missed."""

    UNIQUE_NAMES = ("a block has the name of its content alone, so a new one has the name of a removed one", PLAIN)
    HOLD_FIRST = ("blocks are written without a hold", PLAIN)
    LOOK_FOR_HOLD = ("a manifest is written without a look whether the hold has expired", DEATHS)
    SOURCE_STAYED = ("blocks are used again of a snapshot that is removed before the new one is there", PASS)
    HELD_DO_NOT_COUNT = ("a snapshot counts before its maker has seen that its source is still there", PLAIN)
    BLOCKS_LISTED_FIRST = ("blocks are listed after the names of holds and manifests", PLAIN)
    REMOVED_STILL_NAME = ("what a snapshot names goes in the pass that removes the snapshot", PLAIN)
    ALL_ARE_READ = ("blocks are removed although a manifest was gone before it was read", PLAIN)
    EXPIRED_GOES_WHOLE = ("a hold that expires leaves the manifest of its maker", PASS_AND_DEATH)


Block = tuple[str, int]
"""Its content, and the token of its maker."""


class Manifest(NamedTuple):
    """Manifests and holds are named by their tokens, which rise with the state that is saved."""

    token: int
    block: Block


class Process(NamedTuple):
    """A process that makes a snapshot, and then collects. ``source``: the token of the snapshot that it uses again."""

    phase: str = "idle"
    token: int = 0
    content: str = ""
    block: Block = ("", 0)
    source: int = 0
    blocks: frozenset[Block] = frozenset()
    holds: frozenset[Manifest] = frozenset()
    names: frozenset[int] = frozenset()
    old: frozenset[int] = frozenset()
    garbage: frozenset[Block] = frozenset()


class World(NamedTuple):
    """``holds``: by token, with the content that is held (the block of a ``Manifest``). ``best``: the most snapshots
    that counted at a time, up to the number that is kept."""

    processes: tuple[Process, ...]
    blocks: frozenset[Block] = frozenset()
    holds: frozenset[Manifest] = frozenset()
    manifests: frozenset[Manifest] = frozenset()
    begun: int = 0
    best: int = 0
    deaths: int = 0
    expiries: int = 0
    passes: int = 0


class SnapshotModel:
    """The protocol without the rules that are ``out``."""

    def __init__(self, config: SnapshotConfig, out: frozenset[SnapshotRule] = frozenset()) -> None:
        self._config, self._out = config, out

    def initial(self) -> World:
        return World((Process(),) * self._config.processes)

    def done(self, world: World) -> bool:
        return world.begun == self._config.saves and all(process.phase == "idle" for process in world.processes)

    def stalled(self, world: World) -> str:
        return "nothing can happen any more"

    def successors(self, world: World) -> tuple[Steps[World], Steps[World]]:
        world = self._checked(world)
        steps: Steps[World] = []
        luck: Steps[World] = []
        for index, process in enumerate(world.processes):
            name = "ABC"[index]
            steps += [(f"{name} {text}", after) for text, after in self._steps(world, index, process)]
            if process.phase != "idle" and world.deaths < self._config.deaths:
                luck.append((f"{name} dies", _with(world._replace(deaths=world.deaths + 1), index, Process())))
        if world.expiries < self._config.expiries:
            luck += [(f"hold {hold.token} expires", self._expired(world, hold)) for hold in self._may_expire(world)]
        return steps, luck

    def _checked(self, world: World) -> World:
        """Check what must hold; return the world with the most snapshots that ever counted."""
        counted = sorted(_unheld(world.manifests, world.holds), reverse=True)
        if len(counted) < world.best:
            raise Broken(f"of {world.best} snapshots that counted {len(counted)} are left")
        for manifest in counted[: self._config.keep]:
            if manifest.block not in world.blocks:
                raise Broken(f"snapshot {manifest.token} counts, and its block {manifest.block} is gone")
        return world._replace(best=min(len(counted), self._config.keep))

    def _may_expire(self, world: World) -> list[Manifest]:
        at_their_end = {process.token for process in world.processes if process.phase in ("publish", "look", "release")}
        return [hold for hold in world.holds if hold.token not in at_their_end]

    def _expired(self, world: World, hold: Manifest) -> World:
        manifests = world.manifests
        if SnapshotRule.EXPIRED_GOES_WHOLE not in self._out:
            manifests = frozenset(manifest for manifest in manifests if manifest.token != hold.token)
        return world._replace(holds=world.holds - {hold}, manifests=manifests, expiries=world.expiries + 1)

    def _steps(self, world: World, index: int, process: Process) -> Steps[World]:
        if process.phase == "idle":
            return self._begins(world, index)
        if process.phase in ("hold", "write", "check", "publish", "look", "withdraw", "release"):
            return self._makes(world, index, process)
        return self._collects(world, index, process)

    # -- a snapshot ----------------------------------------------------------------------------------------------------

    def _begins(self, world: World, index: int) -> Steps[World]:
        found: Steps[World] = []
        if world.passes < self._config.passes:
            found.append(("collects", _with(world._replace(passes=world.passes + 1), index, Process("list"))))
        if world.begun == self._config.saves:
            return found
        token = world.begun + 1
        counted = _unheld(world.manifests, world.holds)
        source = max(counted, default=Manifest(0, ("", 0)))
        for content in self._config.contents[world.begun]:
            is_again = source.block[0] == content and source.block in world.blocks
            unique = 0 if SnapshotRule.UNIQUE_NAMES in self._out else token
            block = source.block if is_again else (content, unique)
            process = Process("hold", token, content, block, source.token if is_again else 0)
            if SnapshotRule.HOLD_FIRST in self._out:
                process = process._replace(phase="write")
            after = _with(world._replace(begun=token), index, process)
            found.append((f"begins snapshot {token} of {content!r}" + f", again {block}" * is_again, after))
        return found

    def _makes(self, world: World, index: int, process: Process) -> Steps[World]:
        token, out = process.token, self._out
        hold, manifest = Manifest(token, (process.content, 0)), Manifest(token, process.block)

        def to(world: World, phase: str) -> World:
            return _with(world, index, process._replace(phase=phase) if phase != "idle" else Process())

        if process.phase == "hold":
            return [("puts its hold", to(world._replace(holds=world.holds | {hold}), "write"))]
        if process.phase == "write":
            after = world if process.source else world._replace(blocks=world.blocks | {process.block})
            unlooked = {SnapshotRule.LOOK_FOR_HOLD, SnapshotRule.HOLD_FIRST} & out
            return [("writes its block", to(after, "publish" if unlooked else "check"))]
        if process.phase == "check":
            return [("looks for its hold", to(world, "publish" if hold in world.holds else "idle"))]
        if process.phase == "publish":
            after = world._replace(manifests=world.manifests | {manifest})
            return [("writes its manifest", to(after, "release" if SnapshotRule.SOURCE_STAYED in out else "look"))]
        if process.phase == "look":
            is_good = not process.source or process.source in {one.token for one in world.manifests}
            return [("looks for its source", to(world, "release" if is_good else "withdraw"))]
        if process.phase == "withdraw":
            after = world._replace(manifests=world.manifests - {manifest}, holds=world.holds - {hold})
            return [("withdraws its manifest, then its hold", to(after, "idle"))]
        return [("removes its hold", to(world._replace(holds=world.holds - {hold}), "list"))]

    # -- collecting ----------------------------------------------------------------------------------------------------

    def _collects(self, world: World, index: int, process: Process) -> Steps[World]:
        def to(phase: str, **changes: object) -> World:
            return _with(world, index, process._replace(phase=phase, **changes))  # type: ignore[arg-type]

        names_first = SnapshotRule.BLOCKS_LISTED_FIRST in self._out
        if process.phase == ("names" if names_first else "list"):
            return [("lists the blocks", to("read" if names_first else "names", blocks=world.blocks))]
        if process.phase in ("list", "names"):
            names = frozenset(manifest.token for manifest in world.manifests)
            after = to("names" if names_first else "read", holds=world.holds, names=names)
            return [("lists holds and manifests", after)]
        if process.phase == "read":
            return [("reads the manifests", _with(world, index, self._planned(world, process)))]
        found: Steps[World] = []
        for token in process.old:
            rest = process._replace(old=process.old - {token})
            manifests = frozenset(manifest for manifest in world.manifests if manifest.token != token)
            found.append((f"removes snapshot {token}", _next(world._replace(manifests=manifests), index, rest)))
        for block in () if process.old else process.garbage:
            rest = process._replace(garbage=process.garbage - {block})
            found.append((f"removes block {block}", _next(world._replace(blocks=world.blocks - {block}), index, rest)))
        return found

    def _planned(self, world: World, process: Process) -> Process:
        out = self._out
        read = [manifest for manifest in world.manifests if manifest.token in process.names]
        counted = read if SnapshotRule.HELD_DO_NOT_COUNT in out else _unheld(read, process.holds)
        old = frozenset(manifest.token for manifest in sorted(counted, reverse=True)[self._config.keep :])
        naming = [one for one in read if SnapshotRule.REMOVED_STILL_NAME not in out or one.token not in old]
        named = {manifest.block for manifest in naming}
        if SnapshotRule.UNIQUE_NAMES in out:
            held = {hold.block for hold in process.holds}
        else:
            held = {(content, hold.token) for hold in process.holds for content in "ab"}
        garbage = process.blocks - named - held
        if len(read) < len(process.names) and SnapshotRule.ALL_ARE_READ not in out:
            garbage = frozenset()
        return Process("remove", old=old, garbage=garbage) if old or garbage else Process()


def _unheld(manifests: frozenset[Manifest] | list[Manifest], holds: frozenset[Manifest]) -> list[Manifest]:
    held = {hold.token for hold in holds}
    return [manifest for manifest in manifests if manifest.token not in held]


def _next(world: World, index: int, process: Process) -> World:
    return _with(world, index, process if process.old or process.garbage else Process())


def _with(world: World, index: int, process: Process) -> World:
    return world._replace(processes=put(world.processes, index, process))
