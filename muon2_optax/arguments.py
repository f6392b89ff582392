"""Arguments are checked by their names, where transforms and optimizers are made.

Numbers that are known are checked then. Of JAX's arrays, which may be traced or
injected as hyperparameters, only the shape is known; schedules pass.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, get_args

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")

# Of moving averages.
DECAY_RATES = ("b1", "b2", "shampoo_beta", "adam_b1", "adam_b2", "decay")
NOT_NEGATIVE = ("eps", "eps_root", "adam_eps", "adam_eps_root", "rms")
# Numbers or schedules of them.
SCHEDULED = (
    "learning_rate",
    "adam_learning_rate",
    "weight_decay",
    "adam_weight_decay",
    "beta",
)
CHECKED = (*DECAY_RATES, *NOT_NEGATIVE, *SCHEDULED, "dampening", "period")
TRANSFORMATIONS = ("tx", "inner", "seldom", "often")
# What to give in place of another library's argument. Each begins with the argument's
# name, and is said by the functions that have this argument.
OTHER_NAMES = {
    "beta": ("b1",),
    "beta1": ("b1",),
    "beta2": ("b2",),
    "betas": ("b1", "b2"),
    "momentum": ("b1",),
    "mu": ("b1",),
    "lr": ("learning_rate",),
    "epsilon": ("eps",),
    "mask": ("weight_decay_mask",),
    "eps": (
        "adam_eps for AdamW",
        "ns_coeffs=Schedule(..., normalization=Frobenius(eps=...)) for the norm",
    ),
    "ns_coefficients": ("ns_coeffs",),
    "adjust_lr_fn": ('shape_scale="keller" or "match_rms"',),
    "consistent_rms": ("shape_scale=MatchRMS(...)",),
    "preconditioning": ("ns_coeffs=Schedule(..., normalization=...)",),
    "muon_weight_dimension_numbers": ("rules=MatrixRules.from_dimension_numbers(...)",),
    "weight_dimension_numbers": ("rules=MatrixRules.from_dimension_numbers(...)",),
}

_SECOND = (
    "; ns_coeffs, the second positional argument of optax.contrib.muon, is given by"
    " name here"
)


def check_arguments(factory: Callable[P, R]) -> Callable[P, R]:
    """``factory``, its arguments checked before it is called.

    Raises:
      TypeError: an argument under the name that another library gives it, or what is
        no number: of another type, or an array of several.
      ValueError: a decay rate outside of [0, 1), a negative eps, or None for a number.
    """
    parameters = inspect.signature(factory).parameters

    @functools.wraps(factory)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            here = [] if name in parameters else _instead_of(name, parameters)
            if here:
                raise TypeError(
                    f"{factory.__name__} has no argument {name!r}: give"
                    f" {' and '.join(here)}"
                )
        for name, value in [*zip(parameters, args), *kwargs.items()]:
            check(name, value, optional=_is_optional(parameters.get(name)))
        return factory(*args, **kwargs)

    return call


def check(name: str, value: Any, optional: bool = False) -> None:
    """Checks one argument; those of other names, and None if ``optional``, pass."""
    if name in TRANSFORMATIONS and not hasattr(value, "update"):
        raise TypeError(
            f"{name} must be an optax.GradientTransformation, such as"
            f" optax.sgd(0.1), got {value!r}"
        )
    if name not in CHECKED or (value is None and optional):
        return
    wanted = "a number or a schedule" if name in SCHEDULED else "a number"
    if value is None:
        raise ValueError(f"{name} must be {wanted}, got None")
    if callable(value):
        if name in SCHEDULED:
            return
        raise TypeError(
            f"{name} must be a number, got a function; optax.inject_hyperparams takes"
            " schedules for it"
        )
    shape = () if _is_number(value) else getattr(value, "shape", None)
    if shape != ():
        got = f"an array of shape {shape}" if shape else repr(value)
        hint = _SECOND if name == "b1" else ""
        raise TypeError(f"{name} must be {wanted}, got {got}{hint}")
    if not (_is_number(value) or isinstance(value, np.ndarray)):
        return
    if name in DECAY_RATES and not 0 <= value < 1:
        raise ValueError(f"{name} must lie in [0, 1), got {value}")
    if name in NOT_NEGATIVE and not value >= 0:
        raise ValueError(f"{name} must be 0 or more, got {value}")


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int | np.number) and not isinstance(value, bool)


def _is_optional(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and type(None) in get_args(parameter.annotation)


def _instead_of(name: str, parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """What stands for another library's argument, of a function of these parameters."""
    names = OTHER_NAMES.get(name, ())
    return [text for text in names if re.split(r"\W", text)[0] in parameters]
