"""MuonEq: rows and columns of the momentum are equalized before Newton-Schulz."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from muon2_optax import dtypes, roots, trees
from muon2_optax.arguments import check_names
from muon2_optax.axes import ResolvedAxes
from muon2_optax.decay import decay_weights
from muon2_optax.matrices import require_matrix, rules_or_default
from muon2_optax.moments import scale_by_momentum
from muon2_optax.optimizers._route import route
from muon2_optax.optimizers._shared_arguments import optimizer
from muon2_optax.orthogonalize import newton_schulz_orthogonalize
from muon2_optax.rules import MatrixRules
from muon2_optax.scaling import scale_by_shape
from muon2_optax.schedules.coefficients import NSCoeffs
from muon2_optax.shape_scales import ShapeScale
from muon2_optax.sharding import Shardings

Form = Literal["roots", "sweeps"]
FORMS = ("roots", "sweeps")
# The form "sweeps" makes so many sweeps, and limits the factors of each to this.
SWEEPS, LARGEST = 2, 4.0


@check_names
def equilibrate(
    form: Form = "roots", *, rules: MatrixRules | None = None
) -> optax.GradientTransformation:
    """Scales the rows and the columns of each matrix towards equal sizes.

    Does without state what ``factorized_second_moment`` does: the statistics are those
    of the matrix itself, not an average over steps. It stands before
    ``newton_schulz_orthogonalize``.

    Args:
      form: one of

        - ``"roots"``: ``diag(M M^T)^(-1/4) M diag(M^T M)^(-1/4)``: each row and each
          column is divided by the root of its own norm, both norms taken from M,
        - ``"sweeps"``: M is scaled to a root mean square of 1. Then, twice, the weights
          of every output are divided by their root mean square, and after them those of
          every input; each divisor is held within 1/4 and 4. (Outputs come first
          because published codes store them as rows, and begin with the rows.)

      rules: which axes form the matrices; None: ``MatrixRules()``.

    Returns:
      A stateless transform. Updates keep their dtype, and do not depend on the size of
      M (1e-30 to 1e30 in float32). Zero rows, columns and matrices stay zero.

    Raises:
      ValueError: an unknown form; on update, a leaf that is not a matrix.

    References:
      "MuonEq", arXiv:2603.28254, for the first form; the second is that of the Arbor
      optimizer.

    >>> import jax.numpy as jnp
    >>> tx = equilibrate()
    >>> m = {"w": jnp.array([[1.0, 0.0], [0.0, 100.0]])}
    >>> updates, _ = tx.update(m, tx.init(m))
    >>> bool(jnp.allclose(updates["w"], jnp.eye(2)))
    True
    """
    rules = rules_or_default(rules)
    if not isinstance(form, str) or form not in FORMS:
        raise ValueError(f"unknown form {trees.show(form)}; known: {FORMS}")
    scale = _by_roots if form == "roots" else _by_sweeps

    def update_fn(updates: optax.Updates, params: Any = None) -> optax.Updates:
        del params

        def leaf(name: str, m: jax.Array) -> tuple[jax.Array]:
            axes = require_matrix(rules, name, m)
            wide = dtypes.widen(m)
            # Entries of at most 1: their squares are in the range of float32.
            x = wide / roots.replace_zero(_largest(wide, axes))
            return (dtypes.narrow(scale(x, axes), m.dtype),)

        return trees.map_leaves(leaf, updates)[0]

    return optax.stateless(update_fn)


def _by_roots(x: jax.Array, axes: ResolvedAxes) -> jax.Array:
    rows, columns = _mean_squares(x, axes)
    sizes = jnp.asarray(axes.per_output(axes.splits), rows.dtype)
    # The fourth roots of the sums are the roots of the norms.
    along = roots.fourth_root(rows * sizes)
    return x / roots.replace_zero(along * roots.fourth_root(columns * axes.fan_in))


def _by_sweeps(x: jax.Array, axes: ResolvedAxes) -> jax.Array:
    rows, _ = _mean_squares(x, axes)
    # The mean of the rows' means. Where outputs are split, each has its block's.
    size = roots.sqrt(jnp.sum(rows / axes.fan_in, axis=axes.ins, keepdims=True))
    x = x / roots.replace_zero(size)
    for _ in range(SWEEPS):
        x = x / _limited_root(_mean_squares(x, axes)[1])
        x = x / _limited_root(_mean_squares(x, axes)[0])
    return x


def _limited_root(mean_square: jax.Array) -> jax.Array:
    """What a row or column is divided by; zero ones stay zero whatever it is."""
    return jnp.clip(roots.sqrt(mean_square), 1 / LARGEST, LARGEST)


def _mean_squares(x: jax.Array, axes: ResolvedAxes) -> tuple[jax.Array, jax.Array]:
    """Mean squares of rows (in each block) and of columns, in shapes that divide x."""
    square = dtypes.squared_magnitude(x)
    sizes = jnp.asarray(axes.per_output(axes.splits), square.dtype)
    rows = axes.by_block(axes.sums(square / sizes, axes.outs))
    return rows, jnp.sum(square / axes.fan_in, axis=axes.ins, keepdims=True)


def _largest(x: jax.Array, axes: ResolvedAxes) -> jax.Array:
    """The largest magnitude of each matrix, in a shape that divides x."""
    columns = jnp.max(jnp.abs(x), axis=axes.ins, keepdims=True)
    blocks = range(len(axes.splits))
    owners = jnp.asarray(axes.per_output(blocks))
    largest = [
        jnp.max(jnp.where(owners == k, columns, 0), axis=axes.outs, keepdims=True)
        for k in blocks
    ]
    return axes.by_block(largest)


@optimizer(ns_steps=5)
def muon_eq(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    *,
    form: Form = "roots",
    ns_steps: int | None = None,
    ns_coeffs: NSCoeffs = "keller",
    ns_dtype: DTypeLike | None = None,
    nesterov: bool = True,
    shape_scale: ShapeScale = "keller",
    rules: MatrixRules | None = None,
    shardings: Shardings | None = None,
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
    """MuonEq for the matrices, AdamW for the rest.

    For each matrix W with gradient G::

        M = b1 M + (1 - b1) G
        N = b1 M + (1 - b1) G
        E = diag(N N^T)^(-1/4) N diag(N^T N)^(-1/4)
        O = NewtonSchulz(E, K)
        W = W - learning_rate * (sqrt(max(1, fan_out / fan_in)) * O + weight_decay * W)

    Args:
      form: how rows and columns are equalized, ``"roots"`` or ``"sweeps"``; see
        ``equilibrate``.

    Returns:
      The optimizer. Updates have the gradients' dtypes.

    Raises:
      ValueError: an unknown ``form``.

    References:
      "MuonEq", arXiv:2603.28254.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
    >>> tx = muon_eq(learning_rate=0.02, adam_learning_rate=3e-3)
    >>> updates, state = tx.update(params, tx.init(params), params)
    """

    def matrix(rules: MatrixRules) -> optax.GradientTransformation:
        return optax.chain(
            scale_by_momentum(b1, nesterov=nesterov, mu_dtype=mu_dtype),
            equilibrate(form, rules=rules),
            newton_schulz_orthogonalize(
                ns_steps, ns_coeffs, ns_dtype=ns_dtype, rules=rules, shardings=shardings
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
        shardings=shardings,
    )
