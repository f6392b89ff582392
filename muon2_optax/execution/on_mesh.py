"""Orthogonalizes on a mesh: two all-to-alls around an iteration of whole matrices.

A matrix that is divided over D devices would need all of them for each of its products.
Instead, D matrices that are divided alike travel: one all-to-all gives every device a
whole matrix, the iteration runs without communication, and a second all-to-all returns
the shards. Leaves that are stored alike travel together, in 16 bits where the iteration
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
from muon2_optax.arrays import limits
from muon2_optax.arrays.stacks import run_in_chunks
from muon2_optax.execution import transport
from muon2_optax.execution.layout import ShardLayout, StoredLeaf, device_count
from muon2_optax.execution.on_device import orthogonalize_batch, run_per_platform
from muon2_optax.iteration import gram_runs
from muon2_optax.kernels import hopper, newton_schulz
from muon2_optax.schedules.plans import Plan
from muon2_optax.sharding import Axes


def orthogonalize(
    *leaves: jax.Array, stored: Sequence[StoredLeaf], plan: Plan, ns_dtype: Any
) -> list[jax.Array]:
    """Orthogonalizes leaves of one layout, mesh and dtype on their mesh.

    Each chunk of matrices that the mesh divides takes two all-to-alls over the axes
    that divide them. A single matrix takes one all-gather instead, and every device
    iterates it. Replicated matrices are shared out, and one all-gather collects the
    results. Where only the stacks are divided, nothing travels.
    """
    layout, mesh = stored[0].layout, stored[0].location.mesh
    replicated = not any(leaf.divided for leaf in stored)
    specs = tuple(leaf.location.spec for leaf in stored)
    numbers, plan_with = operands.split_plan(plan)

    def run(
        numbers: Sequence[jax.Array],
        *parts: jax.Array,
        dtype: jnp.dtype,
        kernels: bool,
    ) -> tuple[jax.Array, ...]:
        """Each device's part of every leaf, inside ``shard_map``."""
        iteration = _Iteration(layout, mesh, plan_with(numbers), dtype, kernels)
        if layout.axes:
            axes = [leaf.axes for leaf in stored]
            narrowed, factors = transport.narrow(parts, axes, dtype)
            shards = list(map(transport.cut_shards, narrowed, stored))
            done = iteration.exchange(shards, factors)
        else:
            whole = list(map(transport.cut_shards, parts, stored))
            several = sum(map(len, whole)) > 1
            share = replicated and several
            done = iteration.share_out(whole) if share else iteration.iterate(whole)
        return tuple(map(transport.restore_part, done, parts, stored))

    def on_mesh(*xs: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
        # JAX cannot see that a replicated result is the same on all devices; it is,
        # because every device gathers the same values.
        return jax.shard_map(
            functools.partial(run, **options),
            mesh=mesh,
            in_specs=(PartitionSpec(), *specs),
            out_specs=specs,
            check_vma=False,
        )(numbers, *xs)

    # Kernels may run: inside shard_map XLA divides nothing.
    return list(run_per_platform(on_mesh, leaves, ns_dtype, hopper.available()))


@dataclasses.dataclass(frozen=True)
class _Iteration:
    """The iteration of matrices stored alike, inside ``shard_map``.

    The methods take and return stacks of shape (count, *row dimensions, *column
    dimensions): of shards, or of whole matrices where nothing is divided.

    Attributes:
      layout: how the matrices are stored.
      mesh: on which mesh.
      plan: the normalization and the steps.
      dtype: of the iteration.
      kernels: whether this program may use the kernels for Hopper GPUs.
    """

    layout: ShardLayout
    mesh: Any
    plan: Plan
    dtype: jnp.dtype
    kernels: bool

    def iterate(self, stacks: Sequence[jax.Array]) -> list[jax.Array]:
        """Iterates whole matrices on this device."""
        rows = math.prod(n * device_count(self.mesh, a) for n, a in self.layout.rows)
        xs = [x.reshape(len(x), rows, -1) for x in stacks]
        run = functools.partial(
            orthogonalize_batch,
            plan=self.plan,
            dtype=self.dtype,
            kernels=self.kernels,
        )
        if len(self.layout.splits) == 1:
            done = list(run(*xs))
        else:
            ends = np.cumsum(self.layout.splits)[:-1]
            blocks = zip(*(jnp.split(x, ends, axis=-1) for x in xs))
            done = [
                jnp.concatenate(b, axis=-1) for b in zip(*(run(*b) for b in blocks))
            ]
        return [y.reshape(x.shape) for x, y in zip(stacks, done)]

    def exchange(
        self, shards: Sequence[jax.Array], factors: jax.Array | None
    ) -> list[jax.Array]:
        """Iterates matrices that are divided, each on one device, or one on all.

        ``factors`` are the root mean squares of shards that travel in float16.
        """
        count = sum(map(len, shards))
        if count == 1:
            return [self._gather(shards[0], factors)]
        devices = device_count(self.mesh, self.layout.axes)
        share = -(-count // devices)
        matrix = math.prod(self.layout.local) * devices * self.dtype.itemsize
        most = len(shards) if factors is None else limits.LEAVES_IN_EXCHANGE
        least = max(
            math.ceil(share * matrix / limits.BYTES_ON_MESH), -(-len(shards) // most)
        )
        chunks = min(share, least)
        size = -(-share // chunks) * devices

        def run(first: int, members: list[jax.Array]) -> list[jax.Array]:
            own = None if factors is None else factors[first : first + size]
            return [self._exchange_chunk(members, own, devices)]

        return run_in_chunks(run, shards, size)

    def _exchange_chunk(
        self, shards: Sequence[jax.Array], factors: jax.Array | None, devices: int
    ) -> jax.Array:
        """Swaps shards for whole matrices, iterates this device's, and swaps back."""
        count = sum(map(len, shards))
        share = -(-count // devices)
        if factors is None:
            sent = _fill([transport.to_bits(p) for p in shards], devices * share)
        else:
            sent = transport.pack(shards, factors, share, devices)
        done = self._iterate_received(self._swap(sent), factors is not None, share)
        back = transport.to_bits(done.astype(self.dtype))
        back = self._swap(back.reshape(-1, *back.shape[2:]))
        columns = self.layout.local[-1]
        return transport.from_bits(back, self.dtype)[:count, ..., :columns]

    def _iterate_received(self, got: jax.Array, packed: bool, share: int) -> jax.Array:
        """Iterates the matrices whose shards have arrived, and divides the results.

        Args:
          got: the shards of ``share`` matrices from each device, in the order of the
            devices: one stack, or if ``packed`` one row of ``transport.pack`` each.
          packed: whether they are packed.
          share: how many matrices they are shards of.

        Returns:
          Shards (devices, share, *local). They may have further columns, which mean
          nothing.
        """
        if packed:
            values, factors = transport.unpack(got, self.layout.local, share)
            done = self._iterate_shards(values, factors)
            if done is not None:
                return done
            ones = (1,) * len(self.layout.local)
            x = values.astype(jnp.float32) * factors.reshape(-1, share, *ones)
        else:
            x = transport.from_bits(got, self.dtype)
            wide = dtypes.compute_dtype(self.dtype)
            x = x.astype(jnp.promote_types(wide, x.dtype))
            x = x.reshape(-1, share, *self.layout.local)
        done = self.iterate([transport.assemble(x, self.layout, self.mesh)])[0]
        return transport.divide(done, self.layout, self.mesh)

    def _iterate_shards(
        self, values: jax.Array, factors: jax.Array
    ) -> jax.Array | None:
        """Runs the kernels on shards that are not assembled; None if they cannot."""
        if not self.kernels or len(self.layout.local) != 2:
            return None
        if len(self.layout.splits) > 1:
            return None
        (m, down), (n, right) = self.layout.rows[0], self.layout.cols[0]
        grid = device_count(self.mesh, down), device_count(self.mesh, right)
        if not hopper.takes_shards(
            values.shape[1], (m, n), grid, self.plan, self.dtype
        ):
            return None
        runs = gram_runs(self.plan, m * grid[0], n * grid[1], self.dtype)
        x = values.reshape(*grid, *values.shape[1:])
        done = newton_schulz.run_shards(
            x, factors.reshape(x.shape[:3]), self.plan, runs
        )
        return done.reshape(-1, *done.shape[2:])

    def _swap(self, x: jax.Array) -> jax.Array:
        """Sends equal parts of axis 0 to every device, and receives theirs."""
        # Without it XLA for CPUs gives each part its own layout and refuses the result.
        x = jax.lax.optimization_barrier(x)
        return jax.lax.all_to_all(x, self.layout.axes, 0, 0, tiled=True)

    def _gather(self, shard: jax.Array, factors: jax.Array | None) -> jax.Array:
        """Iterates the matrix on every device, each of which keeps its own shard."""
        if factors is None:
            sent = transport.to_bits(shard)
        else:
            sent = transport.pack([shard], factors, 1, 1)[0]
        got = jax.lax.all_gather(sent, self.layout.axes)
        done = self._iterate_received(got, factors is not None, 1)
        index = jax.lax.axis_index(self.layout.axes)
        done = jax.lax.dynamic_index_in_dim(done, index, keepdims=False)
        return done[..., : self.layout.local[-1]]

    def share_out(self, stacks: Sequence[jax.Array]) -> list[jax.Array]:
        """Iterates a share of the replicated matrices on each device; all get all."""
        x = jnp.concatenate(stacks) if len(stacks) > 1 else stacks[0]
        names = tuple(a for a in self.mesh.axis_names if self.mesh.shape[a] > 1)
        devices, count = device_count(self.mesh, names), len(x)
        share = -(-count // devices)
        padded = _fill([x], devices * share)
        first = jax.lax.axis_index(names) * share
        done = self.iterate([jax.lax.dynamic_slice_in_dim(padded, first, share)])[0]
        sent = transport.to_bits(done.astype(self.dtype)).reshape(share, -1)
        if count >= devices:
            got = jax.lax.all_gather(sent, names, tiled=True)[:count]
        else:
            got = _broadcast_first(sent[0], count, devices, names)
        done = transport.from_bits(got, self.dtype).reshape(x.shape)
        return jnp.split(done, np.cumsum([len(s) for s in stacks])[:-1])


def _fill(parts: Sequence[jax.Array], count: int) -> jax.Array:
    """Joins the parts to one stack of ``count`` members, the last ones zero."""
    missing = count - sum(map(len, parts))
    zeros = [jnp.zeros((missing, *parts[0].shape[1:]), parts[0].dtype)]
    parts = [*parts, *(zeros if missing else [])]
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _broadcast_first(
    row: jax.Array, count: int, devices: int, names: Axes
) -> jax.Array:
    """Sends the rows (size,) of the first ``count`` devices to all: (count, size).

    Gathering the rows of all devices would move rows that nobody needs. Each row is
    first spread over the devices, so that every link carries ``count`` rows and one
    more.
    """
    spread = jnp.pad(row, (0, -row.size % devices)).reshape(devices, -1)
    pieces = jax.lax.all_to_all(spread, names, 0, 0, tiled=True)[:count]
    rows = jax.lax.all_gather(pieces, names, axis=1)
    return rows.reshape(count, -1)[:, : row.size]
