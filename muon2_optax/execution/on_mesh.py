"""Whole matrices on each device: two all-to-alls around a local iteration.

A matrix divided over D devices needs all of them in each of its products. D matrices
divided alike can change hands instead: one all-to-all gives every device one whole
matrix, the iteration runs without communication, and a second all-to-all returns the
pieces. Leaves that are stored alike travel together, in 16 bits where the iteration
runs in 16 bits.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from muon2_optax import dtypes, operands
from muon2_optax.arrays.stacks import in_lots
from muon2_optax.axes import ResolvedAxes
from muon2_optax.execution import on_device, transport
from muon2_optax.execution.transport import Stored, size, stored
from muon2_optax.iteration import runs
from muon2_optax.kernels import hopper, newton_schulz
from muon2_optax.schedules.coefficients import AOL, Plan
from muon2_optax.sharding import Axes, Placement

# Bytes of whole matrices, in the dtype of the iteration, that a device takes at once:
# what bounds the memory of a step. While one lot is iterated the next one travels.
LOT = 420e6
# Leaves of a lot that travel in float16, as on GPUs, if every device gets a matrix: XLA
# joins no more than about as many (96 operands, two for each) in the pass that narrows.
JOINED = 40


def orthogonalize(
    leaves: Sequence[jax.Array],
    axes: Sequence[ResolvedAxes],
    places: Sequence[Placement],
    plan: Plan,
    ns_dtype: Any,
) -> list[jax.Array]:
    """Orthogonalizes leaves of one ``Stored`` kind and dtype on their mesh.

    Two all-to-alls over the axes that divide the matrices, for each lot of them (see
    ``LOT`` and ``JOINED``). One all-gather for a matrix alone, which no second one
    could make use of, and for leaves that are replicated. No communication where only
    stacks are divided.
    """
    turn_squares = not isinstance(plan.normalization, AOL)
    kind = stored(axes[0], places[0], turn_squares)[0]
    swaps = [stored(a, p, turn_squares)[1] for a, p in zip(axes, places)]
    whole = all(not any(p.dims) for p in places)
    specs = tuple(p.spec for p in places)
    numbers, plan_with = operands.split_plan(plan)

    def run(
        numbers: Sequence[jax.Array], *xs: jax.Array, dtype: jnp.dtype
    ) -> tuple[jax.Array, ...]:
        group = _Group(kind, places[0].mesh, plan_with(numbers), dtype)
        if kind.axes:
            narrow, factors = transport.narrowed(xs, axes, dtype)
            rows = zip(narrow, axes, swaps)
            pieces = [transport.cut(x, a, s, kind) for x, a, s in rows]
            done = group.moved(pieces, factors)
        else:
            pieces = [transport.cut(x, a, s, kind) for x, a, s in zip(xs, axes, swaps)]
            alone = sum(map(len, pieces)) == 1
            done = group.shared(pieces) if whole and not alone else group.here(pieces)
        rows = zip(done, xs, axes, swaps)
        return tuple(transport.put_back(y, x, a, s) for y, x, a, s in rows)

    def on_mesh(*xs: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, ...]:
        # Replication of the result is by construction (every device gathers the same
        # values), which the checker cannot see.
        return jax.shard_map(
            functools.partial(run, dtype=dtype),
            mesh=places[0].mesh,
            in_specs=(PartitionSpec(), *specs),
            out_specs=specs,
            check_vma=False,
        )(numbers, *xs)

    return list(on_device.per_platform(on_mesh, leaves, ns_dtype))


@dataclasses.dataclass(frozen=True)
class _Group:
    """Matrices stored alike, inside ``shard_map``.

    The methods take stacks of pieces (or of whole matrices, where nothing is divided)
    of shape (count, *row dimensions, *column dimensions) and return such stacks.
    """

    kind: Stored
    mesh: Any
    plan: Plan
    dtype: jnp.dtype

    def here(self, stacks: Sequence[jax.Array]) -> list[jax.Array]:
        """Iterates whole matrices on this device."""
        rows = math.prod(n * size(self.mesh, a) for n, a in self.kind.rows)
        xs = [x.reshape(len(x), rows, -1) for x in stacks]
        run = functools.partial(on_device.run_batch, plan=self.plan, dtype=self.dtype)
        if len(self.kind.splits) == 1:
            done = list(run(*xs))
        else:
            cuts = np.cumsum(self.kind.splits)[:-1]
            blocks = zip(*(jnp.split(x, cuts, axis=-1) for x in xs))
            done = [
                jnp.concatenate(b, axis=-1) for b in zip(*(run(*b) for b in blocks))
            ]
        return [y.reshape(x.shape) for x, y in zip(stacks, done)]

    def moved(
        self, pieces: Sequence[jax.Array], factors: jax.Array | None
    ) -> list[jax.Array]:
        """Iterates matrices that are divided, each on one device (or on all)."""
        count = sum(map(len, pieces))
        if count == 1:
            return [self._gathered(pieces[0], factors)]
        devices = size(self.mesh, self.kind.axes)
        share = -(-count // devices)
        matrix = math.prod(self.kind.local) * devices * self.dtype.itemsize
        joined = len(pieces) if factors is None else JOINED
        least = max(math.ceil(share * matrix / LOT), -(-len(pieces) // joined))
        lots = min(share, least)
        step = -(-share // lots) * devices

        def lot(first: int, members: list[jax.Array]) -> list[jax.Array]:
            own = None if factors is None else factors[first : first + step]
            return [self._exchanged(members, own, devices)]

        return in_lots(lot, pieces, step)

    def _exchanged(
        self, pieces: Sequence[jax.Array], factors: jax.Array | None, devices: int
    ) -> jax.Array:
        count = sum(map(len, pieces))
        share = -(-count // devices)
        if factors is None:
            sent = _filled([transport.bits(p) for p in pieces], devices * share)
        else:
            sent = transport.packed(pieces, factors, share, devices)
        done = self._iterated(self._swap(sent), factors is not None, share)
        back = transport.bits(done.astype(self.dtype))
        back = self._swap(back.reshape(-1, *back.shape[2:]))
        columns = self.kind.local[-1]
        return transport.values(back, self.dtype)[:count, ..., :columns]

    def _iterated(self, got: jax.Array, packed: bool, share: int) -> jax.Array:
        """What came from all devices as whole matrices, iterated, in pieces again.

        Takes (devices, share, *local), or rows of ``packed`` pieces. Returns (devices,
        share, *local), or more columns, the last ones of no meaning.
        """
        if packed:
            values, factors = transport.unpacked(got, self.kind.local, share)
            done = self._on_kernels(values, factors)
            if done is not None:
                return done
            ones = (1,) * len(self.kind.local)
            x = values.astype(jnp.float32) * factors.reshape(-1, share, *ones)
        else:
            x = transport.values(got, self.dtype)
            wide = dtypes.compute_dtype(self.dtype)
            x = x.astype(jnp.promote_types(wide, x.dtype))
            x = x.reshape(-1, share, *self.kind.local)
        done = self.here([transport.assembled(x, self.kind, self.mesh)])[0]
        return transport.divided(done, self.kind, self.mesh)

    def _on_kernels(self, values: jax.Array, factors: jax.Array) -> jax.Array | None:
        """Whole matrices out of pieces, where the kernels take them so; or None."""
        if len(self.kind.local) != 2 or len(self.kind.splits) > 1:
            return None
        (m, down), (n, right) = self.kind.rows[0], self.kind.cols[0]
        grid = size(self.mesh, down), size(self.mesh, right)
        if not hopper.takes_pieces(
            values.shape[1], (m, n), grid, self.plan, self.dtype
        ):
            return None
        steps = runs(self.plan, m * grid[0], n * grid[1], self.dtype)
        x = values.reshape(*grid, *values.shape[1:])
        done = newton_schulz.run_pieces(
            x, factors.reshape(x.shape[:3]), self.plan, steps
        )
        return done.reshape(-1, *done.shape[2:])

    def _swap(self, x: jax.Array) -> jax.Array:
        """Equal parts of axis 0 to every device, and theirs in return."""
        # XLA for CPUs gives the parts layouts of their own, and refuses the result.
        x = jax.lax.optimization_barrier(x)
        return jax.lax.all_to_all(x, self.kind.axes, 0, 0, tiled=True)

    def _gathered(self, piece: jax.Array, factors: jax.Array | None) -> jax.Array:
        """Every device iterates the whole matrix and keeps its piece of the result."""
        if factors is None:
            sent = transport.bits(piece)
        else:
            sent = transport.packed([piece], factors, 1, 1)[0]
        got = jax.lax.all_gather(sent, self.kind.axes)
        done = self._iterated(got, factors is not None, 1)
        index = jax.lax.axis_index(self.kind.axes)
        done = jax.lax.dynamic_index_in_dim(done, index, keepdims=False)
        return done[..., : self.kind.local[-1]]

    def shared(self, stacks: Sequence[jax.Array]) -> list[jax.Array]:
        """Each device iterates its share of replicated matrices; all get all."""
        x = jnp.concatenate(stacks) if len(stacks) > 1 else stacks[0]
        names = tuple(a for a in self.mesh.axis_names if self.mesh.shape[a] > 1)
        devices, count = size(self.mesh, names), len(x)
        share = -(-count // devices)
        padded = _filled([x], devices * share)
        mine = jax.lax.axis_index(names) * share
        done = self.here([jax.lax.dynamic_slice_in_dim(padded, mine, share)])[0]
        sent = transport.bits(done.astype(self.dtype)).reshape(share, -1)
        if count >= devices:
            got = jax.lax.all_gather(sent, names, tiled=True)[:count]
        else:
            got = _broadcast_first(sent[0], count, devices, names)
        done = transport.values(got, self.dtype).reshape(x.shape)
        return jnp.split(done, np.cumsum([len(s) for s in stacks])[:-1])


def _filled(parts: Sequence[jax.Array], count: int) -> jax.Array:
    """The parts as one stack of ``count`` members, the last ones zero."""
    missing = count - sum(map(len, parts))
    zeros = [jnp.zeros((missing, *parts[0].shape[1:]), parts[0].dtype)]
    parts = [*parts, *(zeros if missing else [])]
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _broadcast_first(
    row: jax.Array, count: int, devices: int, names: Axes
) -> jax.Array:
    """Rows (count, size) of the first ``count`` devices, on all.

    Gathering the rows of all devices would move those that nobody needs. Each row is
    first spread over the devices, so that every link carries count rows and one more.
    """
    spread = jnp.pad(row, (0, -row.size % devices)).reshape(devices, -1)
    pieces = jax.lax.all_to_all(spread, names, 0, 0, tiled=True)[:count]
    rows = jax.lax.all_gather(pieces, names, axis=1)
    return rows.reshape(count, -1)[:, : row.size]
