"""Names: one normal form of paths, and kinds of leaves by their words."""

import jax
import pytest
from routing import labels_of, leaf

from muon2_optax import MatrixAxes, MatrixRules
from muon2_optax.routing.names import name_of, normal, words

# The same leaf, as frameworks and file formats print it.
PRINTED = [
    "block_2/attn/proj/kernel",
    "params/block_2/attn/proj/kernel",
    "block_2.attn.proj.kernel",
    "('block_2', 'attn', 'proj', 'kernel')",
    "params/('block_2', 'attn', 'proj', 'kernel')",
    "block_2/~/attn/proj/kernel",
    "block_2/attn/~/proj/kernel",
    "block_2/attn/proj/kernel/value",
    "block_2/attn/proj/kernel.value",
    "block_2/attn/proj/kernel/raw_value",
    "block_2/attn/proj/kernel/array",
    ".block_2.attn.proj.kernel",
    "['params']['block_2']['attn'].proj.kernel",
]


@pytest.mark.parametrize("path", PRINTED)
def test_one_normal_form(path):
    assert normal(path) == "block_2/attn/proj/kernel"
    rules = MatrixRules((("attn/proj/kernel$", MatrixAxes(1, 0)),))
    assert rules.resolve(path, (8, 24)).fan_in == 24


def test_a_pattern_may_be_written_for_the_path_as_it_is_printed():
    for pattern in (r"^params/a\.b\.w$", r"a\.b", r"^a/b/w$"):
        rules = MatrixRules(((pattern, MatrixAxes(1, 0)),))
        assert labels_of(rules, {"params": {"a.b.w": leaf(8, 16)}}) == {
            "params/a.b.w": "matrix"
        }
        assert rules.resolve("params/a.b.w", (8, 16)).fan_in == 16


def test_an_attention_value_is_no_box():
    """``value`` is dropped at the end, where it cannot name a module."""
    assert normal("attn/value/kernel") == "attn/value/kernel"
    assert MatrixRules().resolve("attn/value", (16, 16)) is not None


@pytest.mark.parametrize(
    "component, expected",
    [
        ("RMSNorm_0", ("rms", "norm")),
        ("ln_1", ("ln",)),
        ("conv1d", ("conv", "1d")),
        ("Conv1D_3", ("conv", "1d")),
        ("MoEBlock", ("moe", "block")),
        ("LoRA_A", ("lora", "a")),
        ("selfAttention2", ("self", "attention")),
        ("normalizer", ("normalizer",)),
    ],
)
def test_words(component, expected):
    assert words(component) == expected


def test_names_leave_indices_out():
    name = name_of("decoder.layers.11.mlp.experts.3.up.weight.0")
    assert (name.leaf, name.owner) == ("weight", "up")
    assert name.above == ("decoder", "layers", "mlp", "experts")


# Each is another name of the kind than those that were reported.
ADAM = {
    "head": "lm_logits/kernel mlm_head/weight policy_head/kernel logits_linear/w "
    "decoder/vocab_proj/kernel qa_outputs/kernel unembedding params.output.weight "
    "lm_head/dense/kernel classifier/out_proj/kernel value_head/w lm_head_w "
    "multi_token_head/kernel mlm/predictions/decoder/kernel nsp_head_weight",
    "embedding": "type_emb/weight emb_users/w shared_embedding/embedding wtte/weight "
    "embed_in/weight item_embs patch_embed/kernel TokenEmbedder_0/table",
    "table": "vq/code_book word_table/weight hash_lookup/w vocabulary codewords "
    "token_vocab quantizer/codevectors dino_prototypes class_centres",
    "position": "posenc rel_pos_h abs_pos/weight positional_encoding pos_table "
    "relative_attention_bias/weight alibi learned_positions pos_embed_win "
    "frame_pos W_pos grid_pos/w relative_width alibi_slopes rotary_inv_freq",
    "norm": "final_rmsnorm/weight norm_f/w GroupNorm_3/scale ffn_layernorm/weight "
    "ln_post/weight bn1/gain norm_added_k/weight attn_ln/scale post_norm "
    "mlp_norm/kernel ln_2_g ln_3_b/w norm_2_weights sub_norm3d/w attn_subln/w "
    "attn/qk_rms_norm/k",
    "scale": "attn/per_dim_scale hyper/post_scale block/gain resid_gamma block/beta "
    "attn/temperature width_multiplier head_tau",
    "bias": "mlp/up_bias attn/biases in_proj_bias bias_kv pos/offset attn/q/bias "
    "short_gate/conv_bias",
    "router": "moe/router/kernel switch_router/w_router ffn_moe/gate/kernel "
    "expert_gate/w MoELayer_2/gating/kernel gating_network/kernel",
    "depthwise convolution": "dw_conv/kernel DepthwiseConv_1/kernel short_conv/w "
    "mixer/causal_conv/weight temporal_conv_1d/kernel",
    "state space": "ssm/A_logs mixer/dt_projs_weight lru/nu_log s5/Lambda_re "
    "time_decay s4/log_dt ssm/C mamba/D lru/B_re s4d/log_A_im att/r_k tmix/x_g",
    "attention sink": "attn/sink sink_logits attn/attention_sinks sink_kv",
    "layer scale": "ls1/weight block/layer_scale_2 resid_lambdas layerscale/w "
    "lambda_k1 rezero_gate resweight",
    "hyper-connection": "hc_attn_base hc_ffn_scale static_alpha",
    "token": "cls reg_tokens dist_token mask_tokens/weight soft_prompt MAPHead_0/probe "
    "register_toks cls_tok eos",
    "latent": "latents latent_array object_queries learned_query track_queries/weight "
    "slot_log_sigma mem_v persistent_keys prompt_learner/ctx",
    "state": "init_hidden/w initial_state null_kv",
}


