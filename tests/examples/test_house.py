"""The house of the example: imports go down, never in a circle, never to benchmarks."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "examples").rglob("*.py"))


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path): ast.parse(path.read_text()) for path in SOURCES}


def imports(name: str) -> set[str]:
    """Modules that one imports, wherever in it, but for what is only for types."""
    found: set[str] = set()
    typing_only = {
        inner
        for node in ast.walk(MODULES[name])
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(MODULES[name]):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {full if full in MODULES else str(node.module) for full in whole}
    return found


def test_there_is_no_circle() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for inner in imports(name) & MODULES.keys():
                visit(inner, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


@pytest.mark.parametrize("name", MODULES)
def test_nothing_of_the_benchmarks_is_imported(name: str) -> None:
    tops = {inner.split(".")[0] for inner in imports(name)}
    assert "benchmarks" not in tops and "tests" not in tops


def test_options_are_read_before_jax_is_imported() -> None:
    """What a bad option is told by: `pretrain`, `config`, `options`, `runs`."""
    below = {"examples.pretrain"}
    for name in ("examples.runs", "examples.config", "examples.options"):
        below |= imports(name)
    assert not {"jax", "numpy", "flax", "optax"} & {n.split(".")[0] for n in below}
