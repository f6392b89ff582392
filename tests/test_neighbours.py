"""What the leaves around a leaf say, and rules bound to a whole tree."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matrices import normal32
from reference import relative_error
from routing import labels_of, leaf, matrices_of

import muon2_optax as m2
from muon2_optax import MatrixAxes, MatrixRules


def test_vectors_of_layers_stacked_in_front():
    layers = {
        "mixer": {
            "qkv": leaf(5, 32, 96),
            "lam": leaf(5, 32),
            "temperature": leaf(5, 4),
        },
        "ffn": {"up": leaf(5, 32, 64), "down": leaf(5, 64, 32), "kappa": leaf(5)},
    }
    tree = {"layers": layers, "adapter": leaf(32, 32)}
    rules = MatrixRules((("qkv|up|down", MatrixAxes(-2, -1)),))
    assert matrices_of(tree, rules) == {
        *("layers/mixer/qkv", "layers/ffn/up", "layers/ffn/down", "adapter")
    }


def test_vectors_of_layers_stacked_on_axis_1():
    """MaxText's layout: (in, layers, out) beside (width, layers)."""
    layers = {
        "mlp": {"wi": {"kernel": leaf(32, 6, 64)}, "wo": {"kernel": leaf(64, 6, 32)}},
        "attention": {"tau": leaf(8, 6), "q": {"kernel": leaf(32, 6, 8, 4)}},
    }
    rules = MatrixRules((("kernel", MatrixAxes(0, -1)),))
    assert "layers/attention/tau" not in matrices_of({"layers": layers}, rules)


def test_a_vector_wider_than_the_stacked_matrices_is_doubtful():
    """Maps from a model of width 48 to heads of size 96 look like 48 layers."""
    attention = {name: {"w": leaf(48, 2, 96)} for name in "qkv"}
    tree = {"block": {**attention, "up": {"w": leaf(48, 160)}}}
    with pytest.raises(ValueError, match="'block/up/w'.*wider than the layers' mat"):
        MatrixRules().check(tree)
    stacked = {"fc": {"kernel": leaf(6, 48, 160), "v": leaf(6, 160)}, "g": leaf(6, 48)}
    assert "wider" not in MatrixRules().describe({"layers": stacked})


def test_layers_that_are_not_stacked_keep_their_matrices():
    """The axis that projections of heads share is the layer's width."""
    attention = {
        "query": {"kernel": leaf(32, 4, 8)},
        "key": {"kernel": leaf(32, 4, 8)},
        "up": leaf(32, 128),
        "mix": leaf(32, 32),
    }
    rules = MatrixRules((("query|key", MatrixAxes(0, (1, 2))),))
    assert {"up", "mix"} <= matrices_of(attention, rules)
    fused = {"qkv": leaf(32, 3, 32), "out": leaf(32, 32)}
    rules = MatrixRules((("qkv", MatrixAxes(0, -1)),))
    assert matrices_of(fused, rules) == {"qkv", "out"}


@pytest.mark.parametrize(
    "weight, bias, shape",
    [("w", "b", (6, 32)), ("w_in", "b_in", (6, 32)), ("gating_w", "gating_b", (4, 8))],
)
def test_biases_beside_their_weights(weight, bias, shape):
    tree = {"m": {weight: leaf(6, 16, 32) if shape[0] == 6 else leaf(16, 4, 8)}}
    tree["m"][bias] = leaf(*shape)
    rules = MatrixRules(((f"{weight}$", MatrixAxes(-2, -1)),))
    assert matrices_of(tree, rules) == {f"m/{weight}"}
    # Alone, such a name says nothing.
    assert matrices_of({"m": {bias: leaf(*shape)}}) == {f"m/{bias}"}


def test_biases_and_vectors_of_higher_rank():
    tree = {
        "attention": {"gating_w": leaf(2, 16, 4, 8), "gating_b": leaf(2, 4, 8)},
        "ffw": {"w": leaf(2, 16, 64), "b": leaf(2, 1, 1, 64)},
        "shift_x": leaf(1, 1, 16),
        "ssm": {"log_step": leaf(8, 1), "C": leaf(16, 8, 2)},
    }
    rules = MatrixRules((("_w$|/w$", MatrixAxes(1, -1)),))
    assert matrices_of(tree, rules) == {"attention/gating_w", "ffw/w"}  # no warning


