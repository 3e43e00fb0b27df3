"""``make test-changed`` chooses what a change can reach, over a small project."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.changed import EVERYTHING, Graph

ROOT = Path(__file__).resolve().parents[2]
PROJECT = {
    "streams/__init__.py": "if TYPE_CHECKING: from streams.views.view import View\n"
    "if TYPE_CHECKING: from streams.stores.heap import Heap",
    "streams/__main__.py": "from streams.cli import main",
    "streams/cli/__init__.py": "",
    "streams/cli/main.py": "COMMANDS = {'lag': 'streams.cli.lag'}",
    "streams/cli/lag.py": "",
    "streams/views/__init__.py": "",
    "streams/views/view.py": "def follow():\n    from streams.runtime import reading",
    "streams/runtime/__init__.py": "",
    "streams/runtime/reading.py": "if TYPE_CHECKING:\n    from streams.cli import lag\nTEMPLATE = 1",
    "streams/stores/__init__.py": "from streams.stores.heap import Heap\nfrom streams.stores.table import Table",
    "streams/stores/heap.py": "",
    "streams/stores/table.py": "",
    "examples/shop.py": "from streams.stores import Table",
    "tests/conftest.py": "@pytest.fixture\ndef kafka():\n    from streams.cli import lag",
    "tests/unit/kit.py": "from streams import View",
    "tests/unit/test_kit.py": "from tests.unit import kit",
    "tests/unit/test_heap.py": "import streams\nHEAP = streams.Heap",
    "tests/unit/test_kes.py": "COMMAND = ['kes', 'lag']",
    "tests/unit/test_pages.py": "PAGES = ROOT / 'docs'",
    "tests/unit/test_shop.py": "SHOP = Path('examples/shop.py')",
    "tests/unit/test_typed.py": "if TYPE_CHECKING:\n    from streams.stores.heap import Heap",
    "tests/broker/test_kafka.py": "def test_lag(kafka): ...",
    "tests/broker/test_child.py": "PROGRAM = 'import sys; from streams import Heap, View'",
    "tests/broker/test_doc.py": "def test():\n    'As streams.stores.heap.'",
}
CHANGES = {
    "streams/runtime/reading.py": "unit/test_kit broker/test_child",  # through a function, a kit and a lazy name
    "streams/cli/lag.py": "unit/test_kes broker/test_kafka",  # through the table of commands; a fixture
    "streams/stores/heap.py": "unit/test_heap broker/test_child",  # for types only, or in prose: it does not count
    "streams/stores/table.py": "unit/test_shop",  # through a package, of which its other user has another name
    "streams/stores/table.pxd": "unit/test_shop",
    "streams/stores/__init__.py": "unit/test_heap unit/test_shop broker/test_child",
    "streams/views/page.html": "unit/test_kit broker/test_child",
    "streams/views/gone.py": "",
    "examples/shop.py": "unit/test_shop",
    "tests/unit/kit.py": "unit/test_kit",
    "tests/unit/test_typed.py": "unit/test_typed",
    "tests/broker/data.txt": "broker/test_kafka broker/test_child broker/test_doc",
    "docs/guide.md": "unit/test_pages",
    "README.md": "unit/test_pages",
    "pyproject.toml": EVERYTHING,
    "Makefile": EVERYTHING,
    "requirements/dev.txt": EVERYTHING,
    "tests/conftest.py": EVERYTHING,
    "": "",
}


@pytest.mark.parametrize("changed", CHANGES)
def test_a_change_chooses_the_tests_that_it_reaches(changed: str) -> None:
    chosen = Graph(PROJECT).chosen([changed] if changed else [])
    expected = CHANGES[changed]
    wanted = {EVERYTHING} if expected == EVERYTHING else {f"tests/{name}.py" for name in expected.split()}
    assert chosen.keys() == wanted
    assert all(way[0] == test and way[-1] == changed for test, way in chosen.items())


def test_the_way_to_the_change_is_said() -> None:
    chosen = Graph(PROJECT).chosen(["streams/runtime/reading.py", "pyproject.md"])
    assert chosen == {EVERYTHING: [EVERYTHING, "pyproject.md"]}
    way = Graph(PROJECT).chosen(["streams/runtime/reading.py"])["tests/unit/test_kit.py"]
    assert way == [
        "tests/unit/test_kit.py",
        "tests/unit/kit.py",
        "streams/views/view.py",
        "streams/runtime/reading.py",
    ]


def test_the_graph_of_this_project_knows_its_own_tests() -> None:
    paths = [path for folder in ("streams", "tests/unit") for path in (ROOT / folder).rglob("*.py")]
    graph = Graph({str(path.relative_to(ROOT)): path.read_text() for path in paths})
    assert "tests/unit/test_views.py" in graph.chosen(["streams/views/table.py"])
    assert "tests/unit/test_journal_term.py" not in graph.chosen(["streams/views/table.py"])
    assert "tests/unit/test_tidiness.py" in graph.chosen(["streams/sak/bell.py"])
    assert len(graph.chosen(["streams/sak/users_code.py"])) > 100
