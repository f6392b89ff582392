"""What the contract tests share: optimizers by name, sample trees, comparisons."""

import functools
import inspect
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import muon2_optax as m2

OPTIMIZERS = sorted(m2.REGISTRY)
# The three of the first release run by default, the others with the slow tests.
CORE = {"muon", "muon2", "muon2_f"}
every = pytest.mark.parametrize(
    "name",
    [n if n in CORE else pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS],
)

# Arguments other than an optimizer's defaults, so that all its parts run here.
EXTRA: dict[str, dict[str, Any]] = {
    "dion": {"rank_fraction": 0.5},
    "muon_bp": {"period": 2},
    # Some tests start at zero, which has no norm of its own.
    "muon_h": {"radius": "init"},
    "muon2_h": {"radius": "init"},
    "muon2_f_h": {"radius": "init"},
    # Two gradients, so that the eigenvectors of the longer sides are determined.
    "soap_muon": {"precondition_frequency": 2},
    "teon": {"joint": "^stack$"},
}
# Arguments that shapes depend on, which optax.inject_hyperparams must not trace.
STATIC = {
    "dion": ("rank_fraction", "seed"),
    "soap_muon": ("precondition_frequency", "max_precond_dim"),
    "teon": ("group_size",),
}
DTYPES = ("float32", "bfloat16", "float16")
# What some methods are not made for.
RANDOM_START = {"dion"}
JOINS_A_STACK = {"teon"}
WHOLE_MATRICES_ONLY = {"dion", "soap_muon"}
# Matrices keep their norm: no decay, and steps on a sphere do not add up to a line.
ON_SPHERE = {"muon_h", "muon2_h", "muon2_f_h"}

# Two groups, and three matrices that run as one batch.
SHAPES = {"block": {"up": (8, 12)}, "stack": (2, 12, 8), "embed": (6, 8), "bias": (12,)}
RULES = m2.MatrixRules(((r"^stack$", m2.MatrixAxes(-2, -1)),))
MATRICES = ("block", "stack")
# One leaf of each group, for what does not depend on the tree.
SMALL = {"w": (8, 12), "b": (12,)}

# Two float32 programs that differ in the order of operations only: half a unit in the
# last place (6e-8), times the gain of five Newton-Schulz steps on the smallest singular
# values (3.4445^5 = 485).
F32 = 3e-5

# Weight decay, so that a lost ``params`` shows. AdamW's 1 - b2^t cancels in float32;
# 0.9 keeps that rounding (1e-4 of the result for 0.999) out of every comparison.
ARGUMENTS = {"weight_decay": 0.1, "adam_weight_decay": 0.05, "adam_b2": 0.9}


def make(name: str, learning_rate: Any = 0.1, wrap: Any = None, **kw: Any) -> Any:
    """One optimizer under ``ARGUMENTS``; ``wrap`` is applied to its factory first."""
    factory = m2.REGISTRY[name] if wrap is None else wrap(m2.REGISTRY[name])
    arguments = ARGUMENTS | EXTRA.get(name, {}) | kw
    if not accepts(name, "weight_decay"):
        del arguments["weight_decay"]
    return factory(learning_rate, **arguments)


def accepts(name: str, keyword: str) -> bool:
    return keyword in inspect.signature(m2.REGISTRY[name]).parameters


def only(name: str, **kw: Any) -> dict[str, Any]:
    """The arguments that this optimizer has."""
    return {k: v for k, v in kw.items() if accepts(name, k)}


@functools.cache
def compiled(name: str, **kw: Any) -> Any:
    """``make(...)`` with its update compiled, once for all tests that ask for it."""
    tx = make(name, **kw)
    return optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))


def bare(name: str) -> Any:
    """Compiled, and such that the gradients' size drops out: no eps, no decay."""
    zeros = only(name, eps=0.0, adam_eps=0.0)
    decay = {"weight_decay": 0.0, "adam_weight_decay": 0.0}
    return compiled(name, rules=RULES, **decay, **zeros)


def sample(seed: int, shapes: Any = None, dtype: Any = jnp.float32) -> Any:
    """A tree of normal values, by default in the shapes of ``SHAPES``."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal(shape), dtype),
        SHAPES if shapes is None else shapes,
        is_leaf=lambda x: isinstance(x, tuple) and all(isinstance(n, int) for n in x),
    )


def gradients(steps: int, shapes: Any = None, dtype: Any = jnp.float32) -> list[Any]:
    return [sample(100 + i, shapes, dtype) for i in range(steps)]


def run(tx: Any, params: Any, grads: list[Any]) -> tuple[Any, Any, Any]:
    """Steps through ``grads``; returns parameters, state and the last updates."""
    state, updates = tx.init(params), None
    for g in grads:
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state, updates


def run_compiled(tx: Any, params: Any, grads: list[Any]) -> tuple[Any, Any, Any]:
    fast = optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))
    return run(fast, params, grads)


def leaves(tree: Any) -> list[tuple[str, Any]]:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in flat]


def types(tree: Any) -> list[tuple[Any, ...]]:
    """Path, shape, dtype and weak type of every leaf, which jit and scan compare."""
    return [
        (path, x.shape, jnp.dtype(x.dtype).name, bool(getattr(x, "weak_type", False)))
        for path, x in leaves(tree)
    ]


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def wide(x: Any) -> np.ndarray:
    """Any leaf as float64 or complex128."""
    return np.asarray(x).astype(np.complex128 if jnp.iscomplexobj(x) else np.float64)


def assert_equal(got: Any, want: Any) -> None:
    """The same structure, types and bits; NaN equals NaN."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert types(got) == types(want)
    for (path, a), b in zip(leaves(got), jax.tree.leaves(want)):
        np.testing.assert_array_equal(wide(a), wide(b), err_msg=path)


def assert_close(got: Any, want: Any, rtol: float = F32) -> None:
    """The same structure, and each leaf within ``rtol`` of its own norm."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(leaves(got), jax.tree.leaves(want)):
        assert a.shape == b.shape, path
        a, b = wide(a), wide(b)
        assert np.all(np.isfinite(a)), f"{path} is not finite"
        error = np.linalg.norm(a - b)
        assert error <= rtol * np.linalg.norm(b), f"{path}: off by {error:.3g}"


def assert_finite(tree: Any) -> None:
    for path, x in leaves(tree):
        assert np.all(np.isfinite(wide(x))), f"{path} is not finite"


def cast(tree, dtype):
    if dtype != "mixed":
        return jax.tree.map(lambda x: x.astype(dtype), tree)
    flat, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(x.astype(d) for x, d in zip(flat, itertools.cycle(DTYPES)))


def scaled(tree, factor):
    return jax.tree.map(lambda x: factor * x, tree)


def zeros_like(tree):
    return jax.tree.map(jnp.zeros_like, tree)


def transposed(tree, keys=MATRICES):
    """The tree with the matrices under ``keys`` stored as (fan_out, fan_in)."""
    flip = functools.partial(jax.tree.map, lambda x: jnp.swapaxes(x, -1, -2))
    return {k: flip(v) if k in keys else v for k, v in tree.items()}
