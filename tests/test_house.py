"""The imports of the packages: no circle of files, and none inside a function except heavy ones."""

from __future__ import annotations

import ast
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
    "matplotlib",
    "numpy",
    "jinja2",
    "markupsafe",
    "pandas",
    "transformer_lens",
    "torchao",
    "vllm",
)
LATE_OF = {
    # Read before PyTorch is imported, so that wrong settings are reported immediately.
    "juice_server.settings": {"juice.engine"},
}


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


def graph() -> dict[str, set[str]]:
    return {
        module: {
            name
            for name in imported(ast.parse(path.read_text()), module)
            if name in FILES and name != module
        }
        for module, path in FILES.items()
    }


def circle_in(arrows: dict[str, set[str]]) -> list[str]:
    """Return a circle of imports, its first file at both ends; an empty list if there is none."""
    done: set[str] = set()

    def search(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(arrows[module]):
            if found := search(other, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(arrows) if (found := search(module, []))), [])


def test_the_search_finds_a_circle() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_file_imports_itself_by_way_of_others() -> None:
    arrows = graph()
    assert sum(map(len, arrows.values())) > 500
    assert circle_in(arrows) == []


def late_imports(module: str) -> set[str]:
    functions = [
        n
        for n in ast.walk(ast.parse(FILES[module].read_text()))
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {name for function in functions for name in imported(function, module)}


def test_imports_are_at_the_top_except_for_heavy_ones() -> None:
    late = {
        module: late_imports(module) - LATE_OF.get(module, set())
        for module in FILES
        if not module.startswith(HEAVY)
    }
    assert {
        module: names
        for module, names in late.items()
        if not all(name.startswith(OPTIONAL) for name in names)
    } == {}
