"""New eigenbases for all matrices, when they are due: equal sides run together."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muon2_optax import eigenbases
from muon2_optax.arrays import limits, stacks
from muon2_optax.arrays.grouping import even_size, run_in_groups


class Rotated(NamedTuple):
    """A second moment in eigenbases, and what these come from, as stacks.

    A side that keeps its own axes has grams and bases of (count, 1, 1), which stay.
    """

    nu: jax.Array
    gram_in: jax.Array
    gram_out: jax.Array
    basis_in: jax.Array
    basis_out: jax.Array


def refresh(
    rotated: Sequence[Rotated], count: jax.Array, frequency: int
) -> list[Rotated]:
    """All of them with new bases, if ``count`` is a multiple of ``frequency``.

    Bases are constants to derivatives: eigenvectors have none where eigenvalues meet.
    """
    constant = jax.lax.stop_gradient([x[1:] for x in rotated])
    old = [Rotated(x.nu, *rest) for x, rest in zip(rotated, constant)]

    def renew(old: list[Rotated]) -> list[Any]:
        return _if(count == frequency, _first_bases, _next_bases, old)

    def keep(old: list[Rotated]) -> list[Any]:
        return [(x.nu, x.basis_in, x.basis_out) for x in old]

    # Grams stay outside: what passes through a cond is copied.
    new = _if(count % frequency == 0, renew, keep, old)
    return [
        x._replace(nu=nu, basis_in=basis_in, basis_out=basis_out)
        for x, (nu, basis_in, basis_out) in zip(rotated, new)
    ]


def _if(choice: Any, then: Any, otherwise: Any, operand: Any) -> Any:
    if isinstance(choice, jax.core.Tracer):
        return jax.lax.cond(choice, then, otherwise, operand)
    # Outside of jax.jit, where a cond would be compiled in every step.
    return (then if choice else otherwise)(operand)


def _first_bases(old: Sequence[Rotated]) -> list[Any]:
    """The eigenvectors, and an estimate of the second moment in the new bases.

    So far it was an average of the squares of the entries themselves. In the new bases
    its row and column sums are known up to a factor: they are the eigenvalues. So each
    entry is estimated as the total times the shares of its row and of its column.
    """
    grams = [(gram,) for x in old for gram in (x.gram_in, x.gram_out)]
    found = _by_side(eigenbases.first_basis, grams)
    new = []
    for x, of_in, of_out in zip(old, found[::2], found[1::2]):
        if of_in is None and of_out is None:
            new.append((x.nu, x.basis_in, x.basis_out))
            continue
        total = jnp.sum(x.nu, axis=(-2, -1), keepdims=True)
        shares = x.nu / jnp.where(total == 0, 1, total)
        basis_in, share_in = of_in or (x.basis_in, jnp.sum(shares, axis=-1))
        basis_out, share_out = of_out or (x.basis_out, jnp.sum(shares, axis=-2))
        nu = total * share_in[..., :, None] * share_out[..., None, :]
        new.append((nu, basis_in, basis_out))
    return new


def _next_bases(old: Sequence[Rotated]) -> list[Any]:
    """One step of orthogonal iteration, and the second moment in the new order."""
    pairs = [
        pair
        for x in old
        for pair in ((x.gram_in, x.basis_in), (x.gram_out, x.basis_out))
    ]
    found = _by_side(eigenbases.next_basis, pairs)
    new = []
    for x, of_in, of_out in zip(old, found[::2], found[1::2]):
        nu, basis_in, basis_out = x.nu, x.basis_in, x.basis_out
        if of_in is not None:
            basis_in, order = of_in
            nu = jnp.take_along_axis(nu, order[..., :, None], axis=-2)
        if of_out is not None:
            basis_out, order = of_out
            nu = jnp.take_along_axis(nu, order[..., None, :], axis=-1)
        new.append((nu, basis_in, basis_out))
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
        # What runs at once bounds the memory, as in Newton-Schulz.
        largest = max(row[0].size * row[0].dtype.itemsize for row in some)
        most = max(1, int(limits.BYTES_ON_DEVICE / max(1, largest)))
        size = even_size(len(some), most)
        few = [some[i : i + size] for i in range(0, len(some), size)]
        return [new for part in few for new in stacks.run_concatenated(fn, part)]

    return run_in_groups(rows, key, run)
