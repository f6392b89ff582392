"""Settles what each leaf is, from what its model says or else from its name."""

import re
import warnings
from collections.abc import Callable, Sequence

from muon2_optax.axes import MatrixAxes
from muon2_optax.models.layers import Found, Stacks, place, stack_axes
from muon2_optax.routing.leaves import LeafRule, Verdict

# What the name of a leaf says of its path and shape: axes, or None for AdamW, and the
# reason. None in place of both where names have no answer.
ByName = Callable[[str, tuple[int, ...]], tuple[MatrixAxes | None, str] | None]
Decide = Callable[[str, tuple[int, ...]], Verdict]
Decision = tuple[str, MatrixAxes | None, str]

# A Linear does not know that it is the model's head or a router, but its name tells.
_HEAD_OR_ROUTER = re.compile(r"\b(head|router)\b")


def leaf_rules(
    found: Sequence[Found],
    before: Sequence[str],
    decide: Decide,
    ruled: Callable[[str], bool],
) -> tuple[LeafRule, ...]:
    """A rule for each leaf that the model or its name settles; lists the others.

    Args:
      found: the leaves, with what the model says of them.
      before: what may precede their paths in a tree of parameters.
      decide: what the names say of a leaf of one layer.
      ruled: whether the user has a rule for this path, so that it need not be listed.
    """

    def by_name(
        path: str, shape: tuple[int, ...]
    ) -> tuple[MatrixAxes | None, str] | None:
        verdict = decide(path, shape)
        if verdict.uncovered:
            return None
        if verdict.axes is None:
            return None, verdict.reason
        return MatrixAxes(verdict.axes.ins, verdict.axes.outs), verdict.reason

    decisions, unknown = _settle(found, by_name)
    verdicts = {x.path: decide(x.path, x.single or x.shape) for x in unknown}
    told = {p for p, v in verdicts.items() if v.by_name and not v.doubt}
    _warn_of([x for x in unknown if x.path not in told and not ruled(x.path)])
    guessed = verdicts.keys() - told
    doubts = {path: verdict.doubt for path, verdict in verdicts.items()}
    return tuple(
        LeafRule(prefix + path, axes, reason, doubts.get(path, ""), path in guessed)
        for path, axes, reason in decisions
        for prefix in before
    )


def _settle(
    found: Sequence[Found], by_name: ByName
) -> tuple[list[Decision], list[Found]]:
    """Axes and reason for each leaf, and the leaves that the model leaves open."""
    stacks = Stacks(found)
    known: dict[str, tuple[MatrixAxes | None, str]] = {}
    unknown = []
    for leaf in found:
        answer = _rule_from_model(leaf, stacks, by_name)
        if answer is not None:
            known[leaf.path] = answer
        else:
            unknown.append(leaf)
    unknown += _settle_ties(found, known)
    for leaf in unknown:
        answer = _rule_from_name(leaf, stacks, by_name)
        if answer is not None:
            known[leaf.path] = answer
    decisions = [(path, axes, reason) for path, (axes, reason) in known.items()]
    listed = [leaf for leaf in unknown if len(leaf.single or leaf.shape) > 1]
    return decisions, listed


def _rule_from_model(
    leaf: Found, stacks: Stacks, by_name: ByName
) -> tuple[MatrixAxes | None, str] | None:
    """What the model says of a leaf; None where it says nothing that fits its shape."""
    weight = leaf.weight
    if weight is None:
        return None
    reason = ", ".join(filter(None, (leaf.source, weight.note)))
    if weight.axes is None:
        return None, reason
    axes = weight.axes
    if weight.shape is not None:
        added = stacks.added_axes(leaf)
        if added is None or (
            leaf.single and stack_axes(weight.shape, leaf.single) != [()]
        ):
            return None
        axes = place(axes, len(leaf.shape), added)
    try:
        axes.resolve(leaf.shape)
    except ValueError as err:
        raise ValueError(f"{leaf.path!r} of {leaf.shape}, {reason}: {err}") from err
    if weight.dense:
        named = by_name(leaf.path, leaf.shape)
        if named is not None and named[0] is None and _HEAD_OR_ROUTER.search(named[1]):
            return None, f"{reason}, {named[1]}"
    return axes, reason


def _rule_from_name(
    leaf: Found, stacks: Stacks, by_name: ByName
) -> tuple[MatrixAxes | None, str] | None:
    """What the leaf's name says of one layer; None where the names have no answer."""
    single = leaf.single or leaf.shape
    if len(single) < 2:
        return (None, f"rank {len(single)}, stacked") if single != leaf.shape else None
    answer = by_name(leaf.path, single)
    if answer is None:
        return None
    axes, reason = answer
    about = f"module {leaf.owner} unknown" if leaf.owner else "axis names unknown"
    if leaf.weight is not None:
        about = f"does not fit {leaf.source}"
    if axes is not None and single != leaf.shape:
        added = stacks.added_axes(leaf)
        if added is None:
            return None
        axes = place(axes, len(leaf.shape), added)
    return axes, f"{reason}, {about}"


def _settle_ties(
    found: Sequence[Found], known: dict[str, tuple[MatrixAxes | None, str]]
) -> list[Found]:
    """Gives each variable one answer under all its paths.

    An embedding that also serves as the head stays with AdamW. Where two modules use a
    variable as different matrices, neither is right: these are returned as unknown.
    """
    roles: dict[int, list[Found]] = {}
    for leaf in found:
        if leaf.variable is not None:
            roles.setdefault(leaf.variable, []).append(leaf)
    undecided = []
    for tied in roles.values():
        answers = [(leaf, known[leaf.path]) for leaf in tied if leaf.path in known]
        if len(tied) < 2 or not answers:
            continue
        leaf, answer = min(answers, key=lambda pair: pair[1][0] is not None)
        if answer[0] is not None and any(a[0] != answer[0] for _, a in answers):
            undecided += [leaf for leaf, _ in answers]
            for leaf, _ in answers:
                del known[leaf.path]
            continue
        for other in tied:
            if other.path != leaf.path:
                known[other.path] = answer[0], f"{answer[1]}, tied to {leaf.path}"
    return undecided


def _warn_of(unknown: Sequence[Found]) -> None:
    """Lists the leaves that go by their names, in one warning."""
    if not unknown:
        return
    lines = []
    for owner in dict.fromkeys(leaf.owner for leaf in unknown):
        mine = [leaf for leaf in unknown if leaf.owner == owner]
        shown = ", ".join(f"{leaf.path} {leaf.shape}" for leaf in mine[:4])
        more = f" and {len(mine) - 4} more" if len(mine) > 4 else ""
        lines.append(f"  {owner or '(no module)'}: {shown}{more}")
    warnings.warn(
        "neither module nor name says what these parameters are, so their shapes and"
        " neighbours decide: their modules are unknown, or their sizes and stack axes"
        " do not fit. rules.describe(params) shows the outcome.\n"
        + "\n".join(lines)
        + "\nSay it with modules={type: {name: MatrixAxes(...)}} (None for AdamW) or"
        " with patterns.",
        stacklevel=4,  # the caller of MatrixRules.of
    )
