"""What the modules of a Flax NNX model say of their parameters."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

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


def _linear(m: Any) -> dict[str, Weight]:
    shape = (m.in_features, m.out_features)
    return {"kernel": matrix(shape, [0], [1], dense=True), "bias": adam(shape[1:])}


def _linear_general(m: Any) -> dict[str, Weight]:
    batch = tuple(m.batch_axis.values())
    split = len(batch) + len(m.in_features)
    shape = (*batch, *m.in_features, *m.out_features)
    ins, outs = range(len(batch), split), range(split, len(shape))
    return {
        "kernel": matrix(shape, ins, outs, dense=True),
        "bias": adam((*batch, *m.out_features)),
    }


def _einsum(m: Any) -> dict[str, Weight]:
    weights = {"bias": adam(m.bias_shape)}
    kernel = einsum(m.einsum_str, m.kernel_shape) if m.einsum_str else None
    return weights if kernel is None else {**weights, "kernel": kernel}


def _conv(m: Any) -> dict[str, Weight]:
    groups = m.feature_group_count
    channels = (m.in_features // groups, m.out_features)
    kernel = convolution(m.kernel_size, channels, groups)
    return {"kernel": kernel, "bias": adam((m.out_features,))}


def _conv_transpose(m: Any) -> dict[str, Weight]:
    strides = m.strides or 1
    if isinstance(strides, int):
        strides = (strides,) * len(m.kernel_size)
    kernel = convolution(
        m.kernel_size,
        (m.in_features, m.out_features),
        out_first=m.transpose_kernel,
        strides=strides,
    )
    return {"kernel": kernel, "bias": adam((m.out_features,))}


def _lora(m: Any) -> dict[str, Weight]:
    return {
        "lora_a": matrix((m.in_features, None), [0], [1]),
        "lora_b": matrix((None, m.out_features), [0], [1]),
    }


def _gates(count: int) -> Any:
    """A cell whose two Linear layers compute its gates side by side."""

    def weights(m: Any) -> dict[str, Weight]:
        h = m.hidden_features
        return {
            f"dense_{name}/kernel": matrix((n, count * h), [0], [1], (h,) * count)
            for name, n in (("i", m.in_features), ("h", h))
        }

    return weights


def _norm(m: Any) -> dict[str, Weight]:
    size = getattr(m, "num_features", None)
    vector = adam(None if size is None else (size,))
    return {"scale": vector, "bias": vector}


def _vectors(m: Any) -> dict[str, Weight]:
    return {"*": adam()}


MODULES: walk.Table = {
    "Linear": _linear,
    "LinearGeneral": _linear_general,
    "Einsum": _einsum,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Embed": lambda m: {"embedding": adam((m.num_embeddings, m.features))},
    "LoRA": _lora,
    "OptimizedLSTMCell": _gates(4),
    "GRUCell": _gates(3),
    **dict.fromkeys(
        ("LayerNorm", "RMSNorm", "BatchNorm", "GroupNorm", "InstanceNorm"), _norm
    ),
    **dict.fromkeys(("WeightNorm", "SpectralNorm", "PReLU"), _vectors),
}


def is_module(x: Any) -> bool:
    """Whether x is an NNX module."""
    return walk.derives(x, "flax.nnx")


def find(
    model: Any, given: walk.Given, axis_names: Mapping[str, str]
) -> Iterator[Found]:
    """The parameters of a model, with what its modules say of them."""
    for path, box, places in walk.leaves(model, is_module):
        if not trees.is_box(box):
            continue
        inner = jax.tree.leaves(box)
        if len(inner) != 1 or not hasattr(inner[0], "shape"):
            continue
        shape = tuple(inner[0].shape)
        weight, source = choose(
            walk.find_given(places, given),
            logical_axes.read(_names(box), len(shape), axis_names),
            walk.find_declared(places, MODULES, "flax.nnx"),
        )
        if weight is None and not walk.derives(box, "flax.nnx", "Param"):
            continue  # statistics, counters, keys: no optimizer sees them
        yield Found(
            path,
            shape,
            walk.owner(places),
            weight,
            source,
            variable=id(box),
        )


def _names(box: Any) -> tuple[Any, ...]:
    """The axis names of a variable; Flax has had three names for them."""
    metadata = box.get_metadata()
    for key in ("out_sharding", "sharding_names", "sharding"):
        names = metadata.get(key)
        if isinstance(names, tuple):
            return tuple(names)
    return ()
