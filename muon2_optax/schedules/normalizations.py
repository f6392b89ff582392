"""What may be done to a matrix before the first Newton-Schulz step.

The iteration needs singular values in [0, 1], and fewer steps if they are near 1.
"""

import dataclasses
import math
from typing import Any

import jax

from muon2_optax import trees
from muon2_optax.options import is_real_number


def _check_not_negative(how: Any) -> None:
    """Refuses fields that are not one finite number, 0 or more.

    Of a number that is traced nothing else is known.
    """
    for field in dataclasses.fields(how):
        value = getattr(how, field.name)
        traced = isinstance(value, jax.core.Tracer)
        # Converted to a float first: inside jax.jit the comparison of an array is
        # traced, even if its value is known.
        if not is_real_number(value) or not (traced or 0 <= float(value) < math.inf):
            raise ValueError(
                f"{field.name} of {type(how).__name__} must be 0 or more, and finite,"
                f" got {trees.show(value)}"
            )


@dataclasses.dataclass(frozen=True)
class Frobenius:
    """Divide each matrix by ``max(factor * ||X||_F + eps, floor)``.

    The Frobenius norm bounds the largest singular value, so the result lies in the
    interval [0, 1] on which the iteration converges. With ``eps`` and ``floor`` at 0
    (the default) the result does not depend on the size of X; published codes add 1e-7
    or, as ``torch.optim.Muon``, clamp. A zero matrix stays zero either way.

    Raises:
      ValueError: a field is no finite number, or a negative one.
    """

    factor: float = 1.0
    eps: float = 0.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_not_negative(self)


@dataclasses.dataclass(frozen=True)
class AOL:
    """Scale row i of the wide X by ``(sum_j |X X^H|_ij) ** -0.5``.

    Almost-orthogonal-layer scaling (Prach and Lampert 2022), as Turbo-Muon uses it: it
    bounds the spectral norm by 1, more tightly than the Frobenius norm, and the first
    step uses its Gram matrix again. It acts on one side only: on the shorter axis, and
    for a square matrix on the outputs (the last axis). So the result of the iteration
    is close to the polar factor of X but biased by the row sizes. ``eps`` bounds the
    row sums from below, in units of X squared; 0 (the default) makes the result
    independent of the size of X.

    Raises:
      ValueError: ``eps`` is no finite number, or a negative one.
    """

    eps: float = 0.0

    def __post_init__(self) -> None:
        _check_not_negative(self)


@dataclasses.dataclass(frozen=True)
class Schatten:
    """Divide each matrix by its Schatten 4-norm, ``||X X^H||_F ** 0.5``.

    The fourth root of the sum of the singular values' fourth powers (Grishina et al.
    2025, arXiv:2506.10935). It lies between the spectral and the Frobenius norm, so the
    singular values end in [0, 1] and nearer to 1 than with the Frobenius norm. The
    first step uses its Gram matrix again. ``eps`` bounds the norm of X X^H from below,
    in units of X squared; 0 (the default) makes the result independent of the size
    of X.

    Raises:
      ValueError: ``eps`` is no finite number, or a negative one.
    """

    eps: float = 0.0

    def __post_init__(self) -> None:
        _check_not_negative(self)


@dataclasses.dataclass(frozen=True)
class Spectral:
    """Divide each matrix by ``||X||_2 + eps``, its largest singular value.

    The tightest of all, and the most expensive: it takes the eigenvalues of every
    X X^H, in float32 or better. On accelerators that costs more than the iteration
    that it shortens.

    Raises:
      ValueError: ``eps`` is no finite number, or a negative one.
    """

    eps: float = 0.0

    def __post_init__(self) -> None:
        _check_not_negative(self)


Normalization = Frobenius | AOL | Schatten | Spectral
