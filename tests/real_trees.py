"""Parameter trees of public projects, and what the rules make of them.

Each file of ``tests/trees`` holds one tree: paths and shapes as the project's model
makes them, and for every leaf what it does there and so where it belongs:

- ``group`` "matrix" with the true ``in`` and ``out`` axes, or "adam".
- ``warned``: names and shapes cannot decide this leaf, so a warning names it.
- ``either``: the first or last layer of a model, where both optimizers are in use.
- ``open``: the defaults are wrong without a word, and why they cannot know better.

``python tests/real_trees.py`` writes the table of ``docs/routing.md`` anew, and the
marks ``warned``, whose changes a reviewer then sees in the data.
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
DOCUMENT = FOLDER.parent.parent / "docs" / "routing.md"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One leaf: where it belongs and where the rules send it.

    Attributes:
      path: the leaf's path as the library writes it.
      expected, got: ``"adam"`` or ``"matrix (in) -> (out)"``.
      wrong: they differ in what the optimizer does.
      warned: a warning names the leaf.
      listed: the file says that a warning names it.
      known: the file says that the defaults are wrong here, and why.
    """

    path: str
    shape: tuple[int, ...]
    what: str
    expected: str
    got: str
    wrong: bool
    warned: bool
    listed: bool
    known: bool

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
    text = "\n".join(str(warning.message) for warning in caught)
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    named = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape)
        for path, leaf in flat
    ]
    # Containers keep the leaves under the paths of the file, but sorted their own way.
    expected = {_bare(path): leaf for path, leaf in project["leaves"].items()}
    # A warning names one of many layers alike, so that it can be read.
    named_in = {_alike(*leaf) for leaf in named if _is_named(leaf[0], text)}
    return [
        _outcome(
            path, shape, expected[_bare(path)], rules, _alike(path, shape) in named_in
        )
        for path, shape in named
    ]


def _outcome(path, shape, leaf, rules, warned):
    axes = rules.resolve(path, shape)
    truth = None if leaf["group"] == "adam" else (leaf["in"], leaf["out"])
    found = None if axes is None else (list(axes.ins), list(axes.outs))
    if leaf.get("either") and found is None:
        truth = None  # the last layer of a model: both are in use
    elif found is not None and axes.fan_in == sum(axes.splits) and truth == found[::-1]:
        truth = found  # a square matrix: its transpose gets the transposed step
    return Outcome(
        path,
        shape,
        leaf["what"],
        _words(truth),
        _words(found),
        truth != found,
        warned,
        bool(leaf.get("warned")),
        "open" in leaf,
    )


def _is_named(path, text):
    return re.search(rf"(?<![\w./~]){re.escape(path)}(?![\w./~])", text) is not None


def _alike(path, shape):
    return re.sub(r"\d+", "*", path), shape


def _words(axes):
    if axes is None:
        return "adam"
    return "matrix {} -> {}".format(*(tuple(side) for side in axes))


def _bare(path):
    """The names of a path, whichever container wrote it."""
    return " ".join(re.findall(r"[\w~-]+", path))


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


HEADER = (
    "project",
    "model",
    "revision",
    "leaves",
    "matrices",
    "AdamW",
    "warned",
    "silently wrong",
)


def table():
    """The table of ``docs/routing.md``: one line for each tree, and a total."""
    rows = [list(map(str, HEADER)), ["---"] * 3 + ["--:"] * 5]
    totals = [0] * 5
    for name in NAMES:
        project = read(name)
        found = outcomes(project)
        counts = [
            len(found),
            sum(o.got != "adam" for o in found),
            sum(o.got == "adam" for o in found),
            sum(o.warned for o in found),
            sum(o.silently_wrong for o in found),
        ]
        totals = [total + count for total, count in zip(totals, counts)]
        file = f"`{project['file']}`: {project['config']}"
        revision = project["revision"]
        short = revision if revision.startswith("v") else revision[:10]
        rows.append([project["project"], file, short, *map(str, counts)])
    rows.append(["all", f"{len(NAMES)} trees", "", *map(str, totals)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def open_leaves():
    """A list of the leaves that go wrong without a word, and why."""
    lines = []
    for name in NAMES:
        project = read(name)
        for path, leaf in project["leaves"].items():
            if "open" in leaf:
                lines.append(
                    f"- {project['project']}, `{path}` {tuple(leaf['shape'])}, "
                    f"{leaf['what']}: {leaf['open']}."
                )
    return "\n".join(lines) or "None at present."


def fill(text):
    """The document with its generated parts, each between two comments, made anew."""
    for name, made in (("table", table()), ("open", open_leaves())):
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        head, begun, rest = text.partition(begin)
        _, ended, tail = rest.partition(end)
        if not (begun and ended):
            raise ValueError(f"{DOCUMENT} has no place for the part {name!r}")
        text = head + begin + made + end + tail
    return text


def relist():
    """Marks in the files the leaves that a warning names today."""
    for name in NAMES:
        project = read(name)
        warned = {_bare(o.path) for o in outcomes(project) if o.warned}
        for path, leaf in project["leaves"].items():
            leaf.pop("warned", None)
            if _bare(path) in warned:
                leaf["warned"] = True
        (FOLDER / f"{name}.json").write_text(_text(project))


def _text(project):
    """JSON with one line for each leaf."""
    head = "".join(
        f" {json.dumps(key)}: {json.dumps(value)},\n"
        for key, value in project.items()
        if key != "leaves"
    )
    rows = ",\n".join(
        f"  {json.dumps(path)}: {json.dumps(leaf)}"
        for path, leaf in project["leaves"].items()
    )
    return f'{{\n{head} "leaves": {{\n{rows}\n }}\n}}\n'


if __name__ == "__main__":
    relist()
    DOCUMENT.write_text(fill(DOCUMENT.read_text()))
