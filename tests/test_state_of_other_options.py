"""A state that was made with other options is refused where these give other shapes.

Arithmetic would broadcast some of these states, and a state of another rank would train
on with it. The shapes here are written down, not computed.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from helpers import sample

import muon2_optax as m2

SHAPES = {"w": (3, 8, 12), "gain": (12,)}


def under(in_axis, out_axis, *splits):
    """The argument ``rules`` with these axes for the stack of layers."""
    axes = m2.MatrixAxes(in_axis, out_axis, splits)
    return {"rules": m2.MatrixRules((("w", axes),))}


LAYERS, SPLIT, THIRDS = under(-2, -1), under(-2, -1, 8, 4), under(-2, -1, 4, 4, 4)
ONE, TURNED, CROSS = under((0, 1), 2), under(-1, -2), under(0, -1)


def fraction(value):
    return LAYERS | {"rank_fraction": value}


def longest(value):
    return LAYERS | {"max_precond_dim": value}


FACTOR = ("right factor", "rank_fraction")
GRAM_IN, GRAM_OUT = (("gram_in", "max_precond_dim"), ("gram_out", "max_precond_dim"))
ROW, COL, AVERAGE, RADIUS = (
    (what, "rules") for what in ("nu_row", "nu_col", "average", "radius")
)
CASES = [
    # The optimizer, its options before and after, the first statistic that differs and
    # the option to look at, and the statistic's shapes.
    ("dion", fraction(0.5), fraction(None), FACTOR, (3, 8, 4), (3, 8, 8)),
    ("dion", fraction(None), fraction(0.25), FACTOR, (3, 8, 8), (3, 8, 2)),
    ("dion", fraction(0.01), fraction(0.2), FACTOR, (3, 8, 1), (3, 8, 2)),
    ("dion", LAYERS, ONE, FACTOR, (3, 8, 8), (12, 12)),
    ("dion", LAYERS, CROSS, FACTOR, (3, 8, 8), (8, 3, 3)),
    ("soap_muon", longest(None), longest(11), GRAM_OUT, (3, 12, 12), (3, 1, 1)),
    ("soap_muon", longest(11), longest(12), GRAM_OUT, (3, 1, 1), (3, 12, 12)),
    ("soap_muon", longest(1), longest(8), GRAM_IN, (3, 1, 1), (3, 8, 8)),
    ("soap_muon", LAYERS, ONE, GRAM_IN, (3, 8, 8), (24, 24)),
    ("soap_muon", LAYERS, TURNED, GRAM_IN, (3, 8, 8), (3, 12, 12)),
    ("muon2_f", ONE, LAYERS, COL, (12,), (3, 12)),
    ("muon2_f", LAYERS, ONE, COL, (3, 12), (12,)),
    ("muon2_f", LAYERS, TURNED, ROW, (3, 8), (3, 12)),
    ("muon2_f", LAYERS, SPLIT, ROW, (3, 8), (3, 8, 2)),
    ("muon2_f", THIRDS, SPLIT, ROW, (3, 8, 3), (3, 8, 2)),
    ("muon2_f_h", ONE, LAYERS, COL, (12,), (3, 12)),
    ("normuon", ONE, LAYERS, AVERAGE, (12,), (3, 12)),
    ("normuon", LAYERS, CROSS, AVERAGE, (3, 12), (8, 12)),
    ("muon_h", ONE, LAYERS, RADIUS, (), (3,)),
    ("muon_h", LAYERS, THIRDS, RADIUS, (3,), (3, 3)),
    ("muon2_h", SPLIT, LAYERS, RADIUS, (3, 2), (3,)),
    ("muon2_h", LAYERS, CROSS, RADIUS, (3,), (8,)),
]


def step(name, before, after):
    """Traces a step of an optimizer from the state that it made with other options."""
    params, make = sample(0, SHAPES), m2.REGISTRY[name]
    state = jax.eval_shape(make(0.1, **before).init, params)
    return jax.eval_shape(make(0.2, **after).update, params, state, params)


@pytest.mark.parametrize("name, before, after, named, have, need", CASES)
def test_states_of_other_options(name, before, after, named, have, need):
    what, option = named
    text = f"the {what} of 'w' has shape {have} in this state, and must have {need}:"
    with pytest.raises(ValueError, match=re.escape(text)) as error:
        step(name, before, after)
    causes, advice = str(error.value).removeprefix(text).split(". ")
    assert option in causes and "rules" in causes
    assert "init(params)" in advice


@pytest.mark.parametrize("name, options", sorted({c[0]: c[2] for c in CASES}.items()))
def test_states_of_the_same_options(name, options):
    step(name, options, options)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("dion", fraction(0.9), fraction(1)),  # the same rank
        ("dion", LAYERS | {"seed": 3}, LAYERS),
        ("soap_muon", longest(12), longest(500)),
        ("soap_muon", LAYERS, LAYERS | {"precondition_frequency": 3}),
        ("normuon", LAYERS, SPLIT),
        ("muon_h", LAYERS, LAYERS | {"radius": 4.0}),
        ("muon_bp", LAYERS, LAYERS | {"period": 3, "block_grid": (2, 2)}),
        ("teon", LAYERS, LAYERS | {"group_size": 1}),
    ],
)
def test_options_that_change_no_shape_may_change(name, before, after):
    step(name, before, after)


def test_a_step_on_arrays_refuses_them_too():
    """Outside of ``jax.jit``, and of a transform alone."""
    params = {"net": {"w": jnp.ones((6, 4))}}
    state = m2.scale_by_low_rank_orthonormal(rank_fraction=0.5).init(params)
    with pytest.raises(ValueError, match=r"'net/w' has shape \(4, 2\).*\(4, 4\)"):
        m2.scale_by_low_rank_orthonormal().update(params, state)


def test_rules_that_send_other_leaves_to_the_method():
    """The paths differ then, and the error says that rules may be the reason."""
    with pytest.raises(ValueError, match="'w' of the state.* rules that send other"):
        step("muon", LAYERS, {"rules": m2.MatrixRules((("w", None),))})
