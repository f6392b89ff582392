"""Walks through a model that is a tree of modules, and asks them of their leaves."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from muon2_optax import trees
from muon2_optax.axes import MatrixAxes
from muon2_optax.models.layers import Weight

# For each type of module, by name: what it says of its parameters, by their paths
# below it.
Table = Mapping[str, Callable[[Any], Mapping[str, Weight]]]
# What the user says of modules, the argument ``modules`` of ``MatrixRules.of``.
Given = Mapping[Any, Mapping[str, MatrixAxes | None]]


class Place(NamedTuple):
    """A module above a leaf, and the leaf's path below it."""

    module: Any
    below: str


def leaves(
    node: Any, is_module: Callable[[Any], bool], above: tuple[Place, ...] = ()
) -> Iterator[tuple[str, Any, tuple[Place, ...]]]:
    """Each leaf's path and the modules above it, outermost first.

    A leaf below several paths comes once for each. Boxes are leaves.
    """
    if is_module(node):
        above = (*above, Place(node, ""))
    for name, child in _children(node, is_module):
        if any(child is place.module for place in above):
            continue  # a module that refers to one above it
        inner = tuple(Place(m, f"{below}/{name}".strip("/")) for m, below in above)
        if child is None:
            continue
        if trees.is_box(child) or not _children(child, is_module):
            yield name, child, inner
            continue
        for rest, leaf, places in leaves(child, is_module, inner):
            yield f"{name}/{rest}", leaf, places


def _children(node: Any, is_module: Callable[[Any], bool]) -> list[tuple[str, Any]]:
    """One level of a tree, named as in the paths of its leaves."""
    # Stop by the path, not by identity: a module may hold itself.
    found = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda path, x: bool(path), is_leaf_takes_path=True
    )
    named = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), child)
        for path, child in found[0]
        if path
    ]
    if found[0] and not named and is_module(node):  # a module that is no JAX tree
        named = list(vars(node).items())
    return [(name, child) for name, child in named if not name.startswith("_pytree")]


def derives(x: Any, package: str, name: str = "Module") -> bool:
    """Whether x is an instance of a class of this name from a package."""
    return any(
        base.__name__ == name and f"{base.__module__}.".startswith(f"{package}.")
        for base in type(x).__mro__
    )


def find_given(places: Sequence[Place], given: Given) -> tuple[Weight, str] | None:
    """What the user has said of a leaf, by the type of a module above it."""
    for place in reversed(places):
        for base in type(place.module).__mro__:
            for key in (base, base.__name__):
                if place.below in given.get(key, {}):
                    axes = given[key][place.below]
                    weight = Weight(axes, given_as=(key, place.below))
                    return weight, f"module {base.__name__}, as given"
    return None


def find_declared(
    places: Sequence[Place], table: Table, package: str
) -> tuple[Weight, str] | None:
    """What the modules of a framework say of a leaf below them.

    An outer module knows more than an inner one: a cell knows that the output of its
    Linear is four gates.
    """
    for place in places:
        for base in type(place.module).__mro__:
            if not base.__module__.startswith(package) or base.__name__ not in table:
                continue
            weights = table[base.__name__](place.module)
            weight = weights.get(place.below)
            if weight is None and place is places[-1]:
                weight = weights.get("*")
            if weight is not None:
                return weight, f"module {type(place.module).__name__}"
            break  # the nearest type decides; a subclass may have parameters of its own
    return None


def owner(places: Sequence[Place]) -> str:
    """The type of the module that a leaf belongs to; lists and dicts do not count."""
    for place in reversed(places):
        if type(place.module).__name__ not in ("List", "Dict", "Sequential"):
            return type(place.module).__name__
    return "tree"
