"""Which triples a run of K steps uses, and what is refused."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from matrices import normal
from reference import KELLER, relative_error, scalar_newton_schulz

import muon2_optax as m2
from muon2_optax.schedules.plans import resolve

ROWS = ((3.5, -4.0, 1.5), (3.0, -3.5, 1.2), (2.0, -1.5, 0.5))
FIRST = m2.Schedule(ROWS)
LAST = m2.Schedule(ROWS, take="last")
SHORTER = ((3.1, -4.1, 1.1), (2.1, -1.1, 0.1))
WHOLE = m2.Schedule(ROWS, take="whole", shorter=(SHORTER,))


def test_keller_is_the_published_triple():
    schedule = m2.SCHEDULES["keller"]
    assert schedule.triples == (KELLER,)
    # Neither a factor nor an epsilon: the result does not depend on the input's size.
    assert schedule.normalization == m2.Frobenius(factor=1.0, eps=0.0)
    assert resolve("keller", 3).triples == (KELLER,) * 3
    assert resolve("keller", 0).triples == ()


@pytest.mark.parametrize("steps", range(6))
def test_first_repeats_its_last_triple(steps):
    want = (*ROWS, ROWS[-1], ROWS[-1])[:steps]
    plan = resolve(FIRST, steps)
    assert plan.triples == want
    assert plan.static


@pytest.mark.parametrize("steps", range(4))
def test_last_takes_from_the_end(steps):
    assert resolve(LAST, steps).triples == ROWS[3 - steps :]


def test_last_has_no_continuation():
    with pytest.raises(ValueError, match="ns_steps=4.*ends after 3.*at most 3"):
        resolve(LAST, 4)


def test_whole_tables_are_never_cut_or_extended():
    assert WHOLE.rows(3) == ROWS and WHOLE.rows(2) == SHORTER
    assert resolve(WHOLE, 2).triples == SHORTER
    assert WHOLE.rows(0) == ()
    for steps in (1, 4):
        with pytest.raises(ValueError, match=rf"ns_steps={steps}.*\[2, 3\] steps only"):
            WHOLE.rows(steps)


def test_shorter_tables_are_checked():
    with pytest.raises(ValueError, match="take='whole', not 'first'"):
        m2.Schedule(ROWS, shorter=(SHORTER,))
    with pytest.raises(ValueError, match="triple"):
        m2.Schedule(ROWS, take="whole", shorter=(((1.0, 2.0),),))
    assert hash(WHOLE) == hash(m2.Schedule(ROWS, take="whole", shorter=[list(SHORTER)]))


@pytest.mark.parametrize("name", sorted(m2.SCHEDULES))
def test_every_name(name):
    schedule = m2.SCHEDULES[name]
    have = len(schedule.triples)
    assert resolve(name, have).triples == schedule.triples
    assert resolve(name, have).normalization == schedule.normalization
    assert schedule.source
    hash(schedule)


# Fitted ones trade this for alignment: tests/test_fitted_schedule.py has their limits.
MADE_FOR_ONE = sorted(n for n, s in m2.SCHEDULES.items() if s.take != "whole")


@pytest.mark.parametrize("name", MADE_FOR_ONE)
def test_full_run_of_every_schedule_brings_singular_values_near_one(name):
    """A mistyped digit or a wrong order sends some of them elsewhere."""
    schedule = m2.SCHEDULES[name]
    steps = max(len(schedule.triples), 12 if name == "quintic" else 5)
    if schedule.take == "last":
        steps = len(schedule.triples)
    s = np.linspace(0.05, 1.0 / getattr(schedule.normalization, "factor", 1.0), 500)
    mapped = scalar_newton_schulz(s, schedule.rows(steps))
    # Keller's triple swings within [0.68, 1.14]; no schedule is meant to be wider.
    assert 0.65 < mapped.min() and mapped.max() < 1.2


@pytest.mark.parametrize(
    "table", [KELLER, list(KELLER), np.array(KELLER), (KELLER,), jnp.asarray(KELLER)]
)
def test_one_triple_is_repeated(table):
    plan = resolve(table, 4)
    assert len(plan.triples) == 4
    np.testing.assert_allclose(plan.triples, [KELLER] * 4, rtol=1e-6)  # float32 array
    assert plan.normalization == m2.Frobenius()


@pytest.mark.parametrize("table", [ROWS, [list(r) for r in ROWS], np.array(ROWS)])
def test_table(table):
    plan = resolve(table, 3)
    assert plan.triples == ROWS
    assert plan.normalization == m2.Frobenius()


@pytest.mark.parametrize("steps", [0, 2, 4])
def test_table_of_another_length_than_the_steps(steps):
    with pytest.raises(ValueError, match=f"3 rows but ns_steps is {steps}"):
        resolve(ROWS, steps)


@pytest.mark.parametrize("rows", [2, 4, 6])
def test_a_table_sets_the_number_of_steps(rows):
    """Where none is given; Optax takes a table of fewer rows than its default, 5."""
    table = tuple((3.0 - 0.1 * i, -4.1, 2.0) for i in range(rows))
    x = normal((6, 9), dtype=np.float32)
    want = reference.newton_schulz(x, table)
    got = {
        "function": m2.newton_schulz(x, ns_coeffs=table),
        "array": m2.newton_schulz(x, ns_coeffs=np.array(table)),
    }
    for name, tx in {
        "transform": m2.newton_schulz_orthogonalize(ns_coeffs=table),
        "muon": m2.muon(1.0, ns_coeffs=table, shape_scale="none"),
        "teon": m2.teon(1.0, ns_coeffs=table, shape_scale="none"),
    }.items():
        sign = 1 if name == "transform" else -1  # a step goes downhill
        got[name] = sign * tx.update({"w": x}, tx.init({"w": x}))[0]["w"]
    for name, value in got.items():
        # Rounding of float32, 6e-8, times the gain of six steps, 3^6.
        assert relative_error(value, want) < 5e-5, name
    for factory in m2.REGISTRY.values():
        if "ns_coeffs" in inspect.signature(factory).parameters:
            factory(0.1, ns_coeffs=table)
            with pytest.raises(ValueError, match=f"{rows} rows but ns_steps is 9"):
                factory(0.1, ns_coeffs=table, ns_steps=9)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown ns_coeffs 'kellr'.*'keller'"):
        resolve("kellr", 3)
    with pytest.raises(ValueError, match="'standard' is 'keller'.*'dion' is 'you5'"):
        resolve("standard", 3)


def test_a_normalization_belongs_to_a_schedule():
    with pytest.raises(TypeError, match=r"got Schatten\(.*a schedule takes"):
        resolve(m2.Schatten(), 3)
    for given in (m2.Schatten, "schatten", None):
        with pytest.raises(TypeError, match=r"^normalization must be Frobenius\(\)"):
            m2.Schedule(ROWS, normalization=given)


@pytest.mark.parametrize("kind", [m2.Frobenius, m2.AOL, m2.Schatten, m2.Spectral])
def test_numbers_of_normalizations(kind):
    for value in (-1e-7, float("nan"), None, "0"):
        with pytest.raises(ValueError, match=f"eps of {kind.__name__} must be 0 or"):
            kind(eps=value)
    kind(eps=np.float32(1e-7))


@pytest.mark.parametrize(
    "table",
    [
        (1.0, 2.0),
        ((1.0, 2.0),),
        ((1.0, 2.0, 3.0), (1.0, 2.0)),
        3.0,
        [],
        np.zeros((2, 2, 3)),
        np.zeros((3, 4)),
    ],
)
def test_tables_of_another_shape(table):
    with pytest.raises(ValueError, match="triple"):
        resolve(table, 3)


@pytest.mark.parametrize("steps", [2.0, "3", None, True])
def test_steps_must_be_an_integer(steps):
    with pytest.raises(ValueError, match="ns_steps must be an integer"):
        resolve("keller", steps)


@pytest.mark.parametrize("coeffs", ["keller", KELLER, FIRST, LAST])
def test_negative_steps(coeffs):
    with pytest.raises(ValueError, match="0 or more, got -1"):
        resolve(coeffs, -1)


@pytest.mark.parametrize("steps", [3, np.int64(3), jnp.asarray(3)], ids=type)
def test_integers_of_any_kind_are_static(steps):
    assert resolve("keller", steps).triples == (KELLER,) * 3


def test_schedule_is_a_checked_value():
    listed = m2.Schedule([list(map(np.float64, r)) for r in ROWS])
    assert listed == FIRST and hash(listed) == hash(FIRST)
    assert FIRST != LAST
    with pytest.raises(dataclasses.FrozenInstanceError):
        FIRST.take = "last"
    with pytest.raises(ValueError, match="at least one triple"):
        m2.Schedule(())
    with pytest.raises(ValueError, match="triple"):
        m2.Schedule(((1.0, 2.0),))
    with pytest.raises(ValueError, match=r"a single triple is \(\(a, b, c\),\)"):
        m2.Schedule((2.0, -1.5, 0.5))
    with pytest.raises(ValueError, match="'first', 'last' or 'whole', got 'middle'"):
        m2.Schedule(ROWS, take="middle")


@pytest.mark.parametrize("schedule", [FIRST, LAST], ids=["first", "last"])
def test_traced_steps_find_the_same_triples(schedule):
    """Row min(i, L - 1) of the table serves step i, for every K at run time."""

    @jax.jit
    def rows(steps):
        plan = resolve(schedule, steps)
        assert not plan.static
        last = plan.triples.shape[0] - 1
        return jnp.stack([plan.triples[min(i, last)] for i in range(5)])

    for steps in range(4 if schedule is LAST else 6):
        want = np.reshape(schedule.rows(steps), (-1, 3))
        np.testing.assert_allclose(rows(steps)[:steps], want, rtol=1e-6)


def test_traced_steps_choose_a_whole_table():
    """A number of steps without a table of its own, an error elsewhere, gives NaN."""

    @jax.jit
    def plan(steps):
        found = resolve(WHOLE, steps)
        return found.triples, found.steps

    for steps, table in ((2, SHORTER), (3, ROWS)):
        rows, count = plan(steps)
        assert count == steps
        np.testing.assert_allclose(rows[:steps], table, rtol=1e-6)
    for steps in (1, 7):
        rows, count = plan(steps)
        assert count == 1 and np.isnan(rows[0]).all()


def test_optimizers_refuse_bad_coefficients_when_built():
    for build in (m2.muon, m2.muon2, m2.muon2_f):
        with pytest.raises(ValueError, match="unknown ns_coeffs"):
            build(0.1, ns_coeffs="kellr")
        with pytest.raises(ValueError, match="2 rows but ns_steps is 3"):
            build(0.1, ns_coeffs=ROWS[:2], ns_steps=3)


@pytest.mark.parametrize("steps, least", [(5, 0.0016), (3, 0.019)])
def test_where_kellers_coefficients_end(steps, least):
    """The interval on the pages about numerics and migration, from float64."""
    s = np.geomspace(least, 1.0, 200_001)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    assert 0.68 < s.min() < 0.69 and 1.202 < s.max() < 1.203
