"""What the leaves around a leaf say about it.

A tree says more than its names: a bias has one entry for each output of the weight
beside it, and an axis that all leaves of a subtree share stacks layers.
"""

import collections
import re
from collections.abc import Sequence

from muon2_optax.routing.leaves import LeafRule
from muon2_optax.routing.names import components

Shape = tuple[int, ...]
Path = tuple[str, ...]


def rules_by_neighbours(tree: "Tree", candidates: Sequence[str]) -> dict[str, LeafRule]:
    """What neighbours send to AdamW, by path.

    Args:
      tree: all leaves.
      candidates: the paths of those that are matrices or without a rule by themselves.
    """
    found = {}

    def send(path: str, reason: str, doubt: str = "") -> None:
        found[path] = LeafRule(path, None, reason, doubt)

    for path in candidates:
        key = tree.key(path)
        shape = tree.shapes[key]
        if tree.is_stacked(key):
            doubt = "it is wider than the layers' matrices" if tree.is_wide(key) else ""
            send(path, "vectors of stacked layers", doubt)
        elif shape is not None and tree.is_bias(key, shape):
            send(path, "bias beside its weight")
        elif tree.is_gate(key):
            send(path, "router beside its experts")
        elif len(shape or ()) > 2 and sorted(shape or ())[-2] == 1:
            send(path, "a vector: all sides but one are 1")
        elif tree.is_state_space(key):
            send(path, "beside a state space's parameters")
    return found


class Tree:
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
        # The largest side of a matrix in each subtree that is a stack.
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

    def is_stacked(self, key: Path) -> bool:
        """Whether the leaf is in a subtree of stacked layers, and may be a vector.

        A ``kernel`` of rank 2 would be of rank 1 in its layer, which no layer has.
        """
        if not key or "kernel" in key[-1] or self.rank(key) != 2:
            return False
        return any(key[:depth] in self._stacks for depth in range(len(key)))

    def is_wide(self, key: Path) -> bool:
        """Whether a leaf has a longer side than every matrix stacked with it."""
        sides = [self._stacks.get(key[:depth], 0) for depth in range(len(key))]
        return max(self.shapes[key] or (0,)) > max(sides)

    def is_bias(self, key: Path, shape: Shape) -> bool:
        """Whether it is ``b`` beside ``w`` or ``gating_b`` beside ``gating_w``, say.

        A bias has the shape of its weight without the inputs, stacked or not.
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
            # A scalar of each layer has one axis only, which is that of the stack.
            at = min(axis, len(shape) - 1)
            sizes.add(shape[at] if shape else -1)

    def is_stack(self) -> bool:
        """Whether one axis has the same size in all leaves and stacks them.

        If that size is the largest side of any matrix, it is the layer's width instead:
        (d, heads, k) beside (d, 4 d).
        """
        if not (self.matrices and self.vectors):
            return False
        return any(
            len(sizes) == 1 and 0 < next(iter(sizes)) < self.largest
            for sizes in self.sizes
        )


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
