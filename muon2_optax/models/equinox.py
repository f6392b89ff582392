"""What the modules of an Equinox model say of their parameters."""

from collections.abc import Iterator
from typing import Any

import jax

from muon2_optax.models import walk
from muon2_optax.models.layers import Found, Weight, adam, convolution, matrix


def _linear(m: Any) -> dict[str, Weight]:
    outs, ins = (1 if n == "scalar" else n for n in (m.out_features, m.in_features))
    return {
        "weight": matrix((outs, ins), [1], [0], dense=True),
        "bias": adam((outs,)),
    }


def _convolution(m: Any, strides: Any) -> dict[str, Weight]:
    channels = (m.in_channels // m.groups, m.out_channels)
    weight = convolution(
        m.kernel_size,
        channels,
        m.groups,
        out_first=True,
        channels_first=True,
        strides=strides,
    )
    return {"weight": weight, "bias": adam((m.out_channels, *(1 for _ in m.stride)))}


def _cell(count: int) -> Any:
    def weights(m: Any) -> dict[str, Weight]:
        h = m.hidden_size
        gates = {
            f"weight_{name}": matrix((count * h, n), [1], [0], (h,) * count)
            for name, n in (("ih", m.input_size), ("hh", h))
        }
        return {**gates, "bias": adam((count * h,)), "bias_n": adam((h,))}

    return weights


def _vectors(m: Any) -> dict[str, Weight]:
    return {"*": adam()}


MODULES: walk.Table = {
    "Linear": _linear,
    "Conv": lambda m: _convolution(m, None),
    "ConvTranspose": lambda m: _convolution(m, m.stride),
    "Embedding": lambda m: {"weight": adam((m.num_embeddings, m.embedding_size))},
    "GRUCell": _cell(3),
    "LSTMCell": _cell(4),
    **dict.fromkeys(
        (
            "LayerNorm",
            "RMSNorm",
            "GroupNorm",
            "BatchNorm",
            "WeightNorm",
            "SpectralNorm",
            "PReLU",
        ),
        _vectors,
    ),
}


def is_module(x: Any) -> bool:
    """Whether x is an Equinox module."""
    return walk.derives(x, "equinox")


def find(model: Any, given: walk.Given) -> Iterator[Found]:
    """The arrays of a model, with what its modules say of them."""
    leaves = list(walk.leaves(model, is_module))
    tables = _shared_tables(leaves, given)
    for path, leaf, places in leaves:
        if not _is_parameter(leaf):
            continue
        known = walk.find_given(places, given)
        if known is None and id(leaf) in tables:
            known = adam(), tables[id(leaf)]
        if known is None:
            known = walk.find_declared(places, MODULES, "equinox")
        weight, source = known or (None, "")
        yield Found(path, tuple(leaf.shape), walk.owner(places), weight, source)


def _is_parameter(x: Any) -> bool:
    """Whether x is a floating-point array, or the shape of one."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return False
    return jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)


def _shared_tables(leaves: list[Any], given: walk.Given) -> dict[int, str]:
    """Arrays that ``eqx.nn.Shared`` also hands to an embedding.

    Shared keeps one of the tied arrays and a mark where the other was. Which arrays
    the tie reads is found by tracing it.
    """
    tables: dict[int, str] = {}
    for _, leaf, places in leaves:
        shared = [
            p.module for p in places if walk.derives(p.module, "equinox", "Shared")
        ]
        if not shared or type(leaf).__name__ != "SharedNode":
            continue
        known = walk.find_declared(places, MODULES, "equinox")
        if known is None or known[0].axes is not None:
            continue
        for array in _arrays_read(shared[-1].get, shared[-1].pytree):
            tables[id(array)] = f"{known[1]}, tied"
    return tables


def _arrays_read(fn: Any, tree: Any) -> list[Any]:
    """The arrays of a tree that ``fn(tree)`` depends on."""
    flat, structure = jax.tree.flatten(tree)
    arrays = {i: x for i, x in enumerate(flat) if _is_parameter(x)}

    def read(inputs: dict[int, Any]) -> Any:
        whole = structure.unflatten([inputs.get(i, x) for i, x in enumerate(flat)])
        return [x for x in jax.tree.leaves(fn(whole)) if _is_parameter(x)]

    program = jax.make_jaxpr(read)(arrays).jaxpr
    used = {id(v) for eqn in program.eqns for v in eqn.invars}
    used |= {id(v) for v in program.outvars}
    return [x for v, x in zip(program.invars, arrays.values()) if id(v) in used]
