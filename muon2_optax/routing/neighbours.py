"""What the leaves around a leaf say about it.

A tree says more than its names: a bias has one entry for each output of the weight
beside it, and an axis that all leaves of a subtree share stacks layers.
"""

import collections
import dataclasses
import re
from collections.abc import Sequence

from muon2_optax.axes import MatrixAxes
from muon2_optax.routing.names import components

Shape = tuple[int, ...]
Path = tuple[str, ...]
IN_OUT, OUT_FIRST = MatrixAxes(0, 1), MatrixAxes(-1, -2)
UNORIENTED = "nothing says whether it is stored (in, out) or (out, in)"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What its neighbours say of one leaf.

    Attributes:
      axes: the axes of its matrices; None for AdamW.
      reason: how they say it.
      doubt: what speaks against it; empty where nothing does.
    """

    axes: MatrixAxes | None
    reason: str
    doubt: str = ""


def findings(
    leaves: Sequence[tuple[str, Shape]], candidates: Sequence[str]
) -> dict[str, Finding]:
    """What neighbours decide, by path, and only where they do.

    Args:
      leaves: path and shape of every leaf of the tree, each path once.
      candidates: the leaves that are matrices or without a rule by themselves.
    """
    tree = _Tree(leaves)
    found = _oriented(tree, candidates)
    for path in candidates:
        key = tree.key(path)
        shape = tree.shapes[key]
        if tree.stacked(key):
            doubt = "it is wider than the layers' matrices" if tree.wide(key) else ""
            found[path] = Finding(None, "vectors of stacked layers", doubt)
        elif shape is not None and tree.is_bias(key, shape):
            found[path] = Finding(None, "bias beside its weight")
        elif tree.is_gate(key):
            found[path] = Finding(None, "router beside its experts")
        elif len(shape or ()) > 2 and sorted(shape or ())[-2] == 1:
            found[path] = Finding(None, "a vector: all sides but one are 1")
        elif tree.is_state_space(key):
            found[path] = Finding(None, "beside a state space's parameters")
    return found


class _Tree:
    """Leaves by the module that owns them, and what is known of each subtree."""

    def __init__(self, leaves: Sequence[tuple[str, Shape]]) -> None:
        self.leaves = leaves
        self._keys = {path: _without_index(components(path)) for path, _ in leaves}
        # Several arrays of one list share a key; then none of them speaks for the name.
        self.shapes: dict[Path, Shape | None] = {}
        self.children: dict[Path, set[str]] = collections.defaultdict(set)
        subtrees: dict[Path, _Subtree] = collections.defaultdict(_Subtree)
        for path, shape in leaves:
            key = self._keys[path]
            self.shapes[key] = None if key in self.shapes else shape
            for depth in range(len(key)):
                self.children[key[:depth]].add(key[depth])
                subtrees[key[:depth]].add(shape)
        # The largest side of a matrix in each.
        self._stacks = {key: x.largest for key, x in subtrees.items() if x.is_stack()}

    def key(self, path: str) -> Path:
        return self._keys[path]

    def beside(self, key: Path, name: str) -> Shape | None:
        """The shape of a leaf with the same owner."""
        return self.shapes.get((*key[:-1], name))

    def rank(self, key: Path) -> int:
        return len(self.shapes[key] or ())

    def is_square(self, key: Path) -> bool:
        return len(set(self.shapes[key] or ())) == 1

    def siblings(self, key: Path) -> set[str]:
        return self.children[key[:-1]]

    def stacked(self, key: Path) -> bool:
        """Whether the leaf is in a subtree of stacked layers, and may be a vector.

        A ``kernel`` of rank 2 would be of rank 1 in its layer, which no layer has.
        """
        if not key or "kernel" in key[-1] or self.rank(key) != 2:
            return False
        return any(key[:depth] in self._stacks for depth in range(len(key)))

    def wide(self, key: Path) -> bool:
        """Whether a leaf has a side that no matrix stacked with it has the like of."""
        sides = [self._stacks.get(key[:depth], 0) for depth in range(len(key))]
        return max(self.shapes[key] or (0,)) > max(sides)

    def is_bias(self, key: Path, shape: Shape) -> bool:
        """``b`` beside ``w``, ``gating_b`` beside ``gating_w``: what a bias adds to.

        Its shape is that of the weight without the inputs, stacked or not.
        """
        weights = (
            self.beside(key, name) for name in _weights_of(key[-1] if key else "")
        )
        return any(w is not None and _without_axes(shape, w) for w in weights)

    def is_gate(self, key: Path) -> bool:
        """A ``gate`` whose module owns experts: DeepSeek's and Qwen's ``mlp/gate``."""
        for depth in (1, 2):
            name = key[-depth] if len(key) >= depth else ""
            beside = self.children[key[:-depth]] if name else set()
            if name.lower() in ("gate", "gating", "wg") and any(
                re.fullmatch(r"(?i)(.*_)?(experts|experts?_\d+)", x) for x in beside
            ):
                return True
        return False

    def is_state_space(self, key: Path) -> bool:
        """``B``, ``C`` and ``D`` beside ``Lambda_re``, ``log_step`` or ``A_log``."""
        return bool(key) and bool(
            re.fullmatch(r"[A-EPQ]\d?|[BC]_?(re|im|tilde|bar)?", key[-1])
            and any(
                re.fullmatch(r"(?i)Lambda.*|log_(step|dt|delta)s?|A_log|nu_log", name)
                for name in self.siblings(key)
            )
        )


class _Subtree:
    """Whether all leaves of a subtree share an axis that stacks layers."""

    def __init__(self) -> None:
        self.sizes: list[set[int]] = [set(), set()]  # along axis 0 and axis 1
        self.vectors, self.matrices = 0, 0
        self.largest = 0

    def add(self, shape: Shape) -> None:
        if len(shape) > 2:
            self.matrices += 1
            self.largest = max(self.largest, *shape)
        self.vectors += len(shape) == 2
        for axis, sizes in enumerate(self.sizes):
            # A scalar of each layer is stacked on the only axis that there is.
            at = min(axis, len(shape) - 1)
            sizes.add(shape[at] if shape else -1)

    def is_stack(self) -> bool:
        """Whether one axis has the same size in all, and is none of the matrices' own.

        An axis that is as large as any other is a layer's width: (d, heads, k) beside
        (d, 4 d).
        """
        if not (self.matrices and self.vectors):
            return False
        return any(
            len(sizes) == 1 and 0 < next(iter(sizes)) < self.largest
            for sizes in self.sizes
        )


def _oriented(tree: _Tree, candidates: Sequence[str]) -> dict[str, Finding]:
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
                found[path] = Finding(OUT_FIRST, "(out, in), by its bias")
            elif vote is None and others == {True}:
                found[path] = Finding(OUT_FIRST, "(out, in), as others here")
            elif vote is None and others != {False} and name is _WEIGHT:
                if not tree.is_square(keys[path]):
                    found[path] = Finding(IN_OUT, "default: rank 2", UNORIENTED)
    return found


def _says_bias(tree: _Tree, key: Path) -> bool | None:
    """Whether the bias beside a weight has its first side, and not its second."""
    shape = tree.shapes[key]
    bias = tree.beside(key, re.sub("weights?|kernel", "bias", key[-1]))
    if shape is None or bias is None or len(bias) != 1 or shape[0] == shape[1]:
        return None
    return {shape[0]: True, shape[1]: False}.get(bias[0])


_WEIGHT, _KERNEL = re.compile(r"(?:.*_)?weights?"), re.compile(r"(?:.*_)?kernel")
_WIDENS = re.compile(
    r"up_proj|gate_proj|gate_up_proj|w1|w3|wi(_\d)?|c_fc|fc1|fc_in|intermediate"
)
_NARROWS = re.compile(r"down_proj|w2|wo|fc2|fc_out")
_KEYS = re.compile(r"(w?)k(_proj)?|(w?)key(_proj)?")
_HEADS = re.compile(r"(lm_)?head|output|unembed")


def _says_tree(tree: _Tree) -> set[bool]:
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


def _embeddings(tree: _Tree) -> list[Shape]:
    pattern = re.compile(r"(?i).*(embed|wte|emb).*")
    return [
        shape
        for key, shape in tree.shapes.items()
        if shape
        and len(shape) == 2
        and any(pattern.fullmatch(part) for part in key[-2:])
    ]


def _weights_of(name: str) -> list[str]:
    """What the weight beside a bias of that name would be called."""
    if name == "b":
        return ["w", "W", "weight", "kernel"]
    found = re.fullmatch(r"(.*_)?b([a-zA-Z]?\d*|_.*)", name)
    if found is None:
        return []
    before, after = found.group(1) or "", found.group(2)
    return [f"{before}{w}{after}" for w in "wW"]


def _without_axes(shape: Shape, weight: Shape) -> bool:
    """Whether the shape is the weight's with some axes, but not the last, left out.

    Sides of 1 stand for what is left out: (1, out).
    """
    sides = [side for side in shape if side != 1]
    rest = iter(weight)
    return len(sides) < len(weight) and all(side in rest for side in sides)


def _without_index(parts: Path) -> Path:
    while len(parts) > 1 and parts[-1].isdigit():
        parts = parts[:-1]
    return parts
