"""Means of the squares of a leaf's matrices, along their rows and their columns."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from muon2_optax import averages, sharding
from muon2_optax.axes import ResolvedAxes
from muon2_optax.kernels import hopper
from muon2_optax.sharding import Axes, Location

# The mean over rows is taken in two stages: within groups of this many rows, and then
# over the groups. This gives a GPU enough work at once. If the mean were taken in a
# single stage, XLA would store all squares in memory.
GROUP = 16


def can_stack(g: jax.Array, axes: ResolvedAxes, location: Location) -> bool:
    """Whether ``of_equal_leaves`` takes a leaf.

    It must be on one device and of a shape that the kernel takes. JAX passes no leaf on
    a mesh with Explicit axes to a kernel, not even if the axes divide nothing.
    """
    mesh = sharding.typed_mesh(g)
    explicit = mesh is not None and AxisType.Explicit in mesh.axis_types
    whole = location.undivided and not explicit
    return whole and hopper.takes_sums(g.shape, g.dtype, axes)


def of_equal_leaves(
    gs: Sequence[jax.Array], axes: ResolvedAxes
) -> tuple[jax.Array, jax.Array]:
    """``of_leaf`` of leaves of equal shapes, as stacks along a new axis 0."""

    def cuda(*gs: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _in_order(_on_kernel(gs, gs[0].shape[-2:]), axes)

    def stock(*gs: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows, columns = zip(*(in_two_passes(g, axes, g.shape) for g in gs))
        return jnp.stack(rows), jnp.stack(columns)

    run = hopper.add_derivative(cuda, stock)
    return jax.lax.platform_dependent(*gs, cuda=run, default=stock)


def of_leaf(
    g: jax.Array, axes: ResolvedAxes, location: Location
) -> tuple[jax.Array, jax.Array]:
    """Means of |g|^2 over the output axes and over the input axes.

    Args:
      g: a leaf.
      axes: of its matrices.
      location: where it lives.

    Returns:
      The first without the output axes, and with one more, last, axis of blocks where
      there are several; the second without the input axes.
    """
    part = location.local_shape(g.shape)
    kernel = location.on_mesh and hopper.takes_sums(part, g.dtype, axes)
    return _of_leaf(g, axes, location.reshapable_sizes(g), location if kernel else None)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _of_leaf(
    g: jax.Array,
    axes: ResolvedAxes,
    local: tuple[int | None, ...],
    location: Location | None,
) -> tuple[jax.Array, jax.Array]:
    """As ``of_leaf``, on the kernel if a location on a mesh is given.

    Whether that is so is decided by the caller, because JAX's cache of traces does not
    compare whether kernels are on. ``local`` is each device's shape, as far as it is
    known.
    """
    stock = functools.partial(in_two_passes, axes=axes, local=local)
    if location is None:
        return stock(g)
    on_mesh = functools.partial(_on_mesh, axes=axes, location=location)
    cuda = hopper.add_derivative(on_mesh, stock)
    return jax.lax.platform_dependent(g, cuda=cuda, default=stock)


def _on_mesh(
    g: jax.Array, axes: ResolvedAxes, location: Location
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel, on each device for its own part."""
    spec = tuple(location.spec) + (None,) * (g.ndim - len(location.spec))

    def part(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows, columns = _on_kernel([x], g.shape[-2:], location.dims[-2:])
        return rows[0], columns[0]

    run = jax.shard_map(
        part,
        mesh=location.mesh,
        in_specs=PartitionSpec(*spec),
        out_specs=(PartitionSpec(*spec[:-1]), PartitionSpec(*spec[:-2], spec[-1])),
        check_vma=False,
    )
    return _in_order(run(g), axes)


def _in_order(
    pair: tuple[jax.Array, jax.Array], axes: ResolvedAxes
) -> tuple[jax.Array, jax.Array]:
    """Turns means of rows and of columns into means over outputs and over inputs."""
    return pair if axes.ins == (len(axes.shape) - 2,) else pair[::-1]


def _on_kernel(
    xs: Sequence[jax.Array],
    whole: Sequence[int],
    over: Sequence[Axes] = ((), ()),
) -> tuple[jax.Array, jax.Array]:
    """Means along rows and along columns of equal leaves, or of their local parts.

    Args:
      xs: the leaves, or each device's part of them.
      whole: how many rows and columns the whole matrices have.
      over: the mesh axes that divide the rows and the columns.
    """
    *batch, m, n = xs[0].shape
    rows, columns = zip(*(_partial_sums(x) for x in xs))
    along = _total(jnp.concatenate(rows), max(m, n) / whole[1], over[1])
    across = _total(jnp.concatenate(columns), max(m, n) / whole[0], over[0])
    count = len(xs)
    return along.reshape(count, *batch, m), across.reshape(count, *batch, n)


@jax.jit
def _partial_sums(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Partial sums of the squares of a leaf's matrices; traced once for each shape."""
    # Imported only here, because not every JAX comes with Pallas.
    from muon2_optax.kernels import sum_squares

    return sum_squares.of_squares(x.reshape(-1, *x.shape[-2:]))


def _total(parts: jax.Array, scale: float, over: Axes) -> jax.Array:
    """Means (L, length) of the partial sums (L, count, length)."""
    total = jnp.sum(parts, axis=1) * scale
    total = jax.lax.psum(total, over) if over else total
    # Keep it below overflow, as ``in_two_passes`` keeps single squares.
    return jnp.minimum(total, float(jnp.finfo(jnp.float32).max) / 4)


def in_two_passes(
    g: jax.Array, axes: ResolvedAxes, local: tuple[int | None, ...] | None = None
) -> tuple[jax.Array, jax.Array]:
    """As ``of_leaf``, in two passes of XLA over a leaf: for every leaf and backend."""
    local = local or (None,) * g.ndim
    square = averages.square(g)
    col = _mean(square, axes.ins, local)
    if len(axes.splits) == 1:
        return _mean(square, axes.outs, local), col
    sizes = jnp.asarray(axes.per_output(axes.splits), square.dtype)
    rows = axes.sums(square / sizes, axes.outs)
    return jnp.stack([jnp.squeeze(r, axes.outs) for r in rows], axis=-1), col


def _mean(
    x: jax.Array, dims: tuple[int, ...], local: tuple[int | None, ...]
) -> jax.Array:
    """The mean over these dimensions, in two stages where there are groups of rows."""
    # Divide before summing, because the sum of large squares would overflow.
    first, count = dims[0], math.prod(x.shape[d] for d in dims)
    group = math.gcd(local[first] or 1, GROUP)
    if len(dims) > 1 or first == x.ndim - 1 or group < GROUP // 2:
        return jnp.sum(x / count, axis=dims)
    groups = count // group
    split = x.reshape(*x.shape[:first], groups, group, *x.shape[first + 1 :])
    return jnp.sum(jnp.sum(split / group, axis=first + 1) / groups, axis=first)
