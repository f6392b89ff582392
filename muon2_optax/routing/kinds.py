"""What the name of a leaf says it is: the table of kinds that AdamW trains.

Embeddings and heads see one-hot inputs or outputs, for which a spectral step is the
wrong geometry (Bernstein & Newhouse, "Modular duality", 2024). Everything else here is
a vector for each head, channel, layer or token, or a kernel whose channels do not mix.

Patterns are compared with whole names, written as words joined by "_" (``names.Name``):
``LayerNorm_0`` is ``layer_norm``. They are tried in the order of the table.

The file is long because the table is: a new kind of name is one more row.
"""

import dataclasses
import functools
import re

from muon2_optax.routing.names import Name


def _word(pattern: str) -> str:
    """A name with such a word anywhere."""
    return rf"(?:.*_)?(?:{pattern})(?:_.*)?"


def _last(pattern: str) -> str:
    """A name whose last word is such a word: what the thing is, in English."""
    return rf"(?:.*_)?(?:{pattern})"


@dataclasses.dataclass(frozen=True)
class Kind:
    """One row of the table: names that say the same.

    Attributes:
      label: what the leaf is, in a word or two.
      places: where the name may stand. ``leaf``: the leaf itself. ``owner``: the
        module that owns it. ``vector's owner``: the same, of a leaf that is called what
        a vector may be called (``weight``, ``scale``, ``bias``, but not ``kernel``).
        ``kernel's owner``: the same, of a ``kernel``; ``table's owner``: of anything
        else. ``above``: any module further up.
        ``pair``: two names in a row, ``owner/leaf`` or ``parent/owner``. ``top``: the
        owner, with nothing but the model above it.
      pattern: a regular expression for the whole name.
      unless: the same for names that do not count after all.
      adam: AdamW trains it; if False, it stays a matrix (of half matches only).
      sure: the name says it all. Half a match is a reason to ask the user.
      ranks: the least and the greatest rank that it holds for.
    """

    label: str
    places: tuple[str, ...]
    pattern: str
    unless: str = ""
    adam: bool = True
    sure: bool = True
    ranks: tuple[int, int] = (2, 99)


_NORM = r"norms?|(?!de|ab)[a-z]*norm|[a-z]*normali[sz]ation|(?:sub)?ln[a-z]?|rms|[bg]n"
_WHICH = (  # what may stand behind the word for a norm: which of them it is
    r"pre|post|f|final|first|last|in|out|input|output|before|after|inner|outer|mid|layer|"
    r"q|k|v|kv|qk|a|b|x|y|z|s|t|query|key|value|self|cross|context|added|img|txt|"
    r"encoder|decoder|scale|weights?|gain|gamma|beta|bias|w|g|\d+d?"
)
_EMBEDDING = (
    r"[a-z]*emb|[a-z]*embds?|embs|(?!un)[a-z]*embeds?|(?!un)[a-z]*embedd?ings?|"
    r"embedders?|wt?[tp]e"
)
_PROJECTION = (  # names of maps between activations
    r".*_to_.*|.*mapping.*|.*_(?:[a-z]*proj|projs|projections?|projector|linear|dense|mlp"
    r"|ff|ffn|fc|transform|layernorm|mixer|wise)(?:_(?:in|out))?"
)
_POSITION = r"pos|positions?|positional|relpos|abspos"
_WHICH_POSITION = (
    r"abs|absolute|rel|relative|learned|learnt|learnable|fixed|sin\w*|w|time|temporal|"
    r"spatial|frame|patch|grid|row|col|token"
)
_SCALE = r"[a-z]*scales?|gains?|gammas?|betas?"
_TOKEN = (
    r"tokens?|toks?|registers?|masks?|prompts?|probes?|slots?|prefix(?:es)?|"
    r"memor(?:y|ies)"
)
_WEIGHT = (  # what a vector may be called, besides by its kind
    r"weights?|w|params?|parameters?|data|tensor|vectors?|table|embeddings?|scales?|g|"
    r"gains?|gammas?|betas?|alphas?|b|bias(?:es)?|offsets?|shift"
)
_KERNEL = r"(?:.*_)?kernels?(?:_.*)?"
_NO_HEAD = r"multi(?!_token)|multihead|attn|attention|talking|per|num|map|pool"
_HERE = ("leaf", "owner")
_OWN = ("leaf", "vector's owner")

