"""SOAP before Newton-Schulz: Muon^2 in the eigenbases of Shampoo's factors."""

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from muon2_optax import averages, dtypes, sharding, states, trees
from muon2_optax.arguments import check_arguments
from muon2_optax.decay import decay_weights
from muon2_optax.execution import rotated_moment
from muon2_optax.matrices import (
    flatten_matrices,
    require_whole_matrix,
    rules_or_default,
)
from muon2_optax.optimizers._route import route
from muon2_optax.optimizers._shared_arguments import optimizer
from muon2_optax.orthogonalize import newton_schulz_orthogonalize
from muon2_optax.rules import MatrixRules
from muon2_optax.scaling import scale_by_shape
from muon2_optax.schedules.coefficients import NSCoeffs
from muon2_optax.shape_scales import ShapeScale
from muon2_optax.sharding import Shardings

# The defaults of Vyas et al. Most layers have shorter sides, most vocabularies longer.
FREQUENCY, LONGEST_SIDE = 10, 10_000


class SoapState(NamedTuple):
    """As ``SecondMomentState``, with nu in the eigenbases, and what these come from.

    gram_in, gram_out: L and R, (*batch, side, side); basis_in, basis_out: P and Q, zero
    before the first. A side that keeps its own axes has 1 x 1 zeros in their place.
    """

    count: jax.Array
    mu: optax.Updates
    nu: optax.Updates
    gram_in: optax.Updates
    gram_out: optax.Updates
    basis_in: optax.Updates
    basis_out: optax.Updates


@check_arguments
def scale_by_soap(
    b1: ArrayLike = 0.95,
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    *,
    shampoo_beta: ArrayLike = 0.95,
    precondition_frequency: int | None = None,
    max_precond_dim: int | None = None,
    nesterov: bool = False,
    bias_correction: bool = False,
    mu_dtype: DTypeLike | None = None,
    rules: MatrixRules | None = None,
) -> optax.GradientTransformation:
    """As ``scale_by_second_moment``, in the eigenbases of Shampoo's factors.

    For each matrix, with P and Q the eigenvectors of L and R as columns::

        M = b1 M + (1 - b1) G
        V = b2 V + (1 - b2) |P^H G Q|^2
        update = P (P^H M Q / (sqrt(V) + eps)) Q^H
        L = shampoo_beta L + (1 - shampoo_beta) G G^H        R: G^H G

    Every ``precondition_frequency`` steps, after the update, P and Q are refreshed. The
    first time they become the eigenvectors themselves; V keeps its sum, but is spread
    over them in proportion to their eigenvalues. Until then P and Q are identities, and
    this is ``scale_by_second_moment``. Later a refresh is one step of orthogonal
    iteration: the columns of P are sorted by their eigenvalues, of which l is the
    largest, and P becomes the orthonormal factor of ``(L + 1e-6 l I) P``. The second
    term keeps directions in place that are rounding noise in float32.
    ``docs/methods.md`` says what it costs, on a mesh too.

    Args:
      b1: decay rate of the momentum M.
      b2: decay rate of V.
      eps: added to sqrt(V), which is held above 1e-19 (in float32).
      shampoo_beta: decay rate of L and R.
      precondition_frequency: steps from one refresh to the next; None: 10. Not below
        the ratio of a matrix's sides: fewer gradients leave part of the longer side
        undetermined the first time.
      max_precond_dim: longer sides keep their own axes; None: 10,000.
      nesterov: use ``b1 M + (1 - b1) G`` in place of M; V is unchanged.
      bias_correction: divide M by ``1 - b1^t`` (with nesterov ``1 - b1^(t+1)``) and V
        by ``1 - b2^t``, which makes the update SOAP's.
      mu_dtype: dtype in which M is stored; None: the parameters'.
      rules: which axes form the matrices; None: ``MatrixRules()``.

    Returns:
      The transform, with state ``SoapState``, all of it but M in float32 or better.
      Derivatives take P and Q for constants.

    Raises:
      ValueError: ``precondition_frequency`` or ``max_precond_dim`` below 1, a decay
        rate outside of [0, 1), a negative eps; in ``init``, a leaf that is not a
        matrix, or whose rule splits the outputs; on update, a state whose sides keep
        other axes.

    References:
      Vyas et al. 2024, "SOAP", arXiv:2409.11321; github.com/nikhilvyas/SOAP.
    """
    mu_dtype = dtypes.canonical("mu_dtype", mu_dtype)
    frequency = _count("precondition_frequency", precondition_frequency, FREQUENCY)
    longest = _count("max_precond_dim", max_precond_dim, LONGEST_SIDE)
    rules = rules_or_default(rules)

    def init_fn(params: optax.Params) -> SoapState:
        def square(inputs: bool) -> Any:
            def leaf(name: str, p: Any) -> tuple[jax.Array, list[int | None]]:
                axes = require_whole_matrix(rules, name, p, "eigenbases")
                zeros = rotated_moment.zero_square(p, axes, inputs, longest)
                return zeros, [*axes.batch, None, None]

            return trees.map_reduced(leaf, params)

        def second(p: Any) -> jax.Array:
            return sharding.zeros_like(p, averages.second_dtype(p))

        count, mu = jnp.zeros([], jnp.int32), averages.zeros_like(params, mu_dtype)
        squares = (square(inputs) for inputs in (True, False, True, False))
        return SoapState(count, mu, jax.tree.map(second, params), *squares)

    def update_fn(updates: optax.Updates, state: Any, params: Any = None) -> Any:
        del params
        states.require_kind(state, SoapState)
        count = jnp.asarray(optax.safe_increment(state.count))
        scales = averages.corrections(b1, b2, count, nesterov, bias_correction)
        names, axes, gs, lists, rebuild = flatten_matrices(rules, updates, *state[1:])
        for name, g, mu in zip(names, gs, lists[0]):
            require_whole_matrix(rules, name, g, "eigenbases")
            states.require_shape(name, g, mu, "momentum")
        leaves = list(map(rotated_moment.Leaf, gs, *lists))
        for name, a, x in zip(names, axes, leaves):
            rotated_moment.require_squares(name, a, x, longest)
        settings = rotated_moment.Settings(
            count, b1, b2, eps, shampoo_beta, scales, frequency, nesterov
        )
        done = rotated_moment.update_leaves(axes, leaves, settings)
        columns = list(zip(*done)) or [()] * (1 + len(lists))
        updates, *trees_of_state = rebuild(*columns)
        return updates, SoapState(count, *trees_of_state)

    return optax.GradientTransformation(init_fn, update_fn)


