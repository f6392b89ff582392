"""Names to transforms, schedules, and the routing of the trainer's own model."""

import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest

import muon2_optax as m2
from examples import optim
from examples.config import COMPARED, RECOMMENDED, ModelConfig, OptimConfig
from examples.models import make_model, matrix_rules
from examples.options import UserError


def test_schedule_values() -> None:
    config = OptimConfig(warmup_steps=10, final_lr_fraction=0.2)
    rate = optim.schedule(0.1, 101, config)
    values = np.asarray([rate(step) for step in range(101)])
    np.testing.assert_allclose(values[0], 0.1 / 11, rtol=1e-5)
    np.testing.assert_allclose(np.diff(values[:11]), 0.1 / 11 * np.ones(10), rtol=1e-3)
    np.testing.assert_allclose(values[10], 0.1, rtol=1e-6)
    np.testing.assert_allclose(values[55], 0.1 * (1 + 0.2) / 2, rtol=1e-5)
    np.testing.assert_allclose(values[100], 0.02, rtol=1e-5)
    assert (np.diff(values[10:]) < 0).all()


def test_constant_and_wsd_values() -> None:
    constant = optim.schedule(0.1, 100, OptimConfig(schedule="constant"))
    wsd = optim.schedule(
        0.1, 100, OptimConfig(schedule="wsd", decay_fraction=0.2, final_lr_fraction=0.0)
    )
    for rate in (constant, wsd):
        values = np.asarray([rate(step) for step in range(100)])
        assert (np.diff(values[:16]) > 0).all()
        np.testing.assert_allclose(values[15:80], 0.1, rtol=1e-6)
    np.testing.assert_allclose(constant(99), 0.1, rtol=1e-6)
    falling = [wsd(step) for step in range(79, 100)]
    np.testing.assert_allclose(falling, np.linspace(0.1, 0, 21), atol=1e-7)


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 5), (5, 50), (2, 1)])
def test_short_schedules_stay_in_range(steps: int, warmup: int, kind: Any) -> None:
    config = OptimConfig(warmup_steps=warmup, schedule=kind)
    rate = optim.schedule(0.1, steps, config)
    values = np.asarray([rate(step) for step in range(steps)])
    assert (values > 0).all() and (values <= 0.1 + 1e-6).all()


def test_every_registered_optimizer_has_a_plan() -> None:
    plans = optim.plans(OptimConfig(optimizer="all"), steps=10)
    assert [plan.name for plan in plans] == ["adamw", *m2.REGISTRY]
    steps = {plan.name: plan.settings["ns_steps"] for plan in plans}
    assert steps["adamw"] is None
    assert (steps["muon"], steps["muon2"], steps["muon2_f"]) == (5, 3, 3)


def test_momentum_is_equal_and_the_recommended_recipe_has_the_fitted_schedule() -> None:
    plans = optim.plans(OptimConfig(optimizer=COMPARED), steps=10)
    settings = {plan.name: plan.settings for plan in plans}
    nesterov = {name: found["nesterov"] for name, found in settings.items()}
    assert nesterov.pop("adamw") is None and set(nesterov.values()) == {True}
    coefficients = [found["ns_coeffs"] for found in settings.values()]
    assert coefficients == [None, "keller", "keller", "keller", "muon2"]
    (plan,) = optim.plans(OptimConfig(optimizer="muon2_f_h"), steps=10, tiny=False)
    assert plan.settings["ns_steps"] == 5 and plan.settings["learning_rate"] == 0.03
    assert plan.settings["adam_learning_rate"] == 0.002
    asked = OptimConfig(
        optimizer="muon2_f_h", nesterov=False, ns_coeffs="turbo", ns_steps=4
    )
    (plan,) = optim.plans(asked, steps=10)
    found = [plan.settings[key] for key in ("nesterov", "ns_coeffs", "ns_steps")]
    assert found == [False, "turbo", 4]


def test_the_default_is_the_recipe_of_the_page() -> None:
    page = pathlib.Path(__file__).parents[2] / "docs" / "choosing.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    (plan,) = optim.plans(OptimConfig(optimizer=RECOMMENDED), steps=10, tiny=False)
    assert f"tx = {plan.name}(" in code
    assert f"peak({plan.settings['learning_rate']})," in code
    (adam,) = re.findall(r"adam_learning_rate=peak\((.*?)\)", code)
    assert float(adam) == plan.settings["adam_learning_rate"]
    for key in ("ns_steps", "ns_coeffs", "nesterov"):
        value = plan.settings[key]
        assert f"{key}={value}," in code.replace('"', "")


def test_overrides_reach_the_optimizers_that_have_them() -> None:
    config = OptimConfig(optimizer="adamw,muon2", ns_steps=4, learning_rate=0.5)
    adamw, muon2 = optim.plans(config, steps=10)
    assert [plan.settings["ns_steps"] for plan in (adamw, muon2)] == [None, 4]
    assert adamw.settings["learning_rate"] == muon2.settings["learning_rate"] == 0.5
    assert muon2.settings["adam_learning_rate"] == optim.TINY_RATES["adamw"]
    with pytest.raises(UserError, match="--adam-learning-rate does not apply"):
        optim.plans(OptimConfig(optimizer="adamw", adam_learning_rate=0.1), steps=10)


def test_the_models_matrices_go_to_muon_and_nothing_else() -> None:
    config = ModelConfig(dim=32, layers=2, heads=2, hidden=48)
    _, init = make_model(config, 50)
    shapes = jax.eval_shape(init, jax.random.key(0))
    labels = matrix_rules(config).labels(shapes)
    for path, label in jax.tree.leaves_with_path(labels):
        name = jax.tree_util.keystr(path)
        inside = "blocks" in name and "norm" not in name
        assert label == ("matrix" if inside else "adam"), name


@pytest.mark.parametrize("name", ["adamw", "muon2"])
def test_weight_decay_of_each_group(name: str) -> None:
    params = {
        "embed": {"embedding": np.ones((6, 4), np.float32)},
        "mlp": {"kernel": np.ones((4, 8), np.float32)},
        "norm": {"scale": np.ones(4, np.float32)},
    }
    options = OptimConfig(
        optimizer=name,
        weight_decay=0.1,
        adam_weight_decay=0.3,
        learning_rate=0.02,
        adam_learning_rate=None if name == "adamw" else 0.02,
    )
    (plan,) = optim.plans(options, steps=10)
    zero = jax.tree.map(np.zeros_like, params)
    state = plan.transform.init(params)
    updates, _ = jax.jit(plan.transform.update)(zero, state, params)
    rate = np.asarray(plan.schedule(0))
    np.testing.assert_allclose(updates["mlp"]["kernel"], -0.1 * rate, rtol=1e-5)
    np.testing.assert_allclose(updates["embed"]["embedding"], -0.3 * rate, rtol=1e-5)
    assert not updates["norm"]["scale"].any()
