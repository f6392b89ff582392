"""What Optax expects of its Muon, expected of ours: all cases of its ``_muon_test``.

Written anew from google-deepmind/optax, ``optax/contrib/_muon_test.py`` of 0.2.8 (its
head has the same cases). ``CASES`` lists them under the names of Optax's tests;
``ours`` is the table from the arguments of ``optax.contrib.muon`` to those of
``muon2_optax.muon``. Where Optax states a property, so does the test here, and the
updates of several steps are those of Optax.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import F32
from reference import relative_error

import muon2_optax as m2

SPEC = optax.contrib.MuonDimensionNumbers
EPS = 1e-8
COEFFS = {"standard": "keller", "dion": "you5"}
NORMALIZATIONS = {
    "frobenius": m2.Frobenius(eps=EPS),
    "aol": m2.AOL(eps=EPS),
    "schatten": m2.Schatten(eps=EPS),
    "spectral": m2.Spectral(eps=EPS),
}
THREE = ("frobenius", "aol", "schatten")

CASES = {
    "test_reshape_inverse": [
        ((2, 3), SPEC(0, 1), (1, 2, 3)),
        ((2, 3, 4), SPEC(0, 2), (3, 2, 4)),
        ((2, 3, 4), SPEC(-3, -1), (3, 2, 4)),
        ((2, 3, 4, 5), SPEC(2, 3), (6, 4, 5)),
        ((2, 3, 4, 5), SPEC(2, (0, 3)), (3, 4, 10)),
    ],
    "test_callable_weight_dim_nums": THREE,
    "test_reshape_update_for_square_parameter_matches_muon_without_dim_nums": THREE,
    "test_reshape_and_update_single_param": THREE,
    "test_dim_nums_combinations": THREE,
    "test_newton_schulz": [()],
    "test_complex_mixed_target": [
        (adaptive, nesterov) for adaptive in (True, False) for nesterov in (True, False)
    ],
    "test_muon_orthogonalization_modes": [
        (how, shape)
        for how in ("frobenius", "aol")
        for shape in ((100, 100), (100, 50), (50, 100))
    ],
    "test_aol_numerical_difference": [()],
    "test_orthogonality": THREE,
}


def cases(name):
    return pytest.mark.parametrize("case", CASES[name], ids=str)


def test_the_table_is_whole():
    assert sum(map(len, CASES.values())) == 32


def ours(
    learning_rate,
    *,
    ns_coeffs="standard",
    beta=0.95,
    weight_decay=0.0,
    nesterov=True,
    adaptive=False,
    preconditioning="frobenius",
    adam_b1=0.9,
    adam_b2=0.999,
    adam_eps_root=0.0,
    adam_weight_decay=0.0,
    adam_learning_rate=None,
    muon_weight_dimension_numbers=None,
    consistent_rms=None,
    params=None,
):
    """Our ``muon`` from the arguments of Optax's; ``params`` where numbers need them.

    AOL scales one side of a square matrix, ours the outputs, Optax's the inputs: there
    the dimension numbers have to be given the other way round.
    """
    adam = optax.adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps=EPS,
        eps_root=adam_eps_root,
        weight_decay=adam_weight_decay,
        nesterov=nesterov,
    )
    rules = m2.MatrixRules(by_name=False)
    if muon_weight_dimension_numbers is not None:
        rules = m2.MatrixRules.from_dimension_numbers(
            muon_weight_dimension_numbers, params=params
        )
    return m2.muon(
        learning_rate,
        b1=beta,
        weight_decay=weight_decay,
        ns_coeffs=dataclasses.replace(
            m2.SCHEDULES[COEFFS[ns_coeffs]],
            normalization=NORMALIZATIONS[preconditioning],
        ),
        ns_dtype="float32",
        nesterov=nesterov,
        bias_correction=True,
        adaptive=adaptive,
        shape_scale="keller" if consistent_rms is None else m2.MatchRMS(consistent_rms),
        rules=rules,
        rest=adam,
    )


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def updates_of(tx, params, steps=3):
    """Updates and state after gradients that turn from step to step."""
    state, update = tx.init(params), jax.jit(tx.update)
    for i in range(steps):
        grads = jax.tree.map(lambda p, i=i: p + 0.3 * i * jnp.cos(7 * p.real), params)
        updates, state = update(grads, state, params)
    return updates, state


def assert_as_optax(params, turned=None, tolerance=F32, **arguments):
    """Our updates are Optax's; ``turned``: our numbers where they are not Optax's."""
    want, _ = updates_of(optax.contrib.muon(1e-3, **arguments), params)
    key = "muon_weight_dimension_numbers"
    if turned is not None:
        arguments[key] = turned
    got, state = updates_of(ours(1e-3, params=params, **arguments), params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(a, b) < tolerance
    return got, state


def matrices(state):
    """Whether each leaf has a momentum among the matrices', in order of the tree."""
    mu = state.inner_states["matrix"].inner_state[0].mu
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    return [not is_masked(x) for x in jax.tree.leaves(mu, is_leaf=is_masked)]


