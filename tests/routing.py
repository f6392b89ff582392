"""Which leaves of a tree the rules take for matrices; quick compilation of steps."""

import jax
import jax.numpy as jnp
import pytest

from muon2_optax import MatrixRules


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """One or two steps of small matrices: compiling takes nearly all of the time.

    Acts in every module that imports it.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def labels_of(rules, tree):
    """{path: label}, for comparison at one glance."""
    labels = rules.labels(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): label
        for path, label in jax.tree_util.tree_flatten_with_path(labels)[0]
    }


def matrices_of(tree, rules=MatrixRules()):  # noqa: B008 (frozen)
    return {path for path, label in labels_of(rules, tree).items() if label == "matrix"}
