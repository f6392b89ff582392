"""TEON: layers of one kind orthogonalized together."""

import operator
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from muon2_optax import dtypes, operands, trees
from muon2_optax.arguments import check_names, check_static
from muon2_optax.axes import ResolvedAxes
from muon2_optax.decay import decay_weights
from muon2_optax.execution import dispatch
from muon2_optax.matrices import flatten_matrices, rules_or_default
from muon2_optax.moments import scale_by_momentum
from muon2_optax.optimizers._route import route
from muon2_optax.optimizers._shared_arguments import optimizer
from muon2_optax.rules import MatrixRules
from muon2_optax.scaling import scale_by_shape
from muon2_optax.schedules import plans
from muon2_optax.schedules.coefficients import NSCoeffs
from muon2_optax.shape_scales import ShapeScale
from muon2_optax.sharding import locate

# Query, key and value projections under the names that model codes give them.
ATTENTION_INPUTS = r"(^|/)(q|k|v|wq|wk|wv|query|key|value|[qkv]_proj)(/|$)"


@check_names
def orthogonalize_jointly(
    joint: str = ATTENTION_INPUTS,
    group_size: int | None = None,
    ns_steps: int | None = None,
    ns_coeffs: NSCoeffs = "polar_express",
    *,
    ns_dtype: DTypeLike | None = None,
    rules: MatrixRules | None = None,
) -> optax.GradientTransformation:
    """As ``newton_schulz_orthogonalize``, with layers of one kind in groups.

    Leaves are of one kind where their paths differ in numbers only and their matrices
    have one shape; they are taken in the order of those numbers, a stacked leaf in the
    order of its batch axes. ``group_size`` successive m x n matrices become one of
    (group_size m) x n: concatenated along the inputs, so that they share their output
    space (the mode-1 unfolding of the tensor of (out, in) weights). What is left over
    at the end is orthogonalized alone.

    Args:
      joint: regular expression, searched in the paths, of the leaves to join.
      group_size: matrices in a group; None: 2.
      ns_steps: number of iterations K; None: the rows of a table, else 5.
      ns_coeffs: the coefficients, as in ``newton_schulz``.
      ns_dtype: dtype of the products, as in ``newton_schulz``; None: float16 on GPU,
        bfloat16 on TPU, float32 on CPU.
      rules: which axes form the matrices; None: ``MatrixRules()``.

    Returns:
      A stateless transform. Updates keep shape and dtype.

    Raises:
      ValueError: ``group_size`` below 1; ``joint`` that is no regular expression.
      ValueError, TypeError: what ``newton_schulz_orthogonalize`` refuses.

    References:
      Zhang et al. 2026, "TEON", arXiv:2601.23261.
    """
    check_static(group_size=group_size, ns_steps=ns_steps, ns_dtype=ns_dtype)
    dtypes.canonical("ns_dtype", ns_dtype)
    steps = plans.steps_or_default(ns_steps, ns_coeffs, 5)
    rules = rules_or_default(rules)
    numbers, plan_with = operands.split_plan(plans.resolve(ns_coeffs, steps))
    group_size = 2 if group_size is None else operator.index(group_size)
    if group_size < 1:
        raise ValueError(f"group_size must be 1 or more, got {group_size}")
    try:
        re.compile(joint)
    except (re.error, TypeError) as err:
        shown = trees.show(joint)
        raise ValueError(f"joint={shown} is no regular expression: {err}") from err

    def update_fn(updates: optax.Updates, params: Any = None) -> optax.Updates:
        del params
        names, axes, leaves, _, rebuild = flatten_matrices(rules, updates)
        kinds = _kinds(names, axes, leaves, joint)

        def run(numbers: Sequence[jax.Array], *xs: jax.Array) -> list[jax.Array]:
            blocks = [a.to_blocks(x) for a, x in zip(axes, xs)]
            together = [
                _pool([blocks[i] for i in members], group_size if joined else 1)
                for members, joined in kinds
            ]
            flat, structure = jax.tree.flatten(together)
            undivided = all(locate("", x).undivided for x in flat)
            done = dispatch.orthogonalize_by_shape(
                flat, plan_with(numbers), ns_dtype, undivided
            )
            together = structure.unflatten(done)
            for (members, joined), done in zip(kinds, together):
                alone = [blocks[i] for i in members]
                results = _unpool(done, alone, group_size if joined else 1)
                for i, result in zip(members, results):
                    blocks[i] = result
            return [a.from_blocks(b) for a, b in zip(axes, blocks)]

        return rebuild(dispatch.with_automatic_axes(run, leaves, numbers))[0]

    return optax.stateless(update_fn)


