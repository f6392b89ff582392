"""The second moment in eigenbases, of all leaves: those of equal shapes together."""

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muon2_optax import averages, dtypes, roots, sharding, states
from muon2_optax.arrays import limits, stacks
from muon2_optax.arrays.grouping import even_size, run_in_groups
from muon2_optax.axes import ResolvedAxes
from muon2_optax.execution import basis_refresh, dispatch
from muon2_optax.iteration import lone_product


class Leaf(NamedTuple):
    """The arrays of a leaf.

    Attributes:
      g: the gradient; after a step, the update.
      mu, nu: the momentum, and the second moment in the eigenbases.
      gram_in, gram_out: averages of G G^H and G^H G, (..., side, side); (..., 1, 1) for
        a side that keeps its own axes.
      basis_in, basis_out: their eigenvectors as columns; zeros before the first ones.
    """

    g: jax.Array
    mu: jax.Array
    nu: jax.Array
    gram_in: jax.Array
    gram_out: jax.Array
    basis_in: jax.Array
    basis_out: jax.Array


class Settings(NamedTuple):
    """Numbers of a step; ``count`` is 1 in the first, ``scales`` correct the bias."""

    count: jax.Array
    b1: Any
    b2: Any
    eps: Any
    shampoo_beta: Any
    scales: tuple[Any, Any]
    frequency: int
    nesterov: bool


def square_shape(axes: ResolvedAxes, inputs: bool, longest: int) -> tuple[int, ...]:
    """The shape of a gram or a basis of this side: (*batch, side, side)."""
    side = axes.fan_in if inputs else axes.splits[0]
    side = side if 1 < side <= longest else 1
    return *axes.batch_shape, side, side


def require_squares(name: str, axes: ResolvedAxes, leaf: Leaf, longest: int) -> None:
    """Refuses grams and bases for another ``max_precond_dim`` or other matrices."""
    options = "another max_precond_dim, other rules"
    for field in ("gram_in", "gram_out", "basis_in", "basis_out"):
        shape = square_shape(axes, field.endswith("_in"), longest)
        states.require_statistic(name, getattr(leaf, field), shape, field, options)


def zero_square(p: Any, axes: ResolvedAxes, inputs: bool, longest: int) -> jax.Array:
    """What a gram or a basis of this side starts as."""
    # Computed from the parameter, so that it lives where the parameter does on a mesh.
    none = sharding.zeros_like(p, dtypes.compute_dtype(p.dtype))
    none = jnp.sum(none, axis=axes.ins + axes.outs)[..., None, None]
    square = square_shape(axes, inputs, longest)[-2:]
    return none + jnp.zeros((1,) * len(axes.batch) + square, none.dtype)


def update_leaves(
    axes: Sequence[ResolvedAxes], leaves: Sequence[Leaf], settings: Settings
) -> list[Leaf]:
    """One step of every leaf, each of whose matrices is one block.

    On a mesh the compiler gathers what it has to; the numbers are the same.
    """

    def run(settings: tuple[Any, ...], *xs: jax.Array) -> list[jax.Array]:
        old, numbers = _leaves_of(xs), Settings(*settings)
        new = _stepped(list(map(_to_stacks, axes, old)), numbers)
        # Refresh the bases after the update. In the bases of its own gradient, entries
        # off the diagonal would be rounding errors divided by their own size.
        rotated = [basis_refresh.Rotated(*x[2:]) for x in new]
        rotated = basis_refresh.refresh(rotated, numbers.count, numbers.frequency)
        new = [Leaf(*x[:2], *rest) for x, rest in zip(new, rotated)]
        return [x for leaf in map(_from_stacks, axes, old, new) for x in leaf]

    flat = [x for leaf in leaves for x in leaf]
    return _leaves_of(dispatch.with_automatic_axes(run, flat, tuple(settings)))


def _leaves_of(xs: Sequence[jax.Array]) -> list[Leaf]:
    size = len(Leaf._fields)
    return [Leaf(*xs[i : i + size]) for i in range(0, len(xs), size)]


