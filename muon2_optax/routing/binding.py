"""What a tree as a whole says of its leaves, as one rule for each."""

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence

from muon2_optax.routing import doubts, names
from muon2_optax.routing.kinds import Kind, kind_of
from muon2_optax.routing.leaves import LeafRule
from muon2_optax.routing.neighbours import Tree, rules_by_neighbours
from muon2_optax.routing.orientation import IN_OUT, RANK_2, rules_by_orientation

Shape = tuple[int, ...]


def rules_of_tree(
    leaves: Sequence[tuple[str, Shape]], decided: Callable[[str], bool]
) -> list[LeafRule]:
    """A rule for each leaf that its neighbours decide, or that is doubtful.

    Args:
      leaves: path and shape of every leaf.
      decided: whether the user's rules decide the leaf of this path already.
    """
    count = collections.Counter(path for path, _ in leaves)
    # Leaves whose paths print alike cannot be told apart by a rule.
    leaves = [x for x in leaves if count[x[0]] == 1 and math.prod(x[1])]
    kinds = {
        path: kind_of(names.name_of(path), len(shape))
        for path, shape in leaves
        if len(shape) > 1 and not decided(path)
    }
    shapes = dict(leaves)
    unnamed = [path for path, kind in kinds.items() if not (kind and kind.adam)]
    matrices = [path for path in unnamed if len(shapes[path]) == 2]
    tables = [
        shapes[path]
        for path, kind in kinds.items()
        if len(shapes[path]) == 2 and kind and kind.label in ("embedding", "table")
    ]
    sizes = doubts.Sizes.of(
        list(shapes.values()), [shapes[path] for path in matrices], tables
    )
    tree = Tree(leaves)
    found = rules_by_orientation(tree, unnamed) | rules_by_neighbours(tree, unnamed)
    rules = []
    for path in unnamed:
        if len(shapes[path]) > 2:
            if path in found:
                rules.append(found[path])
            continue
        known = found.get(path, LeafRule(path, IN_OUT, RANK_2))
        doubt = _doubt(known, shapes[path], kinds[path], sizes)
        if path in found or doubt:
            rules.append(dataclasses.replace(known, doubt=doubt))
    biases = {names.components(p)[:-1]: s for p, s in leaves if _is_bias(p, s)}
    for path, kind in kinds.items():
        if kind is not None and kind.adam:
            # The neighbours of a leaf that is itself called ``embed`` are the rest of
            # the model: their biases say nothing about it.
            *module, leaf = names.components(path)
            alone = kind_of(names.name_of(leaf), len(shapes[path]))
            bias = None if alone else biases.get(tuple(module))
            doubt = doubts.doubt_of_adam(shapes[path], kind, sizes, bias)
            if doubt:
                rules.append(LeafRule(path, None, f"name: {kind.label}", doubt))
    if shapes.keys() == {""} and len(shapes[""]) == 1 and not decided(""):
        rules.append(LeafRule("", None, "rank 1", doubts.FLATTENED))
    return rules


def _is_bias(path: str, shape: Shape) -> bool:
    return len(shape) == 1 and names.name_of(path).leaf in ("bias", "b")


def _doubt(
    known: LeafRule, shape: Shape, kind: Kind | None, sizes: doubts.Sizes
) -> str:
    if known.axes is None:
        return known.doubt
    others = doubts.doubt_of_matrix(shape, kind, sizes)
    return " and ".join(filter(None, (known.doubt, others)))