def _kinds(
    names: list[str], axes: list[ResolvedAxes], leaves: list[jax.Array], joint: str
) -> list[tuple[list[int], bool]]:
    """The leaves of each kind in the order of layers, and whether they are joined."""
    kinds: dict[Any, list[int]] = {}
    for i, (name, a, x) in enumerate(zip(names, axes, leaves)):
        kind = (re.sub(r"\d+", "#", name), a.fan_in, a.splits, str(x.dtype))
        kinds.setdefault(kind if re.search(joint, name) else i, []).append(i)

    def layer(i: int) -> list[int]:
        return [int(n) for n in re.findall(r"\d+", names[i])]

    return [(sorted(m, key=layer), not isinstance(k, int)) for k, m in kinds.items()]


def _pool(kind: list[list[jax.Array]], size: int) -> list[jax.Array]:
    """All matrices of one kind, in groups of ``size`` and, last, what is left over."""
    if size == 1:
        return [block for leaf in kind for block in leaf]
    pool = []
    for parts in zip(*kind):  # one block of every leaf at a time
        m, n = parts[0].shape[-2:]
        stack = jnp.concatenate([p.reshape(-1, m, n) for p in parts])
        full = len(stack) // size * size
        pool += [stack[:full].reshape(-1, size * m, n), stack[full:]]
    return pool


def _unpool(
    done: list[jax.Array], kind: list[list[jax.Array]], size: int
) -> list[list[jax.Array]]:
    """Inverse of ``_pool``: its matrices as blocks of the leaves of one kind."""
    if size == 1:
        return jax.tree.unflatten(jax.tree.structure(kind), done)
    columns = []
    for parts, joined, alone in zip(zip(*kind), done[::2], done[1::2]):
        m, n = parts[0].shape[-2:]
        stack = jnp.concatenate([joined.reshape(-1, m, n), alone])
        counts = [p.size // (m * n) for p in parts]
        pieces = jnp.split(stack, np.cumsum(counts)[:-1])
        columns.append([x.reshape(p.shape) for x, p in zip(pieces, parts)])
    return [list(leaf) for leaf in zip(*columns)]


@optimizer(ns_steps=5)
def teon(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    *,
    joint: str = ATTENTION_INPUTS,
    group_size: int | None = None,
    ns_steps: int | None = None,
    ns_coeffs: NSCoeffs = "polar_express",
    ns_dtype: DTypeLike | None = None,
    nesterov: bool = True,
    shape_scale: ShapeScale = "spectral",
    rules: MatrixRules | None = None,
    weight_decay_mask: Any = None,
    cautious_weight_decay: bool = False,
    mu_dtype: DTypeLike | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps: ArrayLike = 1e-8,
    adam_eps_root: ArrayLike | None = None,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    rest: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """TEON for the matrices, AdamW for the rest.

    Momenta of ``group_size`` consecutive layers of one kind (by default the query, key
    and value projections) are laid side by side along their inputs and orthogonalized
    as one matrix; all others are orthogonalized alone, as in Muon. See
    ``orthogonalize_jointly``.

    Args:
      joint: regular expression of the paths that are joined.
      group_size: the paper's K; None: 2.
      nesterov: use ``b1 M + (1 - b1) G`` in place of M. The paper does not say; the
        default is Muon's.

    Returns:
      The optimizer. Updates have the gradients' dtypes.

    Raises:
      ValueError: ``group_size`` below 1; ``joint`` that is no regular expression.

    References:
      Zhang et al. 2026, "TEON", arXiv:2601.23261 (no published code).

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
    >>> tx = teon(learning_rate=0.02, adam_learning_rate=3e-3)
    >>> updates, state = tx.update(params, tx.init(params), params)
    """

    def matrix(rules: MatrixRules) -> optax.GradientTransformation:
        return optax.chain(
            scale_by_momentum(b1, nesterov=nesterov, mu_dtype=mu_dtype),
            orthogonalize_jointly(
                joint, group_size, ns_steps, ns_coeffs, ns_dtype=ns_dtype, rules=rules
            ),
            scale_by_shape(shape_scale, rules=rules),
            decay_weights(weight_decay, weight_decay_mask, cautious_weight_decay),
            optax.scale_by_learning_rate(learning_rate),
        )

    return route(
        matrix,
        rules,
        learning_rate=learning_rate,
        adam_learning_rate=adam_learning_rate,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps=adam_eps,
        adam_eps_root=adam_eps_root,
        adam_weight_decay=adam_weight_decay,
        rest=rest,
        weight_decay_mask=weight_decay_mask,
        cautious_weight_decay=cautious_weight_decay,
        mu_dtype=mu_dtype,
    )