@cases("test_reshape_inverse")
def test_reshape_inverse(case):
    shape, numbers, flat = case
    x = jnp.arange(np.prod(shape)).reshape(shape)
    axes = m2.MatrixRules.from_dimension_numbers(numbers).resolve("w", shape)
    (block,) = axes.to_blocks(x)
    assert block.reshape(-1, *block.shape[-2:]).shape == flat
    np.testing.assert_array_equal(axes.from_blocks([block]), x)


@cases("test_callable_weight_dim_nums")
def test_numbers_from_a_function(case):
    params = {"w1": normal(1, 10, 10), "w2": normal(2, 2, 10)}
    square = SPEC(1, 0) if case == "aol" else SPEC()

    def every_one(params):
        return jax.tree.map(lambda x: SPEC(0, 1) if x.ndim == 2 else None, params)

    def some(params):
        return {"w1": SPEC(), "w2": None}

    for numbers, second in ((every_one, SPEC()), (some, None)):
        _, state = assert_as_optax(
            params,
            preconditioning=case,
            muon_weight_dimension_numbers=numbers,
            turned=lambda _, second=second: {"w1": square, "w2": second},
        )
        assert matrices(state) == [True, second is not None]


@cases("test_reshape_update_for_square_parameter_matches_muon_without_dim_nums")
def test_numbers_of_a_square(case):
    params = {"w": normal(3, 10, 10)}
    numbers = {"w": SPEC(0, 1)}
    plain = updates_of(ours(1e-3, preconditioning=case), params)[0]
    tx = ours(1e-3, preconditioning=case, muon_weight_dimension_numbers=numbers)
    np.testing.assert_array_equal(updates_of(tx, params)[0]["w"], plain["w"])
    turned = {"w": SPEC(1, 0)} if case == "aol" else None
    assert_as_optax(
        params,
        turned,
        preconditioning=case,
        muon_weight_dimension_numbers=numbers,
    )


@cases("test_reshape_and_update_single_param")
def test_one_matrix_in_other_shapes(case):
    w = normal(4, 10, 12)
    plain, _ = assert_as_optax({"w": w}, preconditioning=case)

    def four(x):
        return x.reshape(10, 3, 1, 4).transpose(3, 2, 0, 1)

    def split_inputs(x):
        return x.reshape(2, 1, 5, 12).transpose(2, 3, 1, 0)

    for stored, numbers in (
        (lambda x: x, SPEC(0, 1)),
        (four, SPEC((2,), (0, 3))),
        (split_inputs, SPEC((0, 3), (1,))),
    ):
        dims = {"w": numbers}
        # The order in which axes are flattened permutes rows or columns; a product
        # adds them in another order then.
        got, _ = assert_as_optax(
            {"w": stored(w)}, preconditioning=case, muon_weight_dimension_numbers=dims
        )
        assert relative_error(got["w"], stored(plain["w"])) < F32


