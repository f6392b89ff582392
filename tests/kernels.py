"""The symmetric kernels where there is no Hopper GPU: their marks, their arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from matrices import normal

from muon2_optax.kernels import symmetric
from muon2_optax.schedules import plans

PLAN = plans.resolve("keller", 3)

needs_kernel = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the kernel needs jax 0.11"
)


def stack(shape, seed=0, dtype=np.float16):
    return normal(shape, seed, dtype)


def orthogonal(n, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))[0]


def equations(jaxpr):
    """All of them, inside all calls too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in eqn.params.values():
            if hasattr(inner, "jaxpr"):
                yield from equations(inner.jaxpr)


def joints(fn, *args):
    """How many operands every concatenation has, in order."""
    found = equations(jax.make_jaxpr(fn)(*args).jaxpr)
    return [len(e.invars) for e in found if e.primitive.name == "concatenate"]


def _whole(x, columns):
    """Matrices (L, m, n) of panels (L * panels, m, k)."""
    if columns is None:
        return x
    each = -(-columns // x.shape[-1])
    x = x[: len(x) // each * each].reshape(-1, each, *x.shape[1:])
    return jnp.swapaxes(x, 1, 2).reshape(len(x), x.shape[2], -1)


def _computed(out, members):
    """What is behind the members that are asked for must not be used."""
    return out if members is None else out.at[members:].set(jnp.nan)


def _product(
    a, b, *addends, alpha=1.0, members=None, columns=None, results=None, tiles=None,
    interpret=None,
):  # fmt: skip
    """The kernel's arithmetic: 16-bit operands, float32 inside, one rounding."""
    wide = [_whole(v, columns).astype(jnp.float32) for v in (a, b)]
    out = alpha * jnp.matmul(wide[0], wide[1].mT, precision="highest")
    out = jnp.pad(out, [(0, (results or len(a)) - len(out)), (0, 0), (0, 0)])
    out = out + sum(beta * c.astype(jnp.float32) for beta, c in addends)
    return _computed(out.astype(a.dtype), members)


def _add_product(
    p, x, *, shards=None, members=None, columns=None, tiles=None, interpret=None
):
    whole = _whole(x, columns).astype(jnp.float32)
    p = p[: len(whole)].astype(jnp.float32)
    out = whole + jnp.matmul(p, whole, precision="highest")
    out = _computed(out.astype(x.dtype), members)
    if shards is not None:
        return reference.in_pieces(out, *shards)
    out = out.reshape(*out.shape[:2], -1, x.shape[-1])
    out = jnp.swapaxes(out, 1, 2).reshape(-1, *x.shape[1:])
    behind = [(0, len(x) - len(out)), (0, 0), (0, 0)]
    return jnp.pad(out, behind, constant_values=jnp.nan)


# The fixture's name differs from the function's, which modules import, so that the
# tests' arguments do not shadow imports.
@pytest.fixture(name="emulated")
def emulated_products(monkeypatch):
    def empty(shape, dtype):
        return jnp.full(shape, jnp.nan, dtype)

    # What is not written must not be used.
    monkeypatch.setattr(jax.lax, "empty", empty)
    monkeypatch.setattr(symmetric, "product", _product)
    monkeypatch.setattr(symmetric, "add_product", _add_product)
