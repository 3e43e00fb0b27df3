"""The writers of a journal as a model: ``streams/journal/writer.py`` step by step, with each rule a switch.

A world has two processes, of which the group names one as the leader; it may name another one, or the same again, at
any time (rule J4 of the writer, by which two do not take the claim from each other again and again, is about progress,
and not in it), and a deposed one notices late or never. Three appends are to be made. There is luck: deaths, requests
to commit that arrive late or never, answers that are lost, generations that start over.

The log is a tuple of entries, each of one transaction: ``Entry(kind, term, content)``. A term's number is the place of
its own entry. An entry that is open is not seen by readers; ending it commits or removes it, which keeps places apart
from offsets that aborted records take, since these only make numbers grow faster.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from tests.model.search import Broken, Steps, put


class JournalWorld(NamedTuple):
    """``claims``: how often the claim is taken in all. ``elections``: after the first."""

    name: str
    appends: int = 3
    claims: int = 4
    elections: int = 2
    lost: int = 2
    """Answers that do not come, and requests that are late."""
    deaths: int = 1


PLAIN = JournalWorld("plain", appends=2, claims=4, elections=2, lost=2, deaths=0)
DEATHS = JournalWorld("deaths", appends=3, claims=3, elections=1, lost=1, deaths=1)
STANDARD = (PLAIN, DEATHS)
DEEP = (JournalWorld("a death, four claims, two elections", appends=2, claims=4, elections=2, lost=2, deaths=1),)


class JournalRule(Enum):
    """A rule of the protocol: what happens when it is out, and the world where it is missed."""

    J1_CLAIM_THEN_END = ("the end of the log is looked up before the claim is taken", PLAIN)
    J1_CLAIM_THEN_TERM = ("a term begins without the claim, under the last one", PLAIN)
    J2_TOKEN_IS_OFFSET = ("a term's number is the group's generation", PLAIN)
    J3_ANSWER_AFTER_COMMIT = ("an append is acknowledged when it is sent, before the commit", DEATHS)
    J3_NO_GUESS_ABORTED = ("a commit without an answer is taken for an abort: it is sent again", PLAIN)
    J3_NO_GUESS_COMMITTED = ("a commit without an answer is taken for a commit", PLAIN)
    J3_NO_GUESS_REFUSED = ("a commit without an answer is refused to its caller", PLAIN)
    J3_CLAIM_THEN_LOOK = ("an append is settled by reading alone, without taking the claim", PLAIN)
    J5_YOUNGER_TERM_ENDS = ("a younger term in the log ends nothing: what is not there is sent again", PLAIN)


class Entry(NamedTuple):
    """``content`` -1: it begins the term ``term``. ``state``: "open", then "done", or it is "gone"."""

    term: int
    content: int
    epoch: int
    state: str


class Leader(NamedTuple):
    """A process. ``seen``: the length of the log that it knows; ``at``: the append in hand (-1: none), and the place of
    its record (-1: not sent). ``elected``: what it believes."""

    phase: str = "idle"
    epoch: int = -1
    term: int = -1
    seen: int = 0
    at: int = -1
    place: int = -1
    elected: bool = False
    early: int = -1


class State(NamedTuple):
    log: tuple[Entry, ...] = ()
    epoch: int = 0
    late: frozenset[int] = frozenset()
    """Places of transactions whose request to commit is on its way."""
    leaders: tuple[Leader, ...] = (Leader(elected=True), Leader())
    elected: int = 0
    generation: int = 1
    answers: tuple[str, ...] = ()
    """Of each append: "" open, "ack", "no", "gone" (its caller died)."""
    claims: int = 0
    elections: int = 0
    lost: int = 0
    deaths: int = 0


class JournalModel:
    """The protocol without the rules that are ``out``."""

    def __init__(self, config: JournalWorld, out: frozenset[JournalRule] = frozenset()) -> None:
        self._config, self._out = config, out

    def initial(self) -> State:
        return State(answers=("",) * self._config.appends)

    def done(self, state: State) -> bool:
        return all(state.answers)

    def stalled(self, state: State) -> str:
        spent = state.claims >= self._config.claims
        return "" if spent else "nothing can happen any more"

    def successors(self, state: State) -> tuple[Steps[State], Steps[State]]:
        _check(state)
        steps: Steps[State] = []
        luck: Steps[State] = []
        for place in sorted(state.late):
            arrived = state._replace(late=state.late - {place})
            luck.append((f"the late commit of place {place} arrives", _commit(arrived, place) or arrived))
        if state.elections < self._config.elections:
            for index, leader in enumerate(state.leaders):
                luck += self._elections(state, index, leader)
        for index, leader in enumerate(state.leaders):
            name = "AB"[index]
            if state.deaths < self._config.deaths and leader != Leader():
                answers = (
                    state.answers
                    if leader.at < 0
                    else put(state.answers, leader.at, state.answers[leader.at] or "gone")
                )
                dead = state._replace(deaths=state.deaths + 1, answers=answers)
                other = dead._replace(elected=1 - index, generation=1)
                other = _with(other, 1 - index, other.leaders[1 - index]._replace(elected=True))
                luck.append((f"{name} dies, and the group elects the other", _with(other, index, Leader())))
            if leader.elected and state.elected != index:
                steps.append(
                    (f"{name} notices that it is deposed", _with(state, index, leader._replace(elected=False)))
                )
            for text, after in self._steps(state, index, leader):
                (luck if text.startswith("!") else steps).append((f"{name} {text.lstrip('!')}", after))
        return steps, luck

    def _elections(self, state: State, index: int, leader: Leader) -> Steps[State]:
        """Name the other one, or the same again; the generation grows, or starts over."""
        found: Steps[State] = []
        if state.elected != index:
            for generation in {state.generation + 1, 1}:
                after = state._replace(elected=index, generation=generation, elections=state.elections + 1)
                after = _with(after, index, leader._replace(elected=True))
                found.append((f"the group elects {'AB'[index]}, generation {generation}", after))
        return found

    # -- one leader ----------------------------------------------------------------------------------------------------

    def _steps(self, state: State, index: int, leader: Leader) -> Steps[State]:
        match leader.phase:
            case "idle" if leader.elected and state.claims < self._config.claims:
                return self._claims(state, index, leader)
            case "claimed":
                return self._begins(state, index, leader)
            case "began":
                return self._confirms(state, index, leader)
            case "leads":
                return self._sends(state, index, leader)
            case "sent":
                return self._commits(state, index, leader)
            case "doubt":
                return self._settles(state, index, leader)
        return []

    def _claims(self, state: State, index: int, leader: Leader) -> Steps[State]:
        if JournalRule.J1_CLAIM_THEN_TERM in self._out:
            return [
                (
                    "begins without a claim",
                    _with(state, index, leader._replace(phase="claimed", epoch=state.epoch, seen=_end(state))),
                )
            ]
        if JournalRule.J1_CLAIM_THEN_END in self._out and leader.early < 0:
            return [("looks up the end before its claim", _with(state, index, leader._replace(early=_end(state))))]
        after = _taken(state)
        seen = _end(after) if leader.early < 0 else leader.early
        changed = leader._replace(phase="claimed", epoch=after.epoch, seen=seen, early=-1)
        return [("claims", _with(after, index, changed))]

    def _begins(self, state: State, index: int, leader: Leader) -> Steps[State]:
        if leader.epoch != state.epoch:
            return [("is fenced, and is idle", _with(state, index, leader._replace(phase="idle")))]
        term = state.generation if JournalRule.J2_TOKEN_IS_OFFSET in self._out else len(state.log)
        log = (*state.log, Entry(term, -1, leader.epoch, "done"))
        began = leader._replace(phase="began", term=term)
        return [("begins a term", _with(state._replace(log=log), index, began))]

    def _confirms(self, state: State, index: int, leader: Leader) -> Steps[State]:
        """J4: everything before the term's entry is known; nothing may come before it any more."""
        if state.elected != index:
            return [("is not confirmed", _with(state, index, leader._replace(phase="idle", elected=False)))]
        return [("is confirmed, and leads", _with(state, index, leader._replace(phase="leads", seen=leader.seen + 1)))]

    def _sends(self, state: State, index: int, leader: Leader) -> Steps[State]:
        if not leader.elected:
            refused = state if leader.at < 0 else _answered(state, leader.at, "no")  # settled: it is not there
            return [("ends its term", _with(refused, index, leader._replace(phase="idle", at=-1, place=-1)))]
        waiting = [number for number, answer in enumerate(state.answers) if not answer and not _in_hand(state, number)]
        at = leader.at if leader.at >= 0 else (waiting[0] if waiting else -1)
        if at < 0:
            return []
        if leader.epoch != state.epoch:
            return [("is fenced", _with(state, index, leader._replace(phase="doubt", at=at, place=-1)))]
        log = (*state.log, Entry(leader.term, at, leader.epoch, "open"))
        after = state._replace(log=log)
        if JournalRule.J3_ANSWER_AFTER_COMMIT in self._out:
            after = _answered(after, at, "ack")
        return [(f"sends {at}", _with(after, index, leader._replace(phase="sent", at=at, place=len(state.log))))]

    def _commits(self, state: State, index: int, leader: Leader) -> Steps[State]:
        found: Steps[State] = []
        doubt = leader._replace(phase="doubt")
        after = _commit(state, leader.place)
        if after is None:
            found.append(("is fenced", _with(state, index, doubt)))
        else:
            free = leader._replace(phase="leads", at=-1, place=-1)
            found.append(("commits", _with(_answered(after, leader.at, "ack"), index, free)))
        if state.lost < self._config.lost:
            unlucky = state._replace(lost=state.lost + 1)
            if after is not None:
                lost = after._replace(lost=state.lost + 1)
                found.append(("!commits, and gets no answer", _with(lost, index, doubt)))
            on_its_way = unlucky._replace(late=state.late | {leader.place})
            found.append(("!requests a commit that is late", _with(on_its_way, index, doubt)))
            found.append(("!requests a commit that is lost", _with(unlucky, index, doubt)))
        return found

    def _settles(self, state: State, index: int, leader: Leader) -> Steps[State]:
        guesses = {
            JournalRule.J3_NO_GUESS_COMMITTED: "ack",
            JournalRule.J3_NO_GUESS_REFUSED: "no",
        }
        for rule, answer in guesses.items():
            if rule in self._out:
                guessed = _answered(state, leader.at, answer)
                return [("guesses", _with(guessed, index, leader._replace(phase="idle", at=-1, place=-1)))]
        is_ours = state.elected == index and leader.elected
        if is_ours:
            if state.claims >= self._config.claims and JournalRule.J3_CLAIM_THEN_LOOK not in self._out:
                return []
            return self._looks(state, index, leader, takes=True)
        found = []
        if self._newer(state, leader) >= 0:  # without taking: behind a younger term nothing of ours comes
            found += self._looks(state, index, leader, takes=False)
        elif state.claims < self._config.claims:
            found += self._looks(state, index, leader, takes=True)  # its patience is over: once, to settle
        return found

    def _looks(self, state: State, index: int, leader: Leader, *, takes: bool) -> Steps[State]:
        was_ours = state.elected == index and leader.elected
        after = state
        if takes and JournalRule.J3_CLAIM_THEN_LOOK not in self._out:
            after = _taken(state)
            leader = leader._replace(epoch=after.epoch)
        if JournalRule.J3_NO_GUESS_ABORTED in self._out:
            there = False
        else:
            there = any(
                entry.content == leader.at and entry.term == leader.term and entry.state == "done"
                for entry in after.log
            )
        newer = self._newer(after, leader) >= 0 and JournalRule.J5_YOUNGER_TERM_ENDS not in self._out
        free = leader._replace(at=-1, place=-1)
        if there:
            phase = "idle" if newer or not was_ours else "leads"
            return [("finds its entry", _with(_answered(after, leader.at, "ack"), index, free._replace(phase=phase)))]
        if newer or not was_ours:
            refused = _answered(after, leader.at, "no")
            return [("does not find its entry, and refuses it", _with(refused, index, free._replace(phase="idle")))]
        return [
            (
                "does not find its entry, and sends it again",
                _with(after, index, leader._replace(phase="leads", place=-1)),
            )
        ]

    def _newer(self, state: State, leader: Leader) -> int:
        """Find a younger term, by the numbers of terms."""
        terms = [entry.term for entry in state.log if entry.content < 0 and entry.term > leader.term]
        return min(terms, default=-1)


