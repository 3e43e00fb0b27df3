"""``clients.received``: what is shared, and that it does not grow."""

from __future__ import annotations

from streams.clients import received as module
from streams.clients.received import received


def test_headers_are_told_as_they_came() -> None:
    for headers in ([], [("a", b"1")], [("a", None)], [("a", b""), ("a", b"")]):
        assert received(headers) == tuple(headers)
    assert received(None) is None


def test_who_changes_the_list_changes_no_record() -> None:
    headers: list[tuple[str, bytes | None]] = [("a", b"1")]
    before = received(headers)
    headers.append(("b", None))
    assert before == (("a", b"1"),)


def test_single_headers_are_shared() -> None:
    assert received([("__grt__", b"A")]) is received([("__grt__", b"A")])


def test_what_each_record_has_of_its_own_does_not_pile_up() -> None:
    for number in range(5_000):
        assert received([("trace", b"%d" % number)]) == (("trace", b"%d" % number),)
        assert received([("__grt__", b"A"), ("trace", b"%d" % number)])
    assert len(module._shared) <= 1024