@cases("test_dim_nums_combinations")
def test_which_leaves_are_matrices(case):
    numbers, default = SPEC((1,), (2,)), SPEC()
    flat = {"w1": normal(5, 1, 2, 3), "w2": normal(6, 2, 3, 4)}
    nested = {k: {"a": normal(7, 2, 3), "b": normal(8, 2, 3)} for k in ("w1", "w2")}
    for params, dims, want in (
        (flat, {"w1": numbers, "w2": numbers}, [True, True]),
        (flat, {"w1": None, "w2": numbers}, [False, True]),
        (
            nested,
            {"w1": None, "w2": {"a": default, "b": None}},
            [False, False, True, False],
        ),
        (nested, {"w1": default, "w2": None}, [True, True, False, False]),
    ):
        tx = ours(1e-3, preconditioning=case, muon_weight_dimension_numbers=dims)
        assert matrices(jax.eval_shape(tx.init, params)) == want
        if params is flat:
            assert_as_optax(
                params, preconditioning=case, muon_weight_dimension_numbers=dims
            )
    # Without numbers: what Optax sends to Adam without a word has a warning here.
    params = {"w1": flat["w1"], "w2": normal(9, 3, 4)}
    with pytest.warns(UserWarning, match="w1"):
        state = jax.eval_shape(ours(1e-3, preconditioning=case).init, params)
    assert matrices(state) == [False, True]


@cases("test_newton_schulz")
def test_orthonormal_in_the_end(case):
    row = (2.0, -1.5, 0.5)
    for dtype, steps in ((jnp.float32, 20), (jnp.complex64, 10)):
        x = normal(0, 4, 3, dtype=dtype)
        got = m2.newton_schulz(x, steps, row)
        assert got.shape == x.shape
        np.testing.assert_allclose(got.conj().T @ got, np.eye(3), atol=1e-5)


@cases("test_complex_mixed_target")
def test_complex_target(case):
    adaptive, nesterov = case
    target = jnp.array([[1.0 + 2.0j, 0.0], [-1.0 + 1.0j, 1.0 - 3.0j]], jnp.complex64)
    arguments = {"adaptive": adaptive, "nesterov": nesterov}
    # The dual norm is a factor taken from the same iteration: both round.
    assert_as_optax({"w": target}, tolerance=2 * F32, **arguments)
    tx = ours(1e-2, **arguments)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(2 * (params - target), state, params)
        return (optax.apply_updates(params, updates), state), None

    start = jnp.zeros_like(target)
    run = jax.jit(functools.partial(jax.lax.scan, step, length=1000))
    (params, _), _ = run((start, tx.init(start)))
    np.testing.assert_allclose(params, target, atol=3e-2)


@cases("test_muon_orthogonalization_modes")
def test_singular_values(case):
    how, shape = case
    params = {"w": normal(42, *shape)}
    turned = {"w": SPEC(1, 0)} if how == "aol" and shape == (100, 100) else None
    numbers = {"w": SPEC(0, 1)}
    got, _ = assert_as_optax(
        params,
        turned,
        preconditioning=how,
        muon_weight_dimension_numbers=numbers,
    )
    assert got["w"].shape == shape
    if shape == (100, 100):
        # Of one step, in which the gradient is the matrix itself.
        tx = ours(1.0, preconditioning=how, muon_weight_dimension_numbers=turned)
        values = np.linalg.svd(updates_of(tx, params, 1)[0]["w"], compute_uv=False)
        assert 0.1 < values.min() and values.max() < 2


@cases("test_aol_numerical_difference")
def test_normalizations_differ(case):
    params = {"w": 2 * jnp.eye(8)}
    standard = updates_of(ours(0.1), params, 1)[0]["w"]
    others = [
        assert_as_optax(params, preconditioning=how, ns_coeffs="dion")[0]["w"] / 1e-3
        for how in ("aol", "schatten")
    ]
    assert np.all(np.isfinite(standard)) and np.all(np.isfinite(others))
    assert not np.allclose(standard / 0.1, others[0])
    assert not np.allclose(*others)


@cases("test_orthogonality")
def test_orthogonal_updates(case):
    params = {"w": 2 * jnp.eye(8)}
    update = np.asarray(updates_of(ours(0.1, preconditioning=case), params, 1)[0]["w"])
    gram = update.T @ update
    assert np.linalg.norm(gram / gram.max() - np.eye(8)) < 1e-3


@pytest.mark.parametrize(
    "arguments",
    [
        {"preconditioning": "spectral"},
        {"consistent_rms": 0.37, "weight_decay": 0.1, "beta": 0.8},
        {
            "adam_eps_root": 1e-3,
            "adam_learning_rate": 0.02,
            "adam_weight_decay": 0.3,
            "nesterov": False,
        },
    ],
    ids=["spectral", "rms", "adam"],
)
def test_what_its_tests_leave_out(arguments):
    params = {"w": normal(11, 6, 9), "bias": normal(12, 9)}
    assert_as_optax(params, **arguments)