@pytest.mark.parametrize(
    "path", [path for paths in ADAM.values() for path in paths.split()]
)
@pytest.mark.parametrize("prefix", ["", "params/net/blocks_3/", "net.blocks.3."])
def test_kinds_of_names_that_adamw_trains(path, prefix):
    top = "output" in path.split("/")[0].split(".")  # a head at the top only
    if prefix and (top or path.startswith("params.output")):
        return
    assert MatrixRules().resolve(prefix + path, (16, 32)) is None


# Names that contain a word of a kind, and are matrices all the same.
MATRICES = (
    "normalizer/kernel renorm_mlp/fc1/kernel norm_attn_norm/attn/q/kernel "
    "LayerNormMLP_0/wi_kernel LayerNormDenseGeneral_2/kernel denormals/kernel "
    "embedder/adapter/Dense_0/kernel t_embedder/mlp/0/kernel embryo/kernel "
    "positionwise_ffn/w_1/kernel position_wise_ff/wi/kernel pos_ffn/w_2/kernel "
    "header/kernel multi_head_attention/q/kernel heads/3/query/kernel "
    "head_mixer/kernel "
    "unbiased/kernel biased_attention/wq/kernel debias/kernel "
    "scale_up/kernel upscale_net/fc/kernel betas_net/kernel gamma_net/fc/kernel "
    "tokenizer_proj/kernel token_mixing/Dense_0/kernel tokens_to_keys/kernel "
    "tablet/kernel maskformer/fc/kernel mask_decoder/fc/kernel memory_proj/kernel "
    "gate_proj/kernel mlp/gate/kernel moe/experts/gate/kernel routed_experts/wi "
    "shared_expert/gate_up_proj/kernel delta_proj/kernel in_proj/kernel x_proj/kernel "
    "latent_proj/kernel to_latents_proj/kernel query/kernel queries_proj/kernel "
    "lora_down/kernel q/lora_B lorax/kernel floral/kernel "
    "MAPHead_0/MlpBlock_0/Dense_1/kernel "
    "linear_pos/w to_pos/kernel pos_mlp/w multihead/w talking_heads/kernel "
    "lambda_net/w mem_v/kernel att/k/kernel rezero_block/fc/kernel conv_pw/w pwconv2/w "
    "predictions/transform/dense/kernel temperature_mlp/fc/kernel normal_1/w "
    "row_mlp/w head_weights/fc/kernel token_shift_mlp/fc/kernel "
    "attention/output/dense/kernel prober/kernel sinkhorn/kernel downsample/kernel"
)


@pytest.mark.parametrize("path", MATRICES.split())
@pytest.mark.parametrize("prefix", ["", "params/net/blocks_3/", "net.blocks.3."])
def test_words_that_only_resemble_a_kind(path, prefix):
    axes = MatrixRules().resolve(prefix + path, (16, 32))
    assert axes is not None and axes.fan_in == 16
    tree = {prefix + path: leaf(64, 96), "fc/kernel": leaf(96, 64)}
    assert labels_of(MatrixRules(), tree)[prefix + path] == "matrix"  # and no warning


def test_tuple_keys_and_nested_tuples_in_a_tree():
    tree = {
        ("dec", "logit_head", "kernel"): leaf(16, 64),
        ("dec", "fc", "w"): leaf(12, 12),
    }
    labels = MatrixRules().labels(tree)
    assert labels == {
        ("dec", "logit_head", "kernel"): "adam",
        ("dec", "fc", "w"): "matrix",
    }
    assert jax.tree.structure(labels) == jax.tree.structure(tree)
