"""Parameter trees: names of leaves, wrappers around them, leaves that are absent.

The only place that knows that frameworks box their parameters (``flax.nnx.Variable``,
``flax.linen.Partitioned``), without importing any of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax


def is_box(x: Any) -> bool:
    """Whether x is a framework's wrapper around one parameter."""
    return any(
        base.__name__ in ("Variable", "AxisMetadata")
        and base.__module__.startswith("flax")
        for base in type(x).__mro__
    )


def is_empty(x: Any) -> bool:
    """Whether x stands for a leaf that is not there: None, or masked away."""
    return x is None or isinstance(x, optax.MaskedNode)


def named_leaves(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """All leaves with their paths, ``"layers/0/kernel"``; boxes are opened.

    Absent leaves (None, ``optax.MaskedNode``) are listed too, as themselves.
    """

    def stop(x: Any) -> bool:
        return is_box(x) or is_empty(x) or (is_leaf is not None and is_leaf(x))

    named = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=stop)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        inner = [leaf]
        if is_box(leaf):  # a box that a mask has emptied still has its path
            inner = jax.tree.leaves(leaf, is_leaf=is_leaf) or [None]
        named.extend((name, x) for x in inner)
    return named


def map_named(fn: Callable[[str, Any], Any], tree: Any) -> Any:
    """Maps ``fn(path, leaf)``; boxes are opened and not put back."""

    def visit(path: Any, leaf: Any) -> Any:
        inner = jax.tree.leaves(leaf)
        if is_box(leaf) and len(inner) != 1:
            return leaf  # a box around nothing
        return fn(jax.tree_util.keystr(path, simple=True, separator="/"), inner[0])

    return jax.tree_util.tree_map_with_path(visit, tree, is_leaf=is_box)


def map_leaves(
    fn: Callable[..., tuple[Any, ...]], tree: Any, *states: Any
) -> tuple[Any, ...]:
    """Maps ``fn(path, leaf, *state_leaves)``, which returns as many leaves as it takes.

    Each result is put into the structure of the tree that its leaf came from, so a
    boxed update comes back boxed while the state beside it may be bare.

    Raises:
      ValueError: the trees do not have the same leaves.
    """
    names = [name for name, leaf in named_leaves(tree) if not is_empty(leaf)]
    flat = [jax.tree.flatten(t) for t in (tree, *states)]
    counts = [len(leaves) for leaves, _ in flat]
    if len(set(counts + [len(names)])) != 1:
        raise ValueError(
            f"the updates have {len(names)} leaves but the state holds {counts[1:]}; "
            "update() needs the tree that init() saw (a parameter without gradient "
            f"needs zeros, not None). Leaves of the updates: {names[:8]}"
        )
    results = [fn(*row) for row in zip(names, *(leaves for leaves, _ in flat))]
    columns: Sequence[Any] = list(zip(*results)) if results else [()] * len(flat)
    return tuple(d.unflatten(c) for (_, d), c in zip(flat, columns))
