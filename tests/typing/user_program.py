"""A user's program: every line must run, and pass mypy, pyright and pyrefly.

It is checked against the package as installed, where ``py.typed`` decides whether a
checker reads its annotations at all (``tests/test_typing.py``, ``.ci/run``).
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # Optax 0.2.8 has no py.typed

import muon2_optax as m2


def rules_of_a_user() -> m2.MatrixRules:
    return m2.MatrixRules(
        (
            (r"bias|norm", None),
            (r"conv/kernel", m2.MatrixAxes((0, 1, 2), 3)),
            (r"kernel", m2.MatrixAxes(-2, -1)),
        ),
        strict=True,
    )


def optimizers() -> list[optax.GradientTransformationExtraArgs]:
    schedule: optax.Schedule = optax.linear_schedule(0.02, 0.0, 100)
    return [
        m2.muon(0.02),
        m2.muon2(0.02, adam_learning_rate=3e-3, weight_decay=0.01),
        m2.muon2(learning_rate=schedule, adam_learning_rate=schedule),
        m2.muon2_f(schedule, mu_dtype=jnp.bfloat16, ns_coeffs="polar_express"),
        m2.REGISTRY["normuon"](0.02),
    ]


def numbers_of_all_kinds(rate: jax.Array) -> list[optax.GradientTransformation]:
    """Floats, whole numbers, NumPy's, arrays and schedules; names, lists and tables."""
    decay: optax.Schedule = optax.linear_schedule(0.1, 0.0, 100)
    return [
        m2.muon(1, b1=np.float32(0.9), weight_decay=decay, adaptive=True),
        m2.muon(rate, b1=jnp.asarray(0.9), adam_b2=np.asarray(0.99), adam_eps=0),
        m2.muon2(rate, 0.9, rate, eps=jnp.float32(1e-9), adam_weight_decay=decay),
        m2.muon2(0.02, ns_steps=2, ns_coeffs=[(3.0, -3.5, 1.2), (2.0, -1.5, 0.5)]),
        m2.muon2(0.02, ns_coeffs=(2.0, -1.5, 0.5), ns_dtype="float32"),
        m2.muon2(0.02, ns_coeffs=np.asarray([2.0, -1.5, 0.5]), nu_dtype=jnp.float32),
        m2.muon2(0.02, ns_coeffs=m2.Schedule(((2.0, -1.5, 0.5),))),
        m2.muon2_f(0.02, shape_scale=m2.MatchRMS(0.3), mu_dtype=np.dtype("float32")),
        m2.muon2_f(0.02, shape_scale="match_rms", rest=optax.nadamw(1e-3)),
        m2.muon_bp(0.02, period=3, block_grid=[2, 2], shape_scale=own_scale),
        m2.muon_h(0.02, radius="init", dampening=0.0),
        m2.muon2_h(0.02, radius=2.0),
        m2.muon_eq(0.02, form="sweeps"),
        m2.adamuon(0.02, rms=rate),
        m2.dion(0.02, rank_fraction=0.5),
    ]


def own_scale(fan_in: int, fan_out: int) -> float:
    return fan_out / fan_in


def rules_from_lists() -> m2.MatrixRules:
    return m2.MatrixRules([("kernel", m2.MatrixAxes([0], [1])), ("bias", None)])


def by_hand(rules: m2.MatrixRules) -> optax.GradientTransformation:
    return optax.chain(
        m2.scale_by_second_moment(b1=0.95, b2=0.95),
        m2.newton_schulz_orthogonalize(ns_steps=3, rules=rules),
        m2.scale_by_shape("spectral", rules=rules),
        optax.scale_by_learning_rate(0.02),
    )


def orthogonal(x: jax.Array) -> jax.Array:
    return m2.newton_schulz(x, 5)


def main() -> None:
    params = {"kernel": jnp.ones((16, 8)), "bias": jnp.zeros(8)}
    rules = m2.MatrixRules()
    table: str = rules.describe(params)
    assert "kernel" in table
    assert len(numbers_of_all_kinds(jnp.asarray(0.1))) == 15
    assert rules_from_lists().resolve("kernel", (4, 6)) is not None
    for tx in optimizers():
        state = tx.init(params)
        updates, state = tx.update(params, state, params)
        new = optax.apply_updates(params, updates)
        assert len(jax.tree.leaves(new)) == len(params)
    only_kernel = {"kernel": params["kernel"]}
    tx = by_hand(rules)
    tx.update(only_kernel, tx.init(only_kernel), only_kernel)
    assert orthogonal(params["kernel"]).shape == (16, 8)
    assert rules_of_a_user().strict
    print("muon2_optax", m2.__version__)


main()
