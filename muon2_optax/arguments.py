"""Arguments are checked by their names, where transforms and optimizers are made.

Numbers that are known are checked then; arrays, which may be traced or injected as
hyperparameters, and schedules pass.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")

# Of moving averages.
DECAY_RATES = ("b1", "b2", "adam_b1", "adam_b2", "decay")
NOT_NEGATIVE = ("eps", "eps_root", "adam_eps", "adam_eps_root")
LEARNING_RATES = ("learning_rate", "adam_learning_rate")
# What the same thing is called elsewhere.
OTHER_NAMES = {
    "beta": "b1",
    "beta1": "b1",
    "beta2": "b2",
    "betas": "b1 and b2",
    "momentum": "b1",
    "mu": "b1",
    "lr": "learning_rate",
    "epsilon": "eps",
    "consistent_rms": "shape_scale=MatchRMS(...)",
    "preconditioning": "ns_coeffs=Schedule(..., normalization=...)",
    "muon_weight_dimension_numbers": "rules=MatrixRules.from_dimension_numbers(...)",
}

_SECOND = (
    "; ns_coeffs, the second positional argument of optax.contrib.muon, is given by"
    " name here"
)


def check_arguments(factory: Callable[P, R]) -> Callable[P, R]:
    """``factory``, its arguments checked before it is called.

    Raises:
      TypeError: an argument under the name that another library gives it, or of a type
        that cannot be a number.
      ValueError: a decay rate outside of [0, 1), a negative eps, or no learning rate.
    """
    parameters = inspect.signature(factory).parameters

    @functools.wraps(factory)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in parameters and name in OTHER_NAMES:
                raise TypeError(
                    f"{factory.__name__} has no argument {name!r}: give"
                    f" {OTHER_NAMES[name]}"
                )
        for name, value in [*zip(parameters, args), *kwargs.items()]:
            check(name, value, optional=_is_optional(parameters.get(name)))
        return factory(*args, **kwargs)

    return call


def check(name: str, value: Any, optional: bool = False) -> None:
    """Checks one argument; those of other names, and None if ``optional``, pass."""
    if name not in (*DECAY_RATES, *NOT_NEGATIVE, *LEARNING_RATES):
        return
    if value is None and optional:
        return
    wanted = "a number or a schedule" if name in LEARNING_RATES else "a number"
    if value is None:
        raise ValueError(f"{name} must be {wanted}, got None")
    if isinstance(value, str | list | tuple | dict):
        hint = _SECOND if name == "b1" else ""
        raise TypeError(f"{name} must be {wanted}, got {value!r}{hint}")
    if callable(value) and name not in LEARNING_RATES:
        raise TypeError(
            f"{name} must be a number, got a function; optax.inject_hyperparams takes"
            " schedules for it"
        )
    if not isinstance(value, float | int | np.floating | np.integer):
        return
    if name in DECAY_RATES and not 0 <= value < 1:
        raise ValueError(f"{name} must lie in [0, 1), got {value}")
    if name in NOT_NEGATIVE and not value >= 0:
        raise ValueError(f"{name} must be 0 or more, got {value}")


def _is_optional(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and parameter.default is None
