"""Ready rules, on trees as the projects lay them out."""

import pytest
from routing import labels_of, leaf

from muon2_optax import ready_rules

# MaxText, scanned on axis 1: (path, shape, inputs, outputs); None: AdamW.
D, H, K, F, L, E, V = 32, 4, 8, 64, 3, 5, 100
MAXTEXT = [
    ("token_embedder/embedding", (V, D), None),
    ("decoder/logits_dense/kernel", (D, V), None),
    ("decoder/decoder_norm/scale", (D,), None),
    ("decoder/layers/self_attention/query/kernel", (D, L, H, K), ((0,), (2, 3))),
    ("decoder/layers/self_attention/key/kernel", (D, L, H, K), ((0,), (2, 3))),
    ("decoder/layers/self_attention/out/kernel", (H, L, K, D), ((0, 2), (3,))),
    ("decoder/layers/mlp/wi_0/kernel", (D, L, F), ((0,), (2,))),
    ("decoder/layers/mlp/wo/kernel", (F, L, D), ((0,), (2,))),
    ("decoder/layers/pre_self_attention_layer_norm/scale", (D, L), None),
    ("decoder/moe_layers/MoeBlock_0/wi_0", (E, L, D, F), ((2,), (3,))),
    ("decoder/moe_layers/MoeBlock_0/gate/bias", (E, L), None),
    (
        "decoder/moe_layers/DeepSeekMoeBlock_0/shared_experts/wi_0/kernel",
        (D, L, F),
        ((0,), (2,)),
    ),
    ("decoder/layers/self_attention/wq_b/kernel", (16, L, H, K), ((0,), (2, 3))),
    ("decoder/layers/self_attention/sinks", (H, L), None),
    ("decoder/layers/mhc/res_beta", (4, 4), None),
    ("decoder/layers/mhc/pre_alpha", (D, 4), ((0,), (1,))),
    ("decoder/layers_0/mhc_mlp/post_alpha_scale", (1,), None),
    ("decoder/hc_head/hc_scale", (1,), None),
    # OLMo 3 keeps the heads of its output projection apart, Qwen3-Next flattens them.
    ("decoder/layers/layers_0/attention/out/kernel", (H, L, K, D), ((0, 2), (3,))),
    ("decoder/layers/layer_0/attention/attention/out/kernel", (H, L, D), ((0,), (2,))),
]
STACKED = "transformer/layers/stacked"
LEVANTER = [
    ("embeddings/token_embeddings/weight/0", (V, D), None),
    ("lm_head/weight/0", (V, D), None),
    ("transformer/norm/weight/0", (D,), None),
    (f"{STACKED}/self_attn/q_proj/weight/0", (L, 2, 2, K, D), ((4,), (1, 2, 3))),
    (f"{STACKED}/self_attn/k_proj/weight/0", (L, 2, K, D), ((3,), (1, 2))),
    (f"{STACKED}/self_attn/o_proj/weight/0", (L, D, H, K), ((2, 3), (1,))),
    (f"{STACKED}/self_attn/q_proj/bias/0", (L, 2, 2, K), None),
    (f"{STACKED}/self_attn/sinks/0", (L, 2, 2), None),
    (f"{STACKED}/mlp/down_proj/weight/0", (L, D, F), ((2,), (1,))),
    (f"{STACKED}/input_layernorm/weight/0", (L, D), None),
    (f"{STACKED}/block_sparse_moe/gate/weight/0", (L, E, D), None),
    (f"{STACKED}/block_sparse_moe/experts/w1/weight/0", (L, E, D, F), ((2,), (3,))),
    (
        "transformer/layers/blocks/0/self_attn/q_proj/weight/0",
        (2, 2, K, D),
        ((3,), (0, 1, 2)),
    ),
    (
        "transformer/blocks/stacked/attn/c_attn/weight/0",
        (L, D, 3, H, K),
        ((1,), (3, 4)),
    ),
    ("transformer/blocks/stacked/attn/c_proj/weight/0", (L, H, K, D), ((1, 2), (3,))),
    ("transformer/blocks/stacked/mlp/c_fc/weight/0", (L, D, F), ((1,), (2,))),
    ("transformer/blocks/stacked/ln_1/weight/0", (L, D), None),
    ("embeddings/position_embeddings/weight/0", (16, D), None),
]


@pytest.mark.parametrize(
    "rules, leaves",
    [(ready_rules.maxtext(), MAXTEXT), (ready_rules.levanter(), LEVANTER)],
    ids=["maxtext", "levanter"],
)
@pytest.mark.parametrize("prefix", ["", "params/"])
def test_ready_rules(rules, leaves, prefix):
    tree = {prefix + path: leaf(*shape) for path, shape, _ in leaves}
    labels = labels_of(rules, tree)  # without a warning
    for path, shape, want in leaves:
        axes = rules.resolve(prefix + path, shape)
        assert (None if axes is None else (axes.ins, axes.outs)) == want, path
        assert labels[prefix + path] == ("adam" if want is None else "matrix")


def test_queries_laid_out_in_another_way_raise():
    """Whisper's (layers, embed, heads, head size) does not pass for LLaMA's."""
    path = "encoder/transformer/layers/stacked/self_attn/q_proj/weight/0"
    with pytest.raises(ValueError, match="q_proj"):
        ready_rules.levanter().resolve(path, (L, D, H, K))
