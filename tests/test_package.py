"""Imports and names of the package."""

import ast
import inspect
import pathlib
import subprocess
import sys

import pytest

import muon2_optax as m2

PACKAGE = pathlib.Path(m2.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): ast.parse(path.read_text()) for path in SOURCES}


def imports(module):
    """Absolute names of all that a module imports, wherever in it."""
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inner_imports(module):
    """Which modules of the package a module imports."""
    found = set()
    for name in imports(module):
        if name.split(".")[0] == "muon2_optax":
            found.add(name if name in MODULES else name.rpartition(".")[0])
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_of_a_module(module):
    allowed = {"jax", "optax", "numpy", "muon2_optax"} | set(sys.stdlib_module_names)
    for name in imports(module):
        assert name.split(".")[0] in allowed, name
        assert not any(part.startswith("_") for part in name.split(".")[:2]), name
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Attribute):
            assert node.attr != "_src", f"private API in line {node.lineno}"
    upper = ("muon2_optax", "muon2_optax.optimizers")
    above = ("muon2_optax.optimizers", "muon2_optax.diagnostics")
    if module != "muon2_optax" and not module.startswith(above):
        for name in inner_imports(module):
            assert name not in upper and not name.startswith(upper[1] + "."), name


# What other packages may import of these two: the rest is how they work.
DOORS = {
    "muon2_optax.execution": {
        "dispatch",
        "factored_moment",
        "inner_products",
        "on_sphere",
        "rotated_moment",
    },
    "muon2_optax.kernels": {"hopper", "newton_schulz", "sum_squares"},
}


@pytest.mark.parametrize("package", DOORS)
def test_packages_are_entered_through_their_doors(package):
    entered = {
        name.removeprefix(f"{package}.")
        for module in MODULES
        if not module.startswith(package)
        for name in inner_imports(module)
        if name.startswith(package)
    }
    assert entered == DOORS[package]


def test_imports_have_no_cycle():
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            path.append(module)
            for name in inner_imports(module):
                visit(name)
            done.add(path.pop())

    for module in MODULES:
        visit(module)


def test_import_needs_jax_and_optax_only():
    """In a process of its own, where the frameworks cannot even be imported."""
    code = """
import sys
import jax, jax.numpy, jaxlib, numpy, optax
before = {name.split(".")[0] for name in sys.modules}
for name in ("flax", "chex", "orbax", "jaxtyping", "equinox"):
    assert name not in before, f"optax imports {name}"
    sys.modules[name] = None
import muon2_optax as m2
params = {"w": jax.numpy.ones((4, 6)), "b": jax.numpy.ones(6)}
for factory in (m2.muon, m2.muon2, m2.muon2_f):
    factory(0.1).init(params)
new = {name.split(".")[0] for name in sys.modules} - before
print(*sorted(n for n in new - set(sys.stdlib_module_names) if sys.modules[n]))
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["muon2_optax"]


def test_import_is_light():
    """What ``import muon2_optax`` loads beside JAX and Optax: nothing that takes long.

    Pallas and its backends take a second; a kernel imports them when it is built.
    """
    code = """
import sys
import jax, jax.numpy, optax
before = set(sys.modules)
import muon2_optax
print(*sorted(n for n in set(sys.modules) - before if not n.startswith("muon2_optax")))
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    new = set(result.stdout.split())
    new -= {name for name in new if name.split(".")[0] in sys.stdlib_module_names}
    assert new <= {"jax.experimental.layout"}


def test_public_names_are_documented():
    public = {k: v for k, v in vars(m2).items() if not k.startswith("_")}
    documented = {k: v for k, v in public.items() if callable(v)}
    assert {"muon2", "MatrixRules", "newton_schulz", "scale_by_shape"} <= set(
        documented
    )
    for name, obj in documented.items():
        doc = inspect.getdoc(obj) or ""
        # A dataclass without a docstring gets its signature as one.
        assert len(doc) > 30 and not doc.startswith(f"{name}("), name
