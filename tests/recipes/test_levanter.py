"""Muon² in Levanter's own models, where Levanter is installed."""

import jax
import numpy as np
import pytest

import muon2_optax as m2

pytest.importorskip("levanter.models.llama", exc_type=ImportError)

import draccus  # noqa: E402
import equinox as eqx  # noqa: E402
import haliax as hax  # noqa: E402
import jmp  # noqa: E402
from levanter.models.gpt2 import Gpt2Config  # noqa: E402
from levanter.models.llama import LlamaConfig  # noqa: E402
from levanter.models.lm_model import LmExample  # noqa: E402
from levanter.optim.config import OptimizerConfig  # noqa: E402
from levanter.trainer_state import TrainerState  # noqa: E402

from . import levanter_config  # noqa: E402, F401

VOCAB, BATCH = hax.Axis("vocab", 64), hax.Axis("batch", 4)
SMALL = {"max_seq_len": 16, "hidden_dim": 32, "num_layers": 2, "num_heads": 4}
LLAMA = LlamaConfig(**SMALL, num_kv_heads=2, intermediate_dim=80)
GPT2 = Gpt2Config(**SMALL)
# Inputs and outputs of each linear map, by the names of its axes. GPT-2's q, k and v
# are three matrices.
HEADS = ("kv_head", "q_heads_per_group", "head_size")
AXES = {
    "q_proj": (("embed",), HEADS),
    "k_proj": (("embed",), ("kv_head", "head_size")),
    "v_proj": (("embed",), ("kv_head", "head_size")),
    "o_proj": (("heads", "head_size"), ("embed",)),
    "gate_proj": (("embed",), ("mlp",)),
    "up_proj": (("embed",), ("mlp",)),
    "down_proj": (("mlp",), ("embed",)),
    "attn/c_attn": (("embed",), ("heads", "head_size")),
    "attn/c_proj": (("heads", "head_size"), ("embed",)),
    "mlp/c_fc": (("embed",), ("mlp",)),
    "mlp/c_proj": (("mlp",), ("embed",)),
}


def model_of(config):
    return config.model_type.init(VOCAB, config, key=jax.random.key(0))


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_the_ready_rules_take_the_axes_that_haliax_names(config):
    params = eqx.filter(model_of(config), eqx.is_inexact_array)
    named = jax.tree_util.tree_leaves_with_path(params, is_leaf=hax.is_named_array)
    matrices = 0
    for path, leaf in named:
        path = jax.tree_util.keystr(path, simple=True, separator="/")
        want = [axes for end, axes in AXES.items() if path.endswith(f"{end}/weight")]
        names = [axis.name for axis in leaf.axes]
        axes = m2.ready_rules.levanter().resolve(path, leaf.array.shape)
        found = axes and tuple(
            tuple(names[d] for d in side) for side in (axes.ins, axes.outs)
        )
        assert found == (want[0] if want else None), path
        matrices += axes is not None
    assert matrices == {LLAMA: 7, GPT2: 4}[config]


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_levanters_trainer_state_learns_with_muon2(config):
    optimizer = draccus.decode(OptimizerConfig, {"type": "muon2", "weight_decay": 0.1})
    state = TrainerState.init(
        optimizer.build(10),
        model_of(config),
        key=jax.random.key(2),
        is_trainable=True,
        mp=jmp.get_policy("f32"),
    )
    position = hax.Axis("position", 16)
    tokens = hax.random.randint(jax.random.key(1), (BATCH, position), 0, VOCAB.size)

    def loss(model):
        def of_one(row):
            return hax.mean(model.compute_next_token_loss(LmExample.causal(row)))

        return hax.mean(hax.vmap(of_one, BATCH)(tokens)).scalar()

    @eqx.filter_jit
    def step(state):
        value, grads = eqx.filter_value_and_grad(loss)(state.model)
        return value, state.take_step(grads, obj_fun=loss, key=jax.random.key(3))[0]

    losses = []
    for _ in range(5):
        value, state = step(state)
        losses.append(float(value))
    assert np.isfinite(losses).all() and losses[-1] < losses[0] - 0.1