KINDS = (
    # --- attention sinks, positions, tables of embeddings
    Kind(
        "attention sink",
        _HERE,
        rf"{_last('sinks?')}|s_aux|"
        r"sinks?_(?:logits?|tokens?|bias|weights?|keys?|values?|k|v|kv)",
    ),
    Kind(
        "position",
        _HERE,
        rf"(?:(?:{_WHICH_POSITION})_)?"
        rf"(?:{_POSITION})|pe|rpe|posenc|rope|rotary|alibi|"
        r"(?:alibi_)?slopes|(?:(?:rope|rotary)_)?(?:inv_freqs?|freqs(?:_cis)?)"
        rf"|(?:.*_)?(?:{_POSITION})_(?:[a-z]*emb\w*|enc|encodings?|tables?|bias(?:es)?|h|w|"
        r"index|ids)(?:_.*)?|"
        r"(?:rel|relative)_(?:pos\w*|attention_bias|bias|height|width)(?:_.*)?",
        unless=_PROJECTION,
    ),
    Kind(
        "embedding",
        ("leaf", "table's owner"),
        _word(_EMBEDDING),
        unless=_PROJECTION,
    ),
    # A ``kernel`` is no table: a projection of patches, or of one-hot inputs. Of higher
    # rank it is the convolution of a vision transformer.
    Kind(
        "embedding",
        ("kernel's owner",),
        _word(_EMBEDDING),
        unless=rf"{_PROJECTION}|embed_out",
        sure=False,
        ranks=(2, 2),
    ),
    Kind("embedding", _OWN, _word(_EMBEDDING), adam=False, sure=False),
    Kind(
        "table",
        _HERE,
        rf"{_last('(?:code|cook)books?|tables?|lookups?|vocab|vocabular(?:y|ies)|luts?')}|"
        r"(?:.*_)?code_?(?:book|word|vector)s?|codes|lookup_.*|tid_2_eid|"
        r"(?:.*_)?(?:prototypes?|centroids?)|(?:cluster|class)_cent(?:er|re)s?|"
        r"dictionar(?:y|ies)|word_vectors?",
        unless=_PROJECTION,
    ),
    # --- heads
    Kind(
        "head",
        _HERE,
        rf"{_last('[a-z]*heads?')}|{_word('logits?|logits?dense|un_?embed[a-z]*')}|"
        r"(?:.*_)?classifiers?|classification|qa_outputs?|seq_relationship|embed_out|"
        r"vocab(?:ulary)?_(?:proj\w*|out\w*|dense|linear)|(?:out|output)_vocab(?:ulary)?",
        unless=rf"pre_logits?|{_word(_NO_HEAD)}",
    ),
    Kind(
        "head",
        ("leaf",),
        r"(?:(?:.*_)?heads?|softmax)_(?:w|weights?)",
        unless=_word(_NO_HEAD),
    ),
    Kind("head", ("above",), r"(?:lm_|mlm_|cls_)?head|lmhead|(?:.*_)?classifier"),
    Kind("head", ("pair",), r"predictions/decoder"),
    # Below the top, "output" is a projection inside a layer.
    Kind("head", ("top",), r"output|score|output_projection|softmax|clf"),
    Kind("head", ("kernel's owner",), r"cls"),
    Kind(
        "head",
        ("top",),
        r"decoder|readout|predictor|predictions|"
        r"(?:output|final|last)_(?:layer|dense|linear)",
        adam=False,
        sure=False,
        ranks=(2, 2),
    ),
    Kind(
        "head",
        _HERE,
        r"(?:.*_)?heads?_(?:proj\w*|dense|linear|mlp|fc|hidden|transform)",
        unless=_word("multi|attn|attention|per|num"),
        adam=False,
        sure=False,
    ),
    # A head of several layers: the last of them is for AdamW, the hidden ones are not.
    Kind(
        "head",
        ("above",),
        r"(?:.*_)head|logits",
        unless=_word(_NO_HEAD),
        adam=False,
        sure=False,
        ranks=(2, 2),
    ),
    # --- mixtures of experts: gate_proj and mlp/gate are matrices of a gated MLP
    Kind("router", ("leaf", "owner", "above"), _word("routers?|routing")),
    Kind(
        "router",
        _HERE,
        r"(?:.*_)?(?:expert|experts|moe|switch|noisy|top_?k)_(?:gate|gates|gating|selector)"
        r"(?:_w\w*)?|gat(?:e|ing)_(?:net|network)",
    ),
    Kind(
        "router",
        ("pair",),
        rf"{_word('[a-z]*moe[a-z]*|mixture')}/(?:gat(?:es?|ing)|wg|phi)",
    ),
    # --- state-space models and linear recurrences
    Kind(
        "state space",
        _HERE,
        r"a_logs?|log_a|a_param|ds|dt|dt_projs?(?:_.*)?|dt_bias|log_dt|inv_dt|dt_log|"
        r"log_(?:steps?|delta|lambda|decay)|lambda_(?:re|im|real|imag|bar)|"
        r"(?:nu|theta|gamma)_log|(?:log_)?[abcd]_(?:re|im|real|imag)|token_shift|"
        r"ssm_(?:a|b|c|d|dt)(?:_.*)?|"
        r"time_(?:decay|first|faaaa|mix\w*|maa\w*|shift)|(?:.*_)?decays?|bonus",
    ),
    Kind("state space", ("pair",), rf"{_word('ssm|mamba|lru|rglru|ssd|hippo')}/[abcd]"),
    Kind(  # RWKV-7's vectors
        "state space",
        ("pair",),
        r"(?:att|[tc]mix|(?:time|channel)_mix\w*|ffn)/(?:x_[rwkvag]|k_[ka]|r_k)",
    ),
    # --- convolutions whose channels do not mix
    Kind(
        "depthwise convolution",
        _HERE,
        rf"{_word('depthwise|dwconv|dw|shortconv|convdw')}|(?:.*_)?conv_1d(?:_.*)?|"
        r"(?:.*_)?(?:depth_wise|short|causal|temporal)_conv(?:_.*)?",
        unless=_word("pointwise|pw|1x"),
    ),
    Kind(
        "convolution of rank 2",
        _HERE,
        _word(r"(?!pw)[a-z]*convs?|convolutions?"),
        unless=_word("pointwise|pw|1x|1|proj|bias"),
        adam=False,
        sure=False,
        ranks=(2, 2),
    ),
    # --- norms, scales, biases
    Kind(
        "bias",
        ("leaf",),
        rf"{_word('(?!un|de)[a-z]*bias(?:es)?')}|{_last('offsets?|shift')}",
    ),
    Kind("bias", ("vector's owner",), _last("bias(?:es)?")),
    Kind("bias", ("kernel's owner",), _last("bias(?:es)?"), adam=False, sure=False),
    Kind(
        "norm",
        _OWN,
        rf"(?:.*_)?(?:{_NORM})(?:_(?:{_WHICH}))*",
        unless=_word("ada[a-z]*"),
    ),
    Kind("norm", ("pair",), r"qk_(?:[a-z]+_)?norms?/(?:q|k|query|key)"),
    # EasyLM's norms call their scale ``kernel``.
    Kind("norm", ("kernel's owner",), _last(_NORM), unless=_word("ada[a-z]*")),
    Kind("scale", ("leaf",), _last(rf"{_SCALE}|multipliers?|temperatures?|taus?")),
    Kind("scale", ("vector's owner",), _last(_SCALE), sure=False),
    Kind("norm", ("vector's owner",), _word(_NORM), adam=False, sure=False),
    Kind("scale", ("kernel's owner",), _last(_SCALE), adam=False, sure=False),
    Kind(
        "layer scale",
        _OWN,
        rf"(?:.*_)?(?:layer_?scale|ls)(?:_.*)?|{_last('lambdas?')}|lambda_[qk]|alphas?|"
        r"re_?zero(?:_.*)?|res_?weights?|"
        r"(?:skip|res|resid|residual)_(?:weights?|gates?|alphas?|lambdas?)",
    ),
    Kind(
        "hyper-connection",
        ("leaf",),
        r"hc_(?:.*_)?(?:base|scale|bias)|static_(?:alpha|beta)",
    ),
    # --- arrays that stand for activations
    Kind("token, mask or memory", _OWN, rf"{_last(_TOKEN)}|cls"),
    Kind(
        "learned query or latent",
        _OWN,
        r"(?:.*_)?latents|latent|latents?_(?:array|vectors?|init\w*)|inducing_points|seeds?|"
        r"(?:learn\w*|object|latent|init|initial|track|det\w*|global|cls|class|mask|pool\w*|"
        r"seed|probe|content)_(?:quer(?:y|ies)|vectors?|latent)|"
        r"quer(?:y|ies)_(?:vectors?|array|feat\w*|content)",
    ),
    Kind(
        "learned query or latent",
        ("leaf",),
        r"queries|slots?_(?:mu|(?:log_)?sigma|init\w*)|ctx|(?:ctx|context)_vec(?:tor)?s?|"
        r"(?:mem|memory|persistent|pkm|product)_(?:k|v|kv|keys?|values?)|[bes]os",
    ),
    Kind(
        "initial state",
        _OWN,
        r"(?:init|initial|hidden|learned)_(?:states?|hidden|carry|h|c)|hidden_init|null_.*",
    ),
    Kind("statistic", ("leaf",), r"(?:running|moving|ema)_.*|mean|var(?:iance)?"),
)


