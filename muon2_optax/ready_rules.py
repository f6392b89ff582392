"""Rules for the parameter trees of public projects, as data.

    tx = muon2_optax.muon2(0.02, rules=muon2_optax.ready_rules.maxtext())

Each is a list of (pattern, axes) pairs for several models; the first match wins. Pairs
of your own go in front:
``MatrixRules((*mine, *ready_rules.MAXTEXT), allow_unused=True)``.
"""

from muon2_optax.axes import MatrixAxes
from muon2_optax.rules import MatrixRules

Pairs = tuple[tuple[str, MatrixAxes | None], ...]


def _under(modules: str, leaf: str) -> str:
    """A component of ``modules`` somewhere above one of ``leaf``."""
    return rf"(^|/)({modules})/(.*/)?({leaf})(/|$)"


# Scanned layers are stacked on axis 1, so most kernels are (in, layers, out). These
# agree with the dimension numbers that MaxText 0.2.5 gives its own Muon, on every leaf
# of the twelve models in benchmarks/results/maxtext_rules.jsonl but OLMo 3's output
# projection without scanning, which MaxText takes for one matrix per index of a head.
MAXTEXT: Pairs = (
    (
        r"scale|embedding|logits_dense|(post|pre|res)_beta|hc_base|sinks|tid2eid|A_log|"
        r"conv1d|shared_expert_gate|(^|/)(?!position_bias(/|$))\w*bias(/|$)",
        None,
    ),
    (
        r"^(?!.*shared_expert).*"
        r"(^|/)(MoeBlock_0|moe_block|routed_experts|GptOssMlp|routed_moe)/(.*/)?"
        r"(wi|wi_0|wi_1|wo|gate_up_proj)(/|$)",
        MatrixAxes(-2, -1),
    ),
    (r"(^|/)o_a_proj(/|$)", MatrixAxes(-2, -1)),
    (
        _under(
            "self_attention|full_attention|attention|self_attn|attn|attention_mla|"
            "GptOssAttention",
            "query|key|value|wq_b|wkv_b|wkv",
        ),
        MatrixAxes(0, (-2, -1)),
    ),
    # Heads that are kept apart. Qwen3-Next, attention/attention/out, flattens them.
    (
        r"(^|/)(self_attention|GptOssAttention|(?<!attention/)attention)/out(/|$)",
        MatrixAxes((0, -2), -1),
    ),
    (r"", MatrixAxes(0, -1)),
)

# Levanter 9263f81 (src/levanter/models, layers/attention.py) and Haliax f41e7d4
# (nn/linear.py). Axes are counted from the end: ``Stacked`` puts the layers in front,
# ``MoELinear`` the experts. ``Linear`` is stored (out, in), but for GPT-2 and Whisper;
# ``MoELinear`` is (in, out). The array inside a ``NamedArray`` prints as "0".
_WEIGHT = r"/weight(/0)?$"
LEVANTER: Pairs = (
    (
        r"(^|/)(token_embeddings|position_embeddings|lm_head|\w*norm|\w*ln|ln_\w+|sinks|"
        r"block_sparse_moe/gate|conv\d?)(/|$)|(^|/)bias(/0)?$",
        None,
    ),
    # (kv heads, queries per head, head size, embed), (kv heads, head size, embed). The
    # axes of the queries are counted from the front: those of Whisper and of latent
    # attention, which are laid out in other ways, do not fit and raise.
    (rf"(^|/)stacked/(.*/)?self_attn/q_proj{_WEIGHT}", MatrixAxes(4, (1, 2, 3))),
    (rf"(^|/)self_attn/q_proj{_WEIGHT}", MatrixAxes(3, (0, 1, 2))),
    (rf"(^|/)self_attn/[kv]_proj{_WEIGHT}", MatrixAxes(-1, (-3, -2))),
    # (embed, heads, head size)
    (rf"(^|/)self_attn/o_proj{_WEIGHT}", MatrixAxes((-2, -1), -3)),
    # GPT-2: (embed, 3, heads, head size), (heads, head size, embed), (in, out)
    (rf"(^|/)attn/c_attn{_WEIGHT}", MatrixAxes(-4, (-2, -1))),
    (rf"(^|/)attn/c_proj{_WEIGHT}", MatrixAxes((-3, -2), -1)),
    (rf"(^|/)mlp/c_(fc|proj){_WEIGHT}", MatrixAxes(-2, -1)),
    # Mixtral, GPT-OSS: (experts, in, out)
    (rf"(^|/)experts/(w[123]|gate_up_proj|down_proj){_WEIGHT}", MatrixAxes(-2, -1)),
    # LLaMA, Mistral, Gemma, Qwen, OLMo: (out, in)
    (
        rf"(^|/)(mlp|shared_mlp)/(gate|up|down)_proj{_WEIGHT}",
        MatrixAxes(-1, -2),
    ),
)


def maxtext() -> MatrixRules:
    """Rules for MaxText's models with scanned layers, the default there.

    Layers that are not scanned fit as well. The last pattern matches every leaf, as
    (in, ..., out), so a leaf for which that cannot be is an error that names it.
    """
    return MatrixRules(MAXTEXT, allow_unused=True)


def levanter() -> MatrixRules:
    """Rules for Levanter's LLaMA, Mistral, Mixtral, Gemma, Qwen, OLMo, GPT-OSS, GPT-2.

    Layers may be stacked (``Stacked``) or not (``BlockSeq``). Whatever else a model has
    follows the defaults.
    """
    return MatrixRules(LEVANTER, allow_unused=True)
