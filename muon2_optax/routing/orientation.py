"""Whether weights are stored (in, out) or (out, in), as far as a tree tells."""

import re
from collections.abc import Sequence

from muon2_optax.axes import MatrixAxes
from muon2_optax.routing.leaves import LeafRule
from muon2_optax.routing.neighbours import Path, Shape, Tree

IN_OUT, OUT_FIRST = MatrixAxes(0, 1), MatrixAxes(-1, -2)
# The reason where nothing but the rank of a leaf makes it a matrix.
RANK_2 = "default: rank 2"
UNORIENTED = "nothing says whether it is stored (in, out) or (out, in)"

_WEIGHT, _KERNEL = re.compile(r"(?:.*_)?weights?"), re.compile(r"(?:.*_)?kernel")
_WIDENS = re.compile(
    r"up_proj|gate_proj|gate_up_proj|w1|w3|wi(_\d)?|c_fc|fc1|fc_in|intermediate"
)
_NARROWS = re.compile(r"down_proj|w2|wo|fc2|fc_out")
_KEYS = re.compile(r"(w?)k(_proj)?|(w?)key(_proj)?")
_HEADS = re.compile(r"(lm_)?head|output|unembed")


def rules_by_orientation(tree: Tree, candidates: Sequence[str]) -> dict[str, LeafRule]:
    """Which leaves are stored (out, in), as torch and Equinox store ``weight``.

    A ``kernel`` is (in, out) unless a bias says otherwise, as in Hugging Face's Flax
    GPT-2; of a ``weight`` nothing is known.
    """
    found = {}
    for name in (_WEIGHT, _KERNEL):
        keys = {path: tree.key(path) for path in candidates}
        votes = {
            path: _says_bias(tree, key)
            for path, key in keys.items()
            if key and name.fullmatch(key[-1]) and tree.rank(key) == 2
        }
        by_bias = {vote for vote in votes.values() if vote is not None}
        others = by_bias
        if not by_bias and votes and name is _WEIGHT:
            others = _says_tree(tree)
        for path, vote in votes.items():
            if vote:
                found[path] = LeafRule(path, OUT_FIRST, "(out, in), by its bias")
            elif vote is None and others == {True}:
                found[path] = LeafRule(path, OUT_FIRST, "(out, in), as others here")
            elif vote is None and others != {False} and name is _WEIGHT:
                if not tree.is_square(keys[path]):
                    found[path] = LeafRule(path, IN_OUT, RANK_2, UNORIENTED)
    return found


def _says_bias(tree: Tree, key: Path) -> bool | None:
    """Whether the bias beside a weight has its first side, and not its second."""
    shape = tree.shapes[key]
    bias = tree.beside(key, re.sub("weights?|kernel", "bias", key[-1]))
    if shape is None or bias is None or len(bias) != 1 or shape[0] == shape[1]:
        return None
    return {shape[0]: True, shape[1]: False}.get(bias[0])


def _says_tree(tree: Tree) -> set[bool]:
    """What names and sizes say where no bias does: True where a weight is out first.

    MLPs widen and narrow; keys of fewer heads share the inputs of their queries; and a
    head has as many outputs as the embedding has rows.
    """
    votes = set()
    rows = {shape[0] for shape in _embeddings(tree)}
    for key, shape in tree.shapes.items():
        if shape is None or len(shape) != 2 or shape[0] == shape[1]:
            continue
        if len(key) < 2 or not _WEIGHT.fullmatch(key[-1]):
            continue
        owner = key[-2].lower()
        if _WIDENS.fullmatch(owner):
            votes.add(shape[0] > shape[1])
        elif _NARROWS.fullmatch(owner):
            votes.add(shape[0] < shape[1])
        elif _HEADS.fullmatch(owner) and rows & set(shape):
            votes.add(shape[0] in rows)
        elif _KEYS.fullmatch(owner):
            query = owner.replace("key", "k").replace("k", "q", 1)
            query = query.replace("q", "query", 1) if "key" in owner else query
            sides = tree.shapes.get((*key[:-2], query, key[-1])) or ()
            shared = [side in sides for side in shape]
            if sum(shared) == 1:
                votes.add(shared[1])
    return votes


def _embeddings(tree: Tree) -> list[Shape]:
    pattern = re.compile(r"(?i).*(embed|wte|emb).*")
    return [
        shape
        for key, shape in tree.shapes.items()
        if shape
        and len(shape) == 2
        and any(pattern.fullmatch(part) for part in key[-2:])
    ]
