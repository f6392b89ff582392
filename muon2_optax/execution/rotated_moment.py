"""The second moment in eigenbases, of all leaves: those of equal shapes together."""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from muon2_optax import dtypes, eigenbases, moments, roots
from muon2_optax.arrays import limits
from muon2_optax.arrays.grouping import even_size, grouped
from muon2_optax.axes import ResolvedAxes
from muon2_optax.execution import dispatch
from muon2_optax.iteration import adjoint, product


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


def update_leaves(
    axes: Sequence[ResolvedAxes], leaves: Sequence[Leaf], settings: Settings
) -> list[Leaf]:
    """One step of every leaf, each of whose matrices is one block.

    On a mesh the compiler gathers what it has to; the numbers are the same.
    """

    def run(settings: tuple[Any, ...], *xs: jax.Array) -> list[jax.Array]:
        old, numbers = _leaves_of(xs), Settings(*settings)
        stacks = _stepped(list(map(_to_stacks, axes, old)), numbers)
        stacks = _with_new_bases(stacks, numbers)
        return [x for new in map(_from_stacks, axes, old, stacks) for x in new]

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
    batch = [axes.shape[a] for a in axes.batch]
    g, mu, nu = (axes.from_blocks([x.reshape(*batch, *x.shape[1:])]) for x in new[:3])
    sides = [x.reshape(y.shape).astype(y.dtype) for x, y in zip(new[3:], old[3:])]
    update, mu = dtypes.narrow(g, old.g.dtype), dtypes.stored(mu, old.mu)
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
            for new in _together(lambda *xs: _step(Leaf(*xs), settings), part)
        ]

    return grouped(leaves, key, run)


def _together(
    fn: Callable[..., Sequence[jax.Array]], rows: Sequence[Sequence[jax.Array]]
) -> list[tuple[jax.Array, ...]]:
    """Runs ``fn`` once on rows of stacks, concatenated, and splits its results."""
    ends = np.cumsum([len(row[0]) for row in rows])[:-1]
    done = fn(*(jnp.concatenate(column) for column in zip(*rows)))
    return list(zip(*(jnp.split(x, ends) for x in done)))


def _step(x: Leaf, s: Settings) -> Leaf:
    """The update and the new averages of a stack, in the bases that it has."""
    rotates = x.gram_in.shape[-1] > 1, x.gram_out.shape[-1] > 1
    q_in, q_out = (
        jnp.where(s.count > s.frequency, q, jnp.eye(q.shape[-1], dtype=q.dtype)[None])
        for q in (x.basis_in, x.basis_out)
    )

    def into_bases(y: jax.Array) -> jax.Array:
        y = product(adjoint(q_in), y) if rotates[0] else y
        return product(y, q_out) if rotates[1] else y

    g = _within_range(x.g)
    nu = moments.average(x.nu, moments.square(into_bases(g)), s.b2)
    mu, numerator = moments.momentum_step(g, x.mu, s.b1, s.nesterov)
    rotated = moments.scaled(into_bases(numerator), s.scales[0])
    root = roots.sqrt(moments.scaled(nu, s.scales[1]))
    update = roots.divide(rotated, moments.divisor(root, s.eps))
    update = product(q_in, update) if rotates[0] else update
    update = product(update, adjoint(q_out)) if rotates[1] else update
    gram_in, gram_out = x.gram_in, x.gram_out
    if rotates[0]:
        gram_in = moments.average(gram_in, product(g, adjoint(g)), s.shampoo_beta)
    if rotates[1]:
        gram_out = moments.average(gram_out, product(adjoint(g), g), s.shampoo_beta)
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


def _with_new_bases(leaves: Sequence[Leaf], s: Settings) -> list[Leaf]:
    """The leaves after a step, with new bases if they are due.

    They serve the steps that follow, never that whose gradient they have seen: in the
    basis of its own gradient, the entries beside the diagonal would be rounding errors
    divided by their own size.
    """
    constant = jax.lax.stop_gradient([x[3:] for x in leaves])
    old = [(x.nu, *sides) for x, sides in zip(leaves, constant)]

    def refresh(old: Any) -> Any:
        return _if(s.count == s.frequency, _first_bases, _next_bases, old)

    def keep(old: Any) -> Any:
        return [(nu, *bases) for nu, _, _, *bases in old]

    new = _if(s.count % s.frequency == 0, refresh, keep, old)
    return [
        x._replace(nu=nu, basis_in=q_in, basis_out=q_out)
        for x, (nu, q_in, q_out) in zip(leaves, new)
    ]


def _if(choice: Any, then: Any, otherwise: Any, operand: Any) -> Any:
    if isinstance(choice, jax.core.Tracer):
        return jax.lax.cond(choice, then, otherwise, operand)
    # Outside of jax.jit, where a cond would be compiled in every step.
    return (then if choice else otherwise)(operand)


def _first_bases(old: Sequence[Any]) -> list[Any]:
    """The eigenvectors, and a second moment for them.

    So far it was taken entry by entry. Its sums along the eigenvectors are known, being
    the eigenvalues: the entries between are estimated by the product of these shares.
    """
    grams = [(gram,) for _, *sides in old for gram in sides[:2]]
    found = _by_side(eigenbases.first_basis, grams)
    new = []
    for (nu, _, _, q_in, q_out), of_in, of_out in zip(old, found[::2], found[1::2]):
        total = jnp.sum(nu, axis=(-2, -1), keepdims=True)
        divisor = jnp.where(total == 0, 1, total)
        p_in = jnp.sum(nu, -1, keepdims=True) / divisor
        p_out = jnp.sum(nu, -2, keepdims=True) / divisor
        if of_in is not None:
            q_in, p_in = of_in[0], of_in[1][..., :, None]
        if of_out is not None:
            q_out, p_out = of_out[0], of_out[1][..., None, :]
        new.append((total * p_in * p_out, q_in, q_out))
    return new


def _next_bases(old: Sequence[Any]) -> list[Any]:
    """One step of orthogonal iteration, and the second moment in the new order."""
    pairs = [
        pair
        for _, gram_in, gram_out, q_in, q_out in old
        for pair in ((gram_in, q_in), (gram_out, q_out))
    ]
    found = _by_side(eigenbases.next_basis, pairs)
    new = []
    for (nu, _, _, q_in, q_out), of_in, of_out in zip(old, found[::2], found[1::2]):
        if of_in is not None:
            q_in, order = of_in
            nu = jnp.take_along_axis(nu, order[..., :, None], axis=-2)
        if of_out is not None:
            q_out, order = of_out
            nu = jnp.take_along_axis(nu, order[..., None, :], axis=-1)
        new.append((nu, q_in, q_out))
    return new


def _by_side(
    fn: Callable[..., Sequence[jax.Array]], rows: Sequence[Sequence[jax.Array]]
) -> list[Any]:
    """Runs ``fn`` on all stacks of one side together; None for sides that stay."""

    def key(row: Sequence[jax.Array]) -> Hashable:
        return row[0].shape[-1], row[0].dtype

    def run(some: Sequence[Sequence[jax.Array]]) -> Sequence[Any]:
        if some[0][0].shape[-1] == 1:
            return [None] * len(some)
        # Stacks bound the memory, as those of Newton-Schulz do.
        largest = max(row[0].size * row[0].dtype.itemsize for row in some)
        most = max(1, int(limits.BYTES_ON_DEVICE // max(1, largest)))
        size = even_size(len(some), most)
        few = [some[i : i + size] for i in range(0, len(some), size)]
        return [new for part in few for new in _together(fn, part)]

    return grouped(rows, key, run)
