"""What a Flax Linen model says of its parameters: module types and axis names."""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from muon2_optax import trees
from muon2_optax.models import logical_axes, walk
from muon2_optax.models.layers import (
    Found,
    Weight,
    adam,
    choose,
    convolution,
    einsum,
    matrix,
)

Shapes = Mapping[str, tuple[int, ...]]


def _many(x: Any) -> tuple[int, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def _dense(m: Any, shapes: Shapes) -> dict[str, Weight]:
    kernel = matrix((None, m.features), [0], [1], dense=True)
    return {"kernel": kernel, "bias": adam()}


def _dense_general(m: Any, shapes: Shapes) -> dict[str, Weight]:
    batch, ins, outs = len(_many(m.batch_dims)), len(_many(m.axis)), _many(m.features)
    shape = (*((None,) * (batch + ins)), *outs)
    split = batch + ins
    kernel = matrix(shape, range(batch, split), range(split, len(shape)), dense=True)
    return {"kernel": kernel, "bias": adam()}


def _einsum(m: Any, shapes: Shapes) -> dict[str, Weight]:
    kernel = einsum(m.einsum_str, m.shape) if m.einsum_str else None
    return {"bias": adam()} if kernel is None else {"bias": adam(), "kernel": kernel}


def _conv(m: Any, shapes: Shapes) -> dict[str, Weight]:
    kernel = convolution(
        _many(m.kernel_size), (None, m.features), m.feature_group_count
    )
    return {"kernel": kernel, "bias": adam()}


def _conv_local(m: Any, shapes: Shapes) -> dict[str, Weight]:
    """One matrix for each position; its inputs are the window's, flattened."""
    rank = len(shapes.get("kernel", ()))
    shape = (*((None,) * (rank - 1)), m.features)
    if m.feature_group_count != 1:
        return {"kernel": adam(note=f"{m.feature_group_count} groups"), "bias": adam()}
    return {"kernel": matrix(shape, [rank - 2], [rank - 1]), "bias": adam()}


def _conv_transpose(m: Any, shapes: Shapes) -> dict[str, Weight]:
    window = _many(m.kernel_size)
    strides = _many(m.strides or 1)
    kernel = convolution(
        window,
        (None, m.features),
        out_first=m.transpose_kernel,
        strides=strides if len(strides) == len(window) else strides * len(window),
    )
    return {"kernel": kernel, "bias": adam()}


def _embed(m: Any, shapes: Shapes) -> dict[str, Weight]:
    return {"embedding": adam()}


def _vectors(m: Any, shapes: Shapes) -> dict[str, Weight]:
    return {"*": adam()}


MODULES: Mapping[str, Any] = {
    "Dense": _dense,
    "DenseParams": _dense,  # in OptimizedLSTMCell
    "DenseGeneral": _dense_general,
    "Einsum": _einsum,
    "Conv": _conv,
    "ConvLocal": _conv_local,
    "ConvTranspose": _conv_transpose,
    "Embed": _embed,
    **dict.fromkeys(
        (
            "LayerNorm",
            "RMSNorm",
            "BatchNorm",
            "GroupNorm",
            "InstanceNorm",
            "WeightNorm",
            "SpectralNorm",
            "PReLU",
        ),
        _vectors,
    ),
}


@dataclasses.dataclass
class Seen:
    """A module that has run: itself, and its own parameters' shapes inside."""

    module: Any
    shapes: Shapes


def is_module(x: Any) -> bool:
    """Whether x is a Linen module."""
    return walk.derives(x, "flax.linen")


def is_boxed(x: Any) -> bool:
    """Whether x is a tree with axis names in it."""
    return any(map(trees.is_box, jax.tree.leaves(x, is_leaf=trees.is_box)))


def run(
    module: Any, inputs: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Any, dict[str, Seen]]:
    """The variables of a module and the modules by path, without computing anything.

    ``module.init`` runs abstractly; a method interceptor notes each module inside, and
    the shapes that its parameters have there. In ``nn.scan`` and ``nn.vmap`` these are
    the shapes of one layer.
    """
    linen = sys.modules["flax.linen"]
    seen: dict[str, Seen] = {}

    def note(run_method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        result = run_method(*args, **kwargs)
        inside = context.module
        if inside.scope is None or context.method_name == "<lambda>":
            return result  # the wrapper that nn.scan or nn.vmap puts around a module
        own = inside.variables.get("params", {})
        named = trees.named_leaves(dict(own))
        shapes = {name: tuple(np.shape(x)) for name, x in named}
        seen.setdefault("/".join(inside.path), Seen(inside, shapes)).shapes = shapes
        return result

    flat, structure = jax.tree.flatten((inputs, dict(keywords)))
    traced = {i: x for i, x in enumerate(flat) if hasattr(x, "shape")}

    def init(arrays: dict[int, Any]) -> Any:
        args, kwargs = structure.unflatten(
            [arrays.get(i, x) for i, x in enumerate(flat)]
        )
        return module.init(jax.random.key(0), *args, **kwargs)

    with linen.intercept_methods(note):
        return jax.eval_shape(init, traced), seen


def find(
    variables: Any,
    seen: Mapping[str, Seen],
    given: walk.Given,
    axis_names: Mapping[str, str],
) -> Iterator[Found]:
    """The parameters in a tree, with what axis names and modules say of them."""
    whole = variables if "params" in variables else {"params": variables}
    beside = dict(trees_with_boxes(whole.get("params_axes", {})))
    for path, leaf in trees_with_boxes(whole["params"]):
        inner = jax.tree.leaves(leaf)
        if len(inner) != 1 or not hasattr(inner[0], "shape"):
            continue
        shape = tuple(inner[0].shape)
        names = _names(leaf) or _names(beside.get(f"{path}_axes"))
        place = _place(path, seen)
        single = None if place is None else place[0].shapes.get(place[1])
        weight, source = choose(
            _find_given(path, seen, single, given),
            logical_axes.read(names, len(shape), axis_names),
            None if place is None else _find_declared(*place),
        )
        owner = "" if place is None else type(place[0].module).__name__
        yield Found(path, shape, owner, weight, source, single)


def trees_with_boxes(tree: Any) -> list[tuple[str, Any]]:
    """All leaves with their paths; boxes stay closed."""
    named = jax.tree_util.tree_flatten_with_path(tree, is_leaf=trees.is_box)[0]
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in named
    ]


def _names(box: Any) -> tuple[Any, ...]:
    """The axis names of ``Partitioned``, ``LogicallyPartitioned``, ``AxisMetadata``."""
    names = getattr(box, "names", None) if trees.is_box(box) else None
    return tuple(names) if isinstance(names, (tuple, list)) else ()


def _place(path: str, seen: Mapping[str, Seen]) -> tuple[Seen, str] | None:
    """The innermost module above a path, and the path below it."""
    parts = path.split("/")
    for n in range(len(parts) - 1, -1, -1):
        above = "/".join(parts[:n])
        if above in seen:
            return seen[above], "/".join(parts[n:])
    return None


def _find_declared(place: Seen, below: str) -> tuple[Weight, str] | None:
    for base in type(place.module).__mro__:
        if base.__module__.startswith("flax.linen") and base.__name__ in MODULES:
            weights = MODULES[base.__name__](place.module, place.shapes)
            weight = weights.get(below, weights.get("*"))
            name = type(place.module).__name__
            return None if weight is None else (weight, f"module {name}")
    return None


def _find_given(
    path: str,
    seen: Mapping[str, Seen],
    single: tuple[int, ...] | None,
    given: walk.Given,
) -> tuple[Weight, str] | None:
    """What the user has said of a leaf; the axes are those of one layer."""
    places = []
    for above, inside in seen.items():
        if not above or path.startswith(f"{above}/"):
            below = path[len(above) :].strip("/")
            places.append(walk.Place(inside.module, below))
    places.sort(key=lambda place: -len(place.below))
    known = walk.find_given(places, given)
    if known is None or single is None:
        return known
    return dataclasses.replace(known[0], shape=(None,) * len(single)), known[1]
