"""Matrices in stacks of square panels: where they stand, and the programs for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import emulated_products, equations, joints, stack  # noqa: F401

from muon2_optax.arrays import limits
from muon2_optax.kernels import packing

HALF = jnp.dtype(jnp.float16)
# Squares, wide and tall ones, alone and as arrays of several.
SHAPES = {
    "squares": [(1, 64, 64)] * 3 + [(2, 64, 64)],
    "wide": [(1, 64, 160)] * 9 + [(3, 64, 160)],
    "tall": [(1, 160, 64), (2, 160, 64), (1, 160, 64)],
    "mixed": [(2, 160, 64), (1, 160, 64), (1, 64, 160), (2, 64, 160)],
    "whole panels": [(1, 64, 128), (2, 128, 64)],
}


def _members(kind):
    # Of few bits: float16 holds their multiples by powers of two.
    return [np.round(stack(s, i, np.float32), 1) for i, s in enumerate(SHAPES[kind])]


def _each(members):
    """Panels of a matrix."""
    return -(-max(members[0].shape[1:]) // 64)


@pytest.mark.parametrize("behind", [0, 2])
@pytest.mark.parametrize("kind", SHAPES)
def test_matrices_stand_in_panels_one_after_the_other(kind, behind, emulated):
    members = _members(kind)
    each, count = _each(members), sum(map(len, members))
    factors = 2.0 ** (np.arange(count, dtype=np.float32) % 3)
    got = packing.write_panels(
        [jnp.asarray(y) for y in members],
        jnp.asarray(factors),
        kind == "wide",
        count * each + behind,
        HALF,
    )
    assert got.shape == (count * each + behind, 64, 64) and got.dtype == HALF
    matrices = [y if y.shape[0] == 64 else y.T for x in members for y in x]
    for i, (y, factor) in enumerate(zip(matrices, factors)):
        padded = np.pad(y, [(0, 0), (0, each * 64 - y.shape[1])])
        want = (padded * factor**2 * (-1 if kind == "wide" else 1)).astype(np.float16)
        panels = got[i * each : (i + 1) * each]
        np.testing.assert_array_equal(np.concatenate(list(panels), 1), want)


@pytest.mark.parametrize("kind", SHAPES)
def test_what_is_read_is_what_was_written(kind, emulated):
    members = _members(kind)
    each, count = _each(members), sum(map(len, members))
    arrays = [jnp.asarray(y) for y in members]
    panels = packing.write_panels(
        arrays, jnp.ones(count), False, count * each + 1, HALF
    )
    for y, got in zip(members, packing.read_panels(panels, arrays)):
        np.testing.assert_array_equal(got, y.astype(np.float16))


@pytest.mark.parametrize("kind", ["wide", "tall"])
def test_what_is_done_to_a_group_is_lowered_once(kind, emulated):
    members = [jnp.ones(SHAPES[kind][0])] * 20
    panels = jnp.ones((20 * _each(members), 64, 64), HALF)
    lowered = jax.jit(packing.read_panels).lower(panels, members).as_text()
    assert lowered.count("stablehlo.transpose") == (2 if kind == "tall" else 1)

    def write(factors, members):
        return packing.write_panels(members, factors, False, len(panels) + 1, HALF)

    lowered = jax.jit(write).lower(jnp.ones(20), members).as_text()
    # Two groups of ten wide ones; tall ones are turned together.
    assert lowered.count("stablehlo.transpose") == 1


def test_a_factor_whose_square_is_out_of_range(emulated):
    y = jnp.full((1, 64, 64), 1e-37, jnp.float32)
    got = packing.write_panels([y], jnp.asarray([2e19], jnp.float32), False, 1, HALF)
    np.testing.assert_allclose(np.asarray(got, np.float64), 40, rtol=1e-3)


@pytest.mark.parametrize("kind", ["squares", "wide", "tall"])
def test_groups_that_are_alike_are_one_program(kind, emulated):
    """An offset that XLA knew would make it compile a program for each."""
    members = [jnp.ones(SHAPES[kind][0])] * 17
    each = _each(members)

    def run(*members):
        panels = packing.write_panels(members, jnp.ones(17), False, 17 * each + 1, HALF)
        return packing.read_panels(panels, members)

    slices = [
        eqn
        for eqn in equations(jax.make_jaxpr(run)(*members).jaxpr)
        if eqn.primitive.name in ("dynamic_slice", "dynamic_update_slice")
    ]
    first = {"dynamic_slice": 1, "dynamic_update_slice": 2}
    # Tall ones are written at once and read one by one, others ten at a time; each
    # program that writes takes its factors, too.
    assert len(slices) == (2 + 17 if kind == "tall" else 2 * (2 + 1))
    for eqn in slices:
        start = eqn.invars[first[eqn.primitive.name]]
        assert not hasattr(start, "val")  # as literals have


@pytest.mark.parametrize("most, sizes", [(1e9, [10, 7]), (5, [5, 5, 5, 2]), (0.1, [])])
def test_a_group_is_small(most, sizes, emulated, monkeypatch):
    """XLA takes long for large programs, and from eleven arrays on writes slowly."""
    monkeypatch.setattr(limits, "ENTRIES_IN_PANEL_WRITE", int(most * 64 * 160))
    members = [jnp.ones((1, 64, 160))] * 17
    found = joints(
        lambda *ys: packing.write_panels(ys, jnp.ones(17), False, 64, HALF), *members
    )
    assert [k for k in found if k > 1] == sizes
