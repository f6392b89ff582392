"""Trees on meshes of the eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import muon2_optax as m2

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
STACKS = m2.MatrixRules((("stack", m2.MatrixAxes(-2, -1)),))


def mesh_of(shape, names, kind):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def place(tree, mesh, specs):
    return jax.device_put(tree, jax.tree.map(lambda p: NamedSharding(mesh, p), specs))


def draw(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {
        k: jnp.asarray(rng.standard_normal(s), jnp.float32) for k, s in shapes.items()
    }


def known(sharded, kind):
    """Explicit types need no argument, Auto ones the object that reads them."""
    return None if kind == EXPLICIT else m2.Shardings.of(sharded)
