"""The architecture, checked: imports go down only and in no circle, files and functions stay small, only the clock reads time."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Folder -> what it may import of ours. For chaos, routing and cache only `api.py` of the folder below.
ALLOWED = {
    "policies": set(),
    "backends": {"policies"},
    "cache": {"policies", "backends.api"},
    "routing": {"policies", "backends.api"},
    "chaos": {"policies", "backends.api", "cache.api"},
    "gateway": {"policies", "backends", "cache", "routing", "chaos"},
}
MOST_LINES = 350
MOST_FUNCTION_LINES = 60
MOST_PARAMETERS = 6
CLOCK_FILE = "policies/core/clock.py"
#: Places where a real clock is the point: a load generator measures the world from outside, a measurement measures.
MAY_READ_TIME = ("gateway/load/", "backends/onnx/measure.py", CLOCK_FILE)


def sources() -> list[Path]:
    return sorted(path for folder in ALLOWED for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, *, top_level_only: bool = False) -> Iterator[str]:
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


TREES = {path: ast.parse(path.read_text()) for path in sources()}


def test_imports_go_down_only() -> None:
    wrong = []
    for path, tree in TREES.items():
        own = path.relative_to(ROOT).parts[0]
        for module in imports(tree):
            folder = module.split(".")[0]
            if folder not in ALLOWED or folder == own:
                continue
            if not any(module == allowed or module.startswith(allowed + ".") for allowed in ALLOWED[own]) and not any(
                allowed.startswith(module) for allowed in ALLOWED[own]
            ):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles() -> None:
    known = {name_of(path) for path in TREES}
    graph: dict[str, set[str]] = {}
    for path, tree in TREES.items():
        graph[name_of(path)] = {m for m in imports(tree, top_level_only=True) if m in known} - {name_of(path)}
    done: set[str] = set()
    trail: list[str] = []

    def visit(module: str) -> None:
        if module in trail:
            pytest.fail("import cycle: " + " -> ".join([*trail[trail.index(module) :], module]))
        if module in done:
            return
        trail.append(module)
        for below in sorted(graph[module]):
            visit(below)
        trail.pop()
        done.add(module)

    for module in sorted(graph):
        visit(module)


@pytest.mark.parametrize("path", TREES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MOST_LINES, f"{lines} lines: is it one thing?"
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MOST_FUNCTION_LINES, f"{node.name} has {length} lines"
            # A command's parameters are its options: typer reads them from the signature.
            if "cli/" in str(path) and node.decorator_list:
                continue
            # A dunder's or a dataclass-like constructor's `self` is no parameter; keyword-only ones are named at the call.
            named = [a for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
            assert len(named) <= MOST_PARAMETERS, f"{node.name} has {len(named)} positional parameters"


def test_only_the_clock_reads_time() -> None:
    banned = {
        "time.time",
        "time.monotonic",
        "time.perf_counter",
        "asyncio.sleep",
        "datetime.datetime.now",
        "time.sleep",
    }
    found = []
    for path, tree in TREES.items():
        where = str(path.relative_to(ROOT))
        if where.startswith(MAY_READ_TIME):
            continue
        # sleep(0) lets others run; it is not about time.
        found += [
            f"{where}:{node.lineno}: {ast.unparse(node)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node) != "asyncio.sleep(0)"
            and ast.unparse(node.func) in banned
        ]
    assert not found, "\n".join(found)


def test_nothing_below_the_edge_knows_the_http_server() -> None:
    allowed = ("gateway/edge/", "gateway/control/admin.py", "gateway/control/supervisor.py", "gateway/load/")
    found = [
        str(path.relative_to(ROOT))
        for path, tree in TREES.items()
        if any(module.startswith(("aiohttp.web", "aiohttp.server")) for module in imports(tree))
        and not str(path.relative_to(ROOT)).startswith(allowed)
    ]
    assert not found


def test_only_the_configuration_reads_the_environment() -> None:
    allowed = ("gateway/config.py", "gateway/cli/", "gateway/load/bench/")
    found = [
        str(path.relative_to(ROOT))
        for path, tree in TREES.items()
        if any(isinstance(n, ast.Attribute) and ast.unparse(n) in ("os.environ", "os.getenv") for n in ast.walk(tree))
        and not str(path.relative_to(ROOT)).startswith(allowed)
    ]
    assert not found


def test_the_policies_folder_is_the_product_teams_room() -> None:
    here = {path.name for path in (ROOT / "policies").iterdir() if not path.name.startswith(("__", "."))}
    assert here == {"chatbot.yaml", "recommendation.yaml", "README.md", "core", "language", "rules"}
