"""Parameter trees: names of leaves, wrappers around them, leaves that are absent.

Only this module, and ``models``, which asks the models themselves, know that frameworks
box their parameters (``flax.nnx.Variable``, ``flax.linen.Partitioned``). No framework
is imported.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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


def quote(name: str) -> str:
    """Quotes the path of a leaf for an error; a tree that is one array has none."""
    return repr(name) if name else "the array itself"


def show(value: Any) -> str:
    """A wrong argument for an error: its value, or its type where that is long.

    The parameters, given in the place of something else, would fill the screen.
    """
    size = sum(getattr(leaf, "size", 1) for leaf in jax.tree.leaves(value))
    if isinstance(value, Mapping) or size > 16:
        return f"a value of type {type(value).__name__}"
    return repr(value)


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
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return fn(name, _array(inner[0]))

    return jax.tree_util.tree_map_with_path(visit, tree, is_leaf=is_box)


# Metadata of an NNX variable that names an axis for each of its dimensions.
# ``sharding_names`` is the older name of ``out_sharding``. MaxText sets both, and Flax
# then takes the older one.
_SPECS = ("out_sharding", "optimizer_sharding", "sharding_names")


def map_reduced(
    fn: Callable[[str, Any], tuple[Any, Sequence[int | None]]], tree: Any
) -> Any:
    """Maps ``fn(path, leaf)``, which returns a statistic and where its axes come from.

    That is for each axis of the statistic the axis of the leaf that it was, or None if
    it is new. Where the box of an NNX parameter says how the mesh divides the
    parameter, the statistic comes back in a box that says the same of the axes it kept:
    trainers place a restored state by it. Other boxes are not put back.
    """

    def visit(path: Any, leaf: Any) -> Any:
        inner = jax.tree.leaves(leaf)
        if is_box(leaf) and len(inner) != 1:
            return leaf  # a box around nothing
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        value, dims = fn(name, _array(inner[0]))
        metadata = leaf.get_metadata() if _is_variable(leaf) else {}
        reduced = {
            key: tuple(_entry(metadata[key], d) for d in dims)
            for key in _SPECS
            if metadata.get(key)
        }
        return leaf.replace(value, **reduced) if reduced else value

    return jax.tree_util.tree_map_with_path(visit, tree, is_leaf=is_box)


def _is_variable(x: Any) -> bool:
    return is_box(x) and hasattr(x, "get_metadata")


def _entry(spec: Sequence[Any], dim: int | None) -> Any:
    return spec[dim] if dim is not None and dim < len(spec) else None


def map_leaves(
    fn: Callable[..., tuple[Any, ...]], tree: Any, *states: Any
) -> tuple[Any, ...]:
    """Maps ``fn(path, leaf, *state_leaves)``, which returns as many leaves as it takes.

    Raises:
      ValueError: the trees do not have the same leaves, under the same paths and in the
        same order.
    """
    names, columns, rebuild = flatten_leaves(tree, *states)
    results = [fn(*row) for row in zip(names, *columns)]
    return rebuild(*zip(*results)) if results else rebuild(*columns)


def flatten_leaves(
    tree: Any, *states: Any
) -> tuple[list[str], list[list[Any]], Callable[..., tuple[Any, ...]]]:
    """The leaves of a tree and of the states beside it, and how to put them back.

    Returns:
      The paths, a list of leaves for each tree, and ``rebuild(*lists)``, which makes
      trees of such lists. Each list gets the structure of its own tree, so a boxed
      update comes back boxed while the state beside it may be bare. ``rebuild`` also
      takes fewer lists, those of the first trees.

    Raises:
      ValueError: the trees do not have the same leaves, under the same paths and in the
        same order.
    """
    names = [name for name, leaf in named_leaves(tree) if not is_empty(leaf)]
    flat = [jax.tree.flatten(t) for t in (tree, *states)]
    for state, (_, structure) in zip(states, flat[1:]):
        # Equal structures have equal paths, which take much longer to compare.
        if structure != flat[0][1]:
            require_same_paths(tree, state, "state", _FOR_STATE)
    columns = [list(map(_array, leaves)) for leaves, _ in flat]

    def rebuild(*lists: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(d.unflatten(leaves) for leaves, (_, d) in zip(lists, flat))

    return names, columns, rebuild


def _array(x: Any) -> Any:
    """Python's numbers may stand for arrays, as they do for Optax."""
    return jnp.asarray(x) if isinstance(x, (bool, int, float, complex)) else x


def require_same_paths(updates: Any, other: Any, what: str, advice: str) -> None:
    """Refuses updates with other paths, or another order, than the tree beside them.

    Args:
      updates: the updates.
      other: the tree beside them.
      what: what that tree is, for the error: ``"state"``.
      advice: what to do, as the end of the error.

    Raises:
      ValueError: it names the first leaf that differs.
    """
    new, old = _paths(updates), _paths(other)
    if new == old:
        return
    got = next((path for path in new if path not in old), None)
    want = next((path for path in old if path not in new), None)
    if got == want:  # the same paths in another order
        pairs = itertools.zip_longest(new, old)
        got, want = next((a, b) for a, b in pairs if a != b)
    raise ValueError(
        f"the updates have {count(new)} and the {what} {count(old)}; the first that"
        f" differ are {_quote_keys(got, want)} of the updates and"
        f" {_quote_keys(want, got)} of the {what}. {advice}"
    )


_FOR_STATE = (
    "A state belongs to paths and their order: update() needs the tree that init() saw,"
    " in the same containers (a parameter without gradient needs zeros, not None); for"
    " another tree, or rules that send other leaves here, make another state with"
    " init()"
)


def count(leaves: Sequence[Any]) -> str:
    """How many leaves there are, in words: ``1 leaf``, ``2 leaves``."""
    return "1 leaf" if len(leaves) == 1 else f"{len(leaves)} leaves"


def _paths(tree: Any) -> list[tuple[str, ...]]:
    """The keys on the way to each leaf, which a joined path would not tell apart."""

    def stop(x: Any) -> bool:
        return is_box(x) or is_empty(x)

    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=stop)[0]
    return [
        tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        for path, leaf in flat
        for _ in (jax.tree.leaves(leaf) if is_box(leaf) else [leaf])
        if not is_empty(leaf)
    ]


def _quote_keys(path: tuple[str, ...] | None, other: tuple[str, ...] | None) -> str:
    if path is None:
        return "no leaf"
    joined = "/".join(path)
    # Keys that contain a slash may print like the keys of a deeper tree.
    alike = other is not None and joined == "/".join(other)
    return " under ".join(map(repr, reversed(path))) if alike else quote(joined)