def test_a_gate_beside_experts_is_a_router():
    moe = {"gate": {"weight": leaf(8, 32)}, "experts": {"0": {"gate": leaf(32, 64)}}}
    assert matrices_of({"mlp": moe}) == {"mlp/experts/0/gate"}
    listed = moe | {"gate": [leaf(8, 32)]}
    assert matrices_of({"mlp": listed}) == {"mlp/experts/0/gate"}
    dense = {"gate": {"kernel": leaf(32, 64)}, "up": {"kernel": leaf(32, 64)}}
    assert len(matrices_of({"mlp": dense})) == 2


def test_matrices_of_a_state_space_are_known_by_its_eigenvalues():
    layer = {
        "Lambda_re": leaf(16),
        "B": leaf(16, 32),
        "C": leaf(32, 16),
        "W": leaf(8, 8),
    }
    assert matrices_of({"seq": layer}) == {"seq/W"}
    assert matrices_of({"B": leaf(16, 32), "C": leaf(32, 16)}) == {"B", "C"}
    low_rank = {"Lambda_im": leaf(16), "P": leaf(16, 24), "K": leaf(16, 24)}
    assert matrices_of({"dplr": low_rank, "P": leaf(16, 24)}) == {"dplr/K", "P"}
    for beside in ("log_step", "log_dt", "log_deltas", "A_log", "nu_log"):
        layer = {beside: leaf(16), "C": leaf(32, 16), "W": leaf(8, 8)}
        assert matrices_of({"seq": layer}) == {"seq/W"}


# --- weights stored (out, in) -------------------------------------------------------


def fan_ins(tree):
    bound = MatrixRules().bind(tree)
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    found = {}
    for keys, x in flat:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        axes = bound.resolve(path, x.shape)
        if axes is not None:
            found[path] = (axes.ins, axes.fan_in)
    return found


def torch_linear(fan_in, fan_out, bias=True):
    tree = {"weight": leaf(fan_out, fan_in)}
    return tree | {"bias": leaf(fan_out)} if bias else tree


def test_a_bias_says_which_side_is_out():
    tree = {"a": torch_linear(16, 40), "b": torch_linear(40, 16)}
    tree["square"] = torch_linear(16, 16, bias=False)
    tree["more"] = torch_linear(16, 24, bias=False)
    assert fan_ins(tree) == {
        "a/weight": ((1,), 16),
        "b/weight": ((1,), 40),
        "square/weight": ((1,), 16),
        "more/weight": ((1,), 16),
    }
    haiku = {
        "a": {"weight": leaf(16, 40), "bias": leaf(40)},
        "b": {"weight": leaf(8, 16)},
    }
    assert fan_ins(haiku) == {"a/weight": ((0,), 16), "b/weight": ((0,), 8)}


def test_kernels_are_in_out_unless_their_bias_says_otherwise():
    """Hugging Face's Flax GPT-2 transposes its kernels."""
    layer = {"kernel": leaf(96, 32), "bias": leaf(96)}
    tree = {"c_attn": layer, "c_proj": {"kernel": leaf(32, 32), "bias": leaf(32)}}
    assert fan_ins(tree)["c_attn/kernel"] == ((1,), 32)
    assert fan_ins(tree)["c_proj/kernel"] == ((1,), 32)
    assert fan_ins({"fc": {"kernel": leaf(96, 32)}})["fc/kernel"] == ((0,), 96)


@pytest.mark.parametrize("out_first", [True, False])
@pytest.mark.parametrize(
    "layers",
    [
        {"up_proj": (16, 40), "down_proj": (40, 16)},
        {"k_proj": (32, 8), "q_proj": (32, 32)},
        {"key": (32, 8), "query": (32, 32)},
        {"c_fc": (16, 64), "c_proj": (64, 16)},
        {"lm_head": (16, 50), "mix": (16, 24)},
    ],
)
def test_without_biases_the_layers_around_say_it(layers, out_first):
    tree = {"embed_tokens.weight": leaf(50, 16)}
    for name, (fan_in, fan_out) in layers.items():
        shape = (fan_out, fan_in) if out_first else (fan_in, fan_out)
        tree[f"h.0.{name}.weight"] = leaf(*shape)
    labels_of(MatrixRules(), tree)  # no warning
    for path, (ins, fan_in) in fan_ins(tree).items():
        assert fan_in == layers[path.split(".")[-2]][0], path
        assert ins == ((1,) if out_first else (0,))


