"""The presets of docs/methods.md are calls that this library takes."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import muon2_optax as m2

TEXT = (pathlib.Path(__file__).parents[1] / "docs" / "methods.md").read_text()
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
