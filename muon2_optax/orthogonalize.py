"""Replacing matrices by their approximate polar factors: a function and a transform."""

from typing import Any

import jax
import optax
from jax.typing import DTypeLike

from muon2_optax import dtypes
from muon2_optax.arguments import check_names, check_static
from muon2_optax.axes import MatrixAxes
from muon2_optax.execution import dispatch
from muon2_optax.matrices import flatten_matrices, rules_or_default
from muon2_optax.rules import MatrixRules
from muon2_optax.schedules import plans
from muon2_optax.schedules.coefficients import NSCoeffs
from muon2_optax.sharding import Shardings, check_shardings


@check_names
def newton_schulz(
    x: jax.Array,
    ns_steps: int | jax.Array | None = None,
    ns_coeffs: NSCoeffs = "keller",
    *,
    ns_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Approximate polar factor of every matrix of a stack.

    Args:
      x: array (..., m, n) of any float or complex dtype; each of the leading indices is
        a matrix of its own. A zero matrix gives exactly zero. A matrix with a
        non-finite entry gives NaN and leaves the others of the stack alone.
      ns_steps: iterations K; 0 only normalizes. None: the rows of a table, else 3. May
        be traced, at the price of a loop without the kernels.
      ns_coeffs: the name of a schedule in ``SCHEDULES``, a ``Schedule``, a triple, or
        a (K, 3) table. A triple, and the one row of a table, serves every step; of more
        rows each serves one step, and ``ns_steps`` must be their number.
      ns_dtype: dtype of the iteration's products. None: float16 on GPU, bfloat16 on
        TPU, float32 on CPU, by the platform that the program is compiled for; float64
        and complex inputs keep their own precision. The norm is taken in float32 or
        better in any case, and float32 products never use TF32 or bfloat16 passes.

    Returns:
      Array of the shape, dtype and sharding of ``x``. Matrices that Explicit axes
      divide travel in two all-to-alls, as in ``newton_schulz_orthogonalize``.

    Raises:
      ValueError: an ``x`` of fewer than two axes or of integers; ``ns_coeffs`` and
        ``ns_steps`` that ``newton_schulz_orthogonalize`` refuses as well.
      TypeError: an ``ns_dtype`` that is no real floating point dtype of 16 bits or
        more.

    References:
      Jordan et al. 2024, github.com/KellerJordan/Muon; the paper's eq. for Q_NS.
    """
    if x.ndim < 2:
        raise ValueError(f"newton_schulz needs (..., m, n), got shape {x.shape}")
    plan = plans.resolve(ns_coeffs, plans.steps_or_default(ns_steps, ns_coeffs, 3))
    axes = MatrixAxes(-2, -1).resolve(x.shape)
    return dispatch.orthogonalize_leaves(["x"], [x], [axes], plan, ns_dtype, None)[0]


@check_names
def newton_schulz_orthogonalize(
    ns_steps: int | None = None,
    ns_coeffs: NSCoeffs = "keller",
    *,
    ns_dtype: DTypeLike | None = None,
    rules: MatrixRules | None = None,
    shardings: Shardings | None = None,
) -> optax.GradientTransformation:
    """Orthogonalizes each matrix of the updates with K Newton-Schulz steps.

    Line 7 of the paper's Algorithm 1 and line 10 of Algorithm 2, whose input is the
    momentum divided by the root of the second moment. Leaves of equal matrix shape run
    as one batch. The result does not depend on the input's size.

    Args:
      ns_steps: number of iterations K; None: the rows of a table, else 3.
      ns_coeffs: the coefficients, as in ``newton_schulz``.
      ns_dtype: dtype of the products, as in ``newton_schulz``; None: float16 on GPU,
        bfloat16 on TPU, float32 on CPU.
      rules: which axes form the matrices; None: ``MatrixRules()``.
      shardings: where the parameters live, needed on meshes with Auto axes only; see
        ``Shardings``. With it, or on Explicit axes, matrices that are divided over
        devices take two all-to-alls per stored shape and no other communication.

    Returns:
      A stateless transform. Updates keep shape and dtype.

    Raises:
      ValueError: an ``ns_coeffs`` that is no name in ``SCHEDULES``, no triple and no
        (K, 3) table of finite numbers; ``ns_steps`` that is negative, no integer,
        unlike the rows of a table of two or more (one row repeats), or outside of what
        the schedule has: 2 to 5 for ``"muon2"``, at most 5 for ``"you5"``. On update,
        a leaf that is not a matrix under ``rules``; route such leaves elsewhere with
        ``optax.partition({...}, rules.labels)``.
      TypeError: an ``ns_dtype`` that is no real floating point dtype of 16 bits or
        more; ``rules`` or ``shardings`` of another type; an argument that must be known
        while tracing, and is not. On update, a leaf of integers.

    >>> import jax.numpy as jnp
    >>> tx = newton_schulz_orthogonalize(ns_steps=5)
    >>> updates, _ = tx.update({"w": jnp.eye(2) * 1e-20}, tx.init({"w": jnp.eye(2)}))
    >>> bool(jnp.allclose(updates["w"], jnp.eye(2), atol=0.32))
    True
    """
    check_static(ns_steps=ns_steps, ns_dtype=ns_dtype)
    dtypes.canonical("ns_dtype", ns_dtype)
    rules, shardings = rules_or_default(rules), check_shardings(shardings)
    plan = plans.resolve(ns_coeffs, plans.steps_or_default(ns_steps, ns_coeffs, 3))

    def update_fn(updates: optax.Updates, params: Any = None) -> optax.Updates:
        del params
        names, axes, leaves, _, rebuild = flatten_matrices(rules, updates)
        done = dispatch.orthogonalize_leaves(
            names, leaves, axes, plan, ns_dtype, shardings
        )
        return rebuild(done)[0]

    return optax.stateless(update_fn)
