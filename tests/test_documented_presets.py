"""docs/methods.md: a row for every method, its defaults, and presets that are calls."""

import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import muon2_optax as m2

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "methods.md").read_text()
TABLE = TEXT.split("## Published presets")[1].split("\n## ")[0]
CALLS = [
    call
    for row in re.findall(r"^\|[^|]+\|(.+)\|$", TABLE, re.MULTILINE)
    for call in re.findall(r"`(\w+\(.+?\))`", row)
]


def with_rate(factory):
    """Presets that leave the learning rate to the reader get one."""
    return lambda rate=0.02, **kw: factory(rate, **kw)


NAMES = {name: with_rate(factory) for name, factory in m2.REGISTRY.items()}
NAMES |= {k: getattr(m2, k) for k in vars(m2) if k not in m2.REGISTRY}


def rows_of_methods():
    """{optimizer: (number of steps K, momentum)}, as the first table has them."""
    head, _, *rows = re.findall(r"^\|(.+)\|$", TEXT.split("\nWork is")[0], re.MULTILINE)
    columns = [title.strip() for title in head.split("|")]
    steps, momentum = columns.index("K"), columns.index("momentum")
    found = {}
    for row in rows:
        cells = [cell.strip() for cell in row.split("|")]
        names = re.findall(r"`(\w+)`", cells[0])
        shared = cells[steps].split(", ")
        for name, k in zip(names, shared if len(shared) > 1 else shared * len(names)):
            found[name] = k, cells[momentum]
    return found


@pytest.mark.parametrize("name", m2.REGISTRY)
def test_every_method_has_its_row_and_is_announced(name):
    rows = rows_of_methods()
    assert name in rows, f"the table of docs/methods.md has no row for {name}"
    steps, momentum = rows[name]
    assert steps == str(m2.optimizers.NS_STEPS.get(name, "–"))
    if "without `_h`" in momentum:
        momentum = rows[name.removesuffix("_h")][1]
    nesterov = inspect.signature(m2.REGISTRY[name]).parameters.get("nesterov")
    assert ("Nesterov" in momentum) == (nesterov is not None and nesterov.default)
    for page in ("README.md", "CHANGELOG.md"):
        assert f"`{name}`" in (ROOT / page).read_text(), f"{page} has no word of {name}"


def test_the_defaults_are_named():
    """The sentence below the table: decay rates, weight decay, and eps by optimizer."""
    (sentence,) = re.findall(r"^Defaults: (.+?)\n\n", TEXT, re.MULTILINE | re.DOTALL)
    groups = re.findall(r"(1e-\d+)\s+\(([^)]+)\)", sentence)
    eps = {n: float(e) for e, names in groups for n in re.findall(r"`(\w+)`", names)}
    assert "`b1 = b2 = 0.95` throughout" in sentence
    assert "weight decay 0;" in sentence and "0.9, 0.999, 1e-8" in sentence
    assert eps
    for name, factory in m2.REGISTRY.items():
        parameters = inspect.signature(factory).parameters
        default = {n: p.default for n, p in parameters.items()}
        assert eps.get(name.removesuffix("_h")) == default.get("eps"), name
        assert default["b1"] == default.get("b2", 0.95) == 0.95, name
        assert not default.get("weight_decay") and not default["adam_weight_decay"]
        adam = [default[f"adam_{n}"] for n in ("b1", "b2", "eps")]
        assert adam == [0.9, 0.999, 1e-8], name


def test_the_table_is_read():
    assert len(CALLS) > 10
    assert sum(call.startswith(("muon2(", "muon2_f(")) for call in CALLS) >= 4


@pytest.mark.parametrize("call", CALLS)
def test_preset(call):
    tx = eval(call, {"chain": optax.chain, **NAMES})  # noqa: S307
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.standard_normal((4, 6)), jnp.float32)}
    if call.startswith(("muon", "adamuon")):
        params["lm_head"] = params["w"]
    updates, _ = jax.eval_shape(tx.update, params, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