def _with(state: State, index: int, leader: Leader) -> State:
    return state._replace(leaders=put(state.leaders, index, leader))


def _in_hand(state: State, number: int) -> bool:
    return any(leader.at == number for leader in state.leaders)


def _answered(state: State, number: int, answer: str) -> State:
    return state._replace(answers=put(state.answers, number, state.answers[number] or answer))


def _end(state: State) -> int:
    return len([entry for entry in state.log if entry.state == "done"])


def _taken(state: State) -> State:
    """Take the claim: what is open is aborted."""
    log = tuple(entry._replace(state="gone") if entry.state == "open" else entry for entry in state.log)
    return state._replace(log=log, epoch=state.epoch + 1, claims=state.claims + 1)


def _commit(state: State, place: int) -> State | None:
    """Commit the transaction at this place, if it is open and not fenced."""
    entry = state.log[place]
    if entry.state != "open" or entry.epoch != state.epoch:
        return None
    return state._replace(log=put(state.log, place, entry._replace(state="done")))


def _check(state: State) -> None:
    done = [entry for entry in state.log if entry.state == "done"]
    contents = [entry.content for entry in done if entry.content >= 0]
    if len(contents) != len(set(contents)):
        raise Broken(f"J1: an entry is in the log twice: {contents}")
    terms = [entry.term for entry in done]
    if terms != sorted(terms):
        raise Broken(f"J3: an entry of an older term is behind a younger one: {terms}")
    begun = [entry.term for entry in done if entry.content < 0]
    if len(begun) != len(set(begun)):
        raise Broken(f"J3: two terms have one number: {begun}")
    for number, answer in enumerate(state.answers):
        pending = any(leader.phase == "sent" and leader.at == number for leader in state.leaders)
        if answer == "ack" and number not in contents and not pending:
            raise Broken(f"J2: append {number} is acknowledged, and not in the log")
        if answer == "no" and number in contents:
            raise Broken(f"J2: append {number} is refused, and in the log")
    for leader in state.leaders:
        if leader.phase == "leads":
            first = next(
                (place for place, entry in enumerate(done) if entry.content < 0 and entry.term == leader.term), -1
            )
            if first >= leader.seen:
                raise Broken("J4: a leader serves that does not know what is before its term")
