"""The imports of the packages: none inside a function except heavy ones.

That they go down only and in no circle, `make lint` checks (pyproject.toml, import-linter).
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOTS = {"juice": ROOT / "juice", "juice_server": ROOT / "server" / "juice_server"}
FILES = {
    ".".join((name, *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__"): path
    for name, root in ROOTS.items()
    for path in sorted(root.rglob("*.py"))
}
# Packages with heavy imports (PyTorch, matplotlib, a whole evaluation), made when a command runs.
HEAVY = ("juice.cli",)
# Optional or heavy packages.
OPTIONAL = (
    "datasets",
    "gguf",
    "matplotlib",
    "numpy",
    "jinja2",
    "markupsafe",
    "pandas",
    "scipy",
    "transformer_lens",
    "torchao",
    "vllm",
)


def is_type_checking(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def imported(tree: ast.AST, module: str) -> Iterator[str]:
    """Yield what a module imports, within functions too, except for type checking."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{module} has a relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in FILES else node.module
        else:
            yield from imported(node, module)


def late_imports(module: str) -> set[str]:
    functions = [
        n
        for n in ast.walk(ast.parse(FILES[module].read_text()))
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {name for function in functions for name in imported(function, module)}


def test_imports_are_at_the_top_except_for_heavy_ones() -> None:
    late = {module: late_imports(module) for module in FILES if not module.startswith(HEAVY)}
    assert {
        module: names
        for module, names in late.items()
        if not all(name.startswith(OPTIONAL) for name in names)
    } == {}


def test_circles_are_looked_for_in_every_room() -> None:
    """Kills: a new package that `make lint` does not look into."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (circles,) = [c for c in contracts["contracts"] if c["type"] == "acyclic_siblings"]
    rooms = {".".join(name.split(".")[:2]) for name in FILES if name.count(".") > 1}
    rooms = {name if name.startswith("juice.") else "juice_server" for name in rooms}
    assert len(rooms) > 8
    assert rooms <= {*circles["ancestors"]}
