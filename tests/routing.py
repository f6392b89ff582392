"""Which leaves of a tree the rules take for matrices."""

import jax
import jax.numpy as jnp

from muon2_optax import MatrixRules


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