def test_weights_of_unknown_order_are_doubtful():
    tree = {"first": {"weight": leaf(64, 128)}, "second": {"weight": leaf(128, 64)}}
    with pytest.warns(UserWarning, match=r"first/weight(.|\n)*MatrixAxes\(-1, -2\)"):
        labels_of(MatrixRules(), tree)
    assert fan_ins(tree) == {"first/weight": ((0,), 64), "second/weight": ((0,), 128)}
    settled = MatrixRules((("weight$", MatrixAxes(-1, -2)),))
    assert len(matrices_of(tree, settled)) == 2


def test_shape_factors_of_an_equinox_model_are_those_of_its_layers():
    """The spectral norm of a step is sqrt(fan_out / fan_in) of the layer it is for."""
    model = eqx.filter(
        eqx.nn.MLP(12, 20, 36, 1, key=jax.random.key(0)), eqx.is_inexact_array
    )
    grads = jax.tree.map(lambda x: jnp.asarray(normal32(x.shape, 3)), model)
    tx = m2.muon2(1.0, ns_steps=12)
    updates, _ = jax.jit(tx.update)(grads, tx.init(model), model)
    for layer, (fan_in, fan_out) in zip(updates.layers, [(12, 36), (36, 20)]):
        top = np.linalg.norm(np.asarray(layer.weight), 2)
        # Keller's coefficients leave singular values between 0.7 and 1.2.
        assert 0.65 < top / (fan_out / fan_in) ** 0.5 < 1.3


@pytest.mark.parametrize("name", ["muon2", "muon2_f"])
def test_a_composed_chain_of_bound_rules_is_the_optimizer(name):
    tree = {
        "fc": {"weight": normal32((24, 8), 1), "bias": normal32((24,), 2)},
        "stack": {"w": normal32((3, 8, 8), 3), "b": normal32((3, 8), 4)},
    }
    rules = MatrixRules((("stack/w", MatrixAxes(-2, -1)),))
    ready = m2.REGISTRY[name](0.5, rules=rules)
    bound = rules.bind(tree)
    moment = {
        "muon2": lambda: m2.scale_by_second_moment(0.95, 0.95, 1e-10),
        "muon2_f": lambda: m2.factorized_second_moment(rules=bound),
    }[name]()
    composed = optax.partition(
        {
            "matrix": optax.chain(
                moment,
                m2.newton_schulz_orthogonalize(3, rules=bound),
                m2.scale_by_shape("spectral", rules=bound),
                optax.scale_by_learning_rate(0.5),
            ),
            "adam": optax.chain(
                m2.scale_by_second_moment(0.9, 0.999, 1e-8, bias_correction=True),
                optax.scale_by_learning_rate(0.5),
            ),
        },
        bound.labels,
    )
    for tx in (ready, composed):
        state = tx.init(tree)
        updates, state = jax.jit(tx.update)(tree, state, tree)
        if tx is ready:
            want = updates
    jax.tree.map(np.testing.assert_array_equal, updates, want)
    # The weight is (out, in): its step is that of the transposed (in, out) kernel.
    turned = {"fc": {"kernel": tree["fc"]["weight"].T}}
    tx = m2.REGISTRY[name](0.5)
    kernel = tx.update(turned, tx.init(turned), turned)[0]["fc"]["kernel"]
    assert relative_error(want["fc"]["weight"], kernel.T) < 1e-4  # float32


def test_binding_is_idempotent_and_needs_nothing_where_nothing_is_found():
    plain = {"fc": {"kernel": leaf(16, 32), "bias": leaf(32)}}
    rules = MatrixRules()
    assert rules.bind(plain) is rules
    tree = {"fc": torch_linear(16, 40)}
    bound = rules.bind(tree)
    assert bound.bind(tree) == bound and hash(bound) == hash(rules.bind(tree))
    assert MatrixRules(by_name=False).bind(tree) == MatrixRules(by_name=False)


def test_rules_of_the_user_come_before_neighbours():
    tree = {"fc": torch_linear(16, 40)}
    rules = MatrixRules(((r"fc/weight", MatrixAxes(0, 1)),))
    assert rules.bind(tree).resolve("fc/weight", (40, 16)).fan_in == 40