def _to_stacks(axes: ResolvedAxes, leaf: Leaf) -> Leaf:
    """Every array as a stack (count, rows, columns); g and mu in float32 or better."""
    wide = dtypes.compute_dtype(leaf.g.dtype)
    shaped = (leaf.g.astype(wide), leaf.mu.astype(wide), leaf.nu)
    arrays = (*(axes.to_blocks(x)[0] for x in shaped), *leaf[3:])
    return Leaf(*(x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]) for x in arrays))


def _from_stacks(axes: ResolvedAxes, old: Leaf, new: Leaf) -> Leaf:
    """Stacks in the shapes and dtypes of the leaf that they were made from."""
    batch = axes.batch_shape
    g, mu, nu = (axes.from_blocks([x.reshape(*batch, *x.shape[1:])]) for x in new[:3])
    sides = [x.reshape(y.shape).astype(y.dtype) for x, y in zip(new[3:], old[3:])]
    update, mu = dtypes.narrow(g, old.g.dtype), dtypes.narrow_average(mu, old.mu)
    return Leaf(update, mu, nu.astype(old.nu.dtype), *sides)


def _stepped(leaves: Sequence[Leaf], settings: Settings) -> list[Leaf]:
    """The leaves after ``_step``, a few of equal shapes at a time."""

    def key(x: Leaf) -> Hashable:
        return tuple((y.shape[1:], y.dtype) for y in x)

    def run(some: Sequence[Leaf]) -> list[Leaf]:
        size = even_size(len(some), limits.ARRAYS_IN_CONCATENATION)
        few = [some[i : i + size] for i in range(0, len(some), size)]
        return [
            Leaf(*new)
            for part in few
            for new in stacks.run_concatenated(
                lambda *xs: _step(Leaf(*xs), settings), part
            )
        ]

    return run_in_groups(leaves, key, run)


def _step(x: Leaf, s: Settings) -> Leaf:
    """The update and the new averages of a stack, in the bases that it has."""
    turn_in, turn_out = x.gram_in.shape[-1] > 1, x.gram_out.shape[-1] > 1
    has_bases = s.count > s.frequency

    def turned(y: jax.Array, product: jax.Array) -> jax.Array:
        return jnp.where(has_bases, product, y)

    def into_bases(y: jax.Array) -> jax.Array:
        if turn_in:
            y = turned(y, lone_product(x.basis_in, y, adjoint_of="a"))
        return turned(y, lone_product(y, x.basis_out)) if turn_out else y

    g = _within_range(x.g)
    nu = averages.average(x.nu, averages.square(into_bases(g)), s.b2)
    mu, numerator = averages.momentum_step(g, x.mu, s.b1, s.nesterov)
    rotated = averages.scale(into_bases(numerator), s.scales[0])
    root = roots.sqrt(averages.scale(nu, s.scales[1]))
    update = roots.divide(rotated, averages.divisor(root, s.eps))
    gram_in, gram_out = x.gram_in, x.gram_out
    if turn_in:
        update = turned(update, lone_product(x.basis_in, update))
        new = lone_product(g, g, adjoint_of="b")
        gram_in = averages.average(gram_in, new, s.shampoo_beta)
    if turn_out:
        update = turned(update, lone_product(update, x.basis_out, adjoint_of="b"))
        new = lone_product(g, g, adjoint_of="a")
        gram_out = averages.average(gram_out, new, s.shampoo_beta)
    return Leaf(update, mu, nu, gram_in, gram_out, x.basis_in, x.basis_out)


def _within_range(g: jax.Array) -> jax.Array:
    """Matrices scaled down where sums of their entries' squares would overflow.

    For float32 that is above 1e15 or so.
    """
    most = float(jnp.finfo(g.dtype).max) / 16 / max(1, math.prod(g.shape[1:]))
    limit, down = most**0.5, 2.0**-64
    largest = jnp.max(jnp.abs(g), axis=(-2, -1), keepdims=True, initial=0.0)
    # A power of two first: reciprocals of the largest numbers are flushed to zero.
    factor = limit * down / (jnp.maximum(largest, limit) * down)
    return jax.lax.stop_gradient(jnp.where(largest > limit, factor, 1)) * g
