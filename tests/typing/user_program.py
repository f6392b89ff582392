"""A user's program: every line must run, and pass mypy and pyright in strict mode.

It is checked against the package as installed, where ``py.typed`` decides whether a
checker reads its annotations at all (``tests/test_typing.py``, ``.ci/run``).
"""

import jax
import jax.numpy as jnp
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
