"""Parameter trees of public projects, and what the rules make of them.

Each file of ``tests/trees`` holds one tree: paths and shapes read from a project's model,
and for every leaf what it does there and so where it belongs.
"""

import dataclasses
import json
import pathlib
import re
import warnings

import jax
import jax.numpy as jnp

from muon2_optax import MatrixRules

FOLDER = pathlib.Path(__file__).parent / "trees"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One leaf: where it belongs and where the rules send it.

    Attributes:
      path: the leaf's path as the library writes it.
      expected, got: ``"adam"`` or ``"matrix (in) -> (out)"``.
      wrong: they differ in what the optimizer does.
      warned: a warning names the leaf.
      listed: the file says that names and shapes cannot decide this leaf.
    """

    path: str
    shape: tuple[int, ...]
    what: str
    expected: str
    got: str
    wrong: bool
    warned: bool
    listed: bool

    @property
    def silently_wrong(self) -> bool:
        return self.wrong and not self.warned


def read(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def parameters(project):
    """The tree of a project in its own kind of container, with abstract leaves."""
    leaves = {
        path: jax.ShapeDtypeStruct(tuple(leaf["shape"]), jnp.float32)
        for path, leaf in project["leaves"].items()
    }
    return _CONTAINERS[project["container"]](leaves)


def outcomes(project, rules=None):
    """What the rules decide for each leaf of a project, with the warnings they give."""
    rules = MatrixRules() if rules is None else rules
    params = parameters(project)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if hasattr(rules, "bind"):
            rules = rules.bind(params)
        rules.labels(params)
    messages = "\n".join(str(warning.message) for warning in caught)
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    named = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape)
        for path, leaf in flat
    ]
    # Containers keep the leaves under the paths of the file, but sorted their own way.
    expected = {_bare(path): leaf for path, leaf in project["leaves"].items()}
    return [
        _outcome(path, shape, expected[_bare(path)], rules, messages)
        for path, shape in named
    ]


def _outcome(path, shape, leaf, rules, messages):
    axes = rules.resolve(path, shape)
    truth = None if leaf["group"] == "adam" else (leaf["in"], leaf["out"])
    found = None if axes is None else (list(axes.ins), list(axes.outs))
    if leaf.get("either") and found is None:
        truth = None  # the last layer of a model: both are in use
    elif found is not None and axes.fan_in == sum(axes.splits) and truth == found[::-1]:
        truth = found  # a square matrix: its transpose gets the transposed step
    named = re.search(rf"(?<![\w./~]){re.escape(path)}(?![\w./~])", messages)
    return Outcome(
        path,
        shape,
        leaf["what"],
        _words(truth),
        _words(found),
        truth != found,
        named is not None,
        bool(leaf.get("warned")),
    )


def _words(axes):
    if axes is None:
        return "adam"
    return "matrix {} -> {}".format(*(tuple(side) for side in axes))


def _bare(path):
    return re.sub(r"[/.]", " ", path)


def _nested(leaves):
    tree = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def _haiku(leaves):
    """Two levels: "module/~/name" and the parameter's own name."""
    tree = {}
    for path, leaf in leaves.items():
        module, _, last = path.rpartition("/")
        tree.setdefault(module, {})[last] = leaf
    return tree


def _tuples(leaves):
    return {tuple(path.split("/")): leaf for path, leaf in leaves.items()}


class _Record:
    """A node with attributes, as Equinox modules and dataclasses are."""

    def __init__(self, fields):
        self.fields = fields


jax.tree_util.register_pytree_with_keys(
    _Record,
    lambda node: (
        [(jax.tree_util.GetAttrKey(k), v) for k, v in node.fields.items()],
        tuple(node.fields),
    ),
    lambda names, values: _Record(dict(zip(names, values))),
)


def _records(leaves):
    """Attributes, with sequences where all names are numbers."""

    def convert(node):
        if not isinstance(node, dict):
            return node
        children = {name: convert(child) for name, child in node.items()}
        if all(name.isdigit() for name in children):
            return [children[name] for name in sorted(children, key=int)]
        return _Record(children)

    return convert(_nested(leaves))


_CONTAINERS = {
    "nested dict": _nested,
    "flat dotted": dict,
    "tuple keys": _tuples,
    "haiku": _haiku,
    "attributes": _records,
}