@functools.lru_cache(maxsize=1 << 14)
def kind_of(name: Name, rank: int) -> Kind | None:
    """The first kind of the table that a leaf's names belong to, or None."""
    above = name.above
    model = not above or all(re.fullmatch(_MODEL, part) for part in above)
    kernel = re.fullmatch(_KERNEL, name.leaf) is not None
    vector = not kernel and re.fullmatch(_WEIGHT, name.leaf) is not None
    owner = (name.owner,) if name.owner else ()
    found = {
        "leaf": (name.leaf,),
        "owner": owner,
        "vector's owner": owner if vector else (),
        "kernel's owner": owner if kernel else (),
        "table's owner": () if kernel else owner,
        "above": above,
        "top": owner if model else (),
        "pair": tuple("/".join(pair) for pair in _pairs(name)),
    }
    for kind, pattern, unless in _COMPILED:
        if not kind.ranks[0] <= rank <= kind.ranks[1]:
            continue
        for place in kind.places:
            for part in found[place]:
                if pattern.fullmatch(part) and not (unless and unless.fullmatch(part)):
                    return kind
    return None


_MODEL = r"model|module|transformer|target|state|net|network|language_model"
_COMPILED = tuple(
    (kind, re.compile(kind.pattern), re.compile(kind.unless) if kind.unless else None)
    for kind in KINDS
)


def _pairs(name: Name) -> list[tuple[str, str]]:
    chain = [*name.above[-1:], name.owner, name.leaf]
    return list(zip(chain, chain[1:]))