def _count(name: str, value: Any, default: int) -> int:
    count = default if value is None else operator.index(value)
    if count < 1:
        raise ValueError(f"{name} must be 1 or more, got {count}")
    return count


@optimizer(ns_steps=3)
def soap_muon(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.95,
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    *,
    shampoo_beta: ArrayLike = 0.95,
    precondition_frequency: int | None = None,
    max_precond_dim: int | None = None,
    ns_steps: int | None = None,
    ns_coeffs: NSCoeffs = "keller",
    ns_dtype: DTypeLike | None = None,
    nesterov: bool = True,
    bias_correction: bool = False,
    shape_scale: ShapeScale = "spectral",
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
    """SOAP's preconditioner before Newton-Schulz for the matrices, AdamW for the rest.

    Muon^2 in the eigenbases of Shampoo's factors, P and Q (see ``scale_by_soap``)::

        M = b1 M + (1 - b1) G
        V = b2 V + (1 - b2) |P^H G Q|^2
        N = b1 M + (1 - b1) G
        O = NewtonSchulz(P (P^H N Q / (sqrt(V) + eps)) Q^H, K)
        W = W - learning_rate * (sqrt(fan_out / fan_in) * O + weight_decay * W)

    Args:
      shampoo_beta: decay rate of G G^H and G^H G, whose eigenvectors P and Q are.
      precondition_frequency: steps from one refresh of P and Q to the next; None: 10.
        Not below the ratio of a matrix's sides: fewer gradients leave part of the
        longer side undetermined the first time.
      max_precond_dim: longer sides keep their own axes; None: 10,000.

    Returns:
      The optimizer. Updates have the gradients' dtypes.

    Raises:
      ValueError: ``precondition_frequency`` or ``max_precond_dim`` below 1; in
        ``init``, a rule that splits the outputs.

    References:
      Vyas et al. 2024, "SOAP", arXiv:2409.11321; before Newton-Schulz in
      github.com/KellerJordan/modded-nanogpt, pull requests 278 and 321.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
    >>> tx = soap_muon(learning_rate=0.02, adam_learning_rate=3e-3)
    >>> updates, state = tx.update(params, tx.init(params), params)
    """

    def matrix(rules: MatrixRules) -> optax.GradientTransformation:
        return optax.chain(
            scale_by_soap(
                b1,
                b2,
                eps,
                shampoo_beta=shampoo_beta,
                precondition_frequency=precondition_frequency,
                max_precond_dim=max_precond_dim,
                nesterov=nesterov,
                bias_correction=bias_correction,
                mu_dtype=mu_dtype,
                rules=rules,
            ),
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
