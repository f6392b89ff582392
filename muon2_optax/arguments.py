"""Checks arguments by their names, where transforms and optimizers are made.

Numbers that are known are checked then. Of JAX's arrays, which may be traced or
injected as hyperparameters, only the shape is known; schedules pass.

Some arguments decide which program is traced: step counts, sizes, dtypes, masks. They
must be known while tracing, and ``optax.inject_hyperparams`` stands in the way: among a
factory's arguments, defaults included, it makes an array of every number and calls
every callable with the step, and a jitted step gets these arrays traced. A traced step
count cannot be checked, and would need a slower program that works for any number. So
such arguments default to None, which Optax leaves alone, and are refused when traced.
"""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar, get_args

import jax
import numpy as np

from muon2_optax import trees
from muon2_optax.schedules.plans import steps_or_default

P = ParamSpec("P")
R = TypeVar("R")

# Decay rates of moving averages.
DECAY_RATES = ("b1", "b2", "shampoo_beta", "adam_b1", "adam_b2", "decay")
NOT_NEGATIVE = ("eps", "eps_root", "adam_eps", "adam_eps_root", "rms")
# Numbers or schedules of them. Negative ones would go uphill, or away from the mean
# step; what a schedule gives is not known here.
SCHEDULED = (
    "learning_rate",
    "adam_learning_rate",
    "weight_decay",
    "adam_weight_decay",
    "beta",
)
CHECKED = (*DECAY_RATES, *NOT_NEGATIVE, *SCHEDULED, "dampening", "period")
TRANSFORMATIONS = ("tx", "inner", "seldom", "often")
# Arguments that decide which program is traced, in the order in which errors name them.
STATIC = (
    "rank_fraction",
    "seed",
    "group_size",
    "precondition_frequency",
    "max_precond_dim",
    "ns_steps",
    "ns_coeffs",
    "ns_dtype",
    "mu_dtype",
    "nu_dtype",
    "weight_decay_mask",
    "mask",
)
# These are never arrays, except under inject_hyperparams, which calls dtypes and
# functions with the step.
NEVER_ARRAYS = ("dtype", "mask")
# What to give in place of another library's argument. Each text begins with the name of
# an argument of ours; errors of functions without that argument leave the text out.
OTHER_NAMES = {
    "beta": ("b1",),
    "beta1": ("b1",),
    "beta2": ("b2",),
    "betas": ("b1", "b2"),
    "momentum": ("b1",),
    "mu": ("b1",),
    "lr": ("learning_rate",),
    "adam_lr": ("adam_learning_rate",),
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

# Where no second moment has a dtype to choose: "mu_dtype", the closest name, is none.
NO_NU_DTYPE = (
    "no dtype of a second moment can be chosen here; mu_dtype is that of the momentum"
)

_NS_COEFFS_HINT = (
    "; ns_coeffs, the second positional argument of optax.contrib.muon, is given by"
    " name here"
)


def check_arguments(
    factory: Callable[P, R],
    ns_steps: int | None = None,
    missing: Mapping[str, str] = MappingProxyType({}),
) -> Callable[P, R]:
    """Checks the arguments of ``factory`` before it is called.

    Args:
      factory: a function that makes a transform or an optimizer.
      ns_steps: what it gets where its keyword argument ``ns_steps`` is None and
        ``ns_coeffs`` is no table, which has a number of rows.
      missing: arguments that similar functions have and ``factory`` does not, and what
        the error says about each.

    Raises:
      TypeError: an argument under another name, as one of another library or misspelt;
        what is no number: of another type, or an array of several; or what must be
        known while tracing, and is not.
      ValueError: a decay rate outside of [0, 1), a negative eps or rate, or None for a
        number.
    """
    parameters = inspect.signature(factory).parameters

    @functools.wraps(factory)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        _require_known(factory.__name__, parameters, kwargs, missing)
        given = dict(zip(parameters, args)) | kwargs
        for name, value in given.items():
            check(name, value, optional=_is_optional(parameters.get(name)))
        check_static(**{name: given[name] for name in STATIC if name in given})
        if ns_steps is not None and given.get("ns_steps") is None:
            coeffs = given.get("ns_coeffs", "keller")
            kwargs["ns_steps"] = steps_or_default(None, coeffs, ns_steps)
        return factory(*args, **kwargs)

    return call


def check_names(function: Callable[P, R]) -> Callable[P, R]:
    """Checks only the names of the arguments of ``function`` before it is called."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        _require_known(function.__name__, parameters, kwargs)
        return function(*args, **kwargs)

    return call


def check(name: str, value: Any, optional: bool = False) -> None:
    """Checks one argument; names that no table has, and None if ``optional``, pass."""
    if name in TRANSFORMATIONS and not hasattr(value, "update"):
        raise TypeError(
            f"{name} must be an optax.GradientTransformation, such as"
            f" optax.sgd(0.1), got {trees.show(value)}"
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
        got = f"an array of shape {shape}" if shape else trees.show(value)
        hint = _NS_COEFFS_HINT if name == "b1" else ""
        raise TypeError(f"{name} must be {wanted}, got {got}{hint}")
    if not (_is_number(value) or isinstance(value, np.ndarray)):
        return
    if name in DECAY_RATES and not 0 <= value < 1:
        raise ValueError(f"{name} must lie in [0, 1), got {value}")
    if name in (*NOT_NEGATIVE, *SCHEDULED) and not value >= 0:
        raise ValueError(f"{name} must be 0 or more, got {value}")


def check_static(**arguments: Any) -> None:
    """Refuses arguments that are traced, all of them in one sentence.

    So is a mask that is one bool. It comes from ``optax.inject_hyperparams``, which has
    called a function of the parameters with the step: taken as it is, it would put
    weight decay on all parameters, or on none.

    Raises:
      TypeError: it says which ``static_args`` Optax has to be given.
    """
    for name, x in arguments.items():
        if name.endswith("mask") and isinstance(x, bool):
            raise TypeError(
                f"{name} is {x}, not a tree of bools or a function; under"
                f" optax.inject_hyperparams, which calls functions with the step, pass"
                f" static_args=({name!r},)"
            )
    arrays = {n: x for n, x in arguments.items() if isinstance(x, jax.Array)}
    if any(
        isinstance(x, jax.core.Tracer) or n.endswith(NEVER_ARRAYS)
        for n, x in arrays.items()
    ):
        names = tuple(arrays)
        raise TypeError(
            f"{' and '.join(names)} must be known while tracing, but arrived as"
            f" {'an array' if len(names) == 1 else 'arrays'}; under"
            f" optax.inject_hyperparams pass static_args={names!r}"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int | np.number) and not isinstance(value, bool)


def _is_optional(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and type(None) in get_args(parameter.annotation)


def _require_known(
    function: str,
    parameters: Mapping[str, inspect.Parameter],
    given: Collection[str],
    missing: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Refuses a name that is no parameter's and says what to give in its place.

    A name that resembles no parameter's is left to Python's own error.
    """
    for name in given:
        if name in parameters:
            continue
        no_such = f"{function} has no argument {name!r}"
        here = _instead_of(name, parameters)
        if here:
            raise TypeError(f"{no_such}: give {' and '.join(here)}")
        if name in missing:
            raise TypeError(f"{no_such}: {missing[name]}")
        if name == "nu_dtype" and "mu_dtype" in parameters:
            raise TypeError(f"{no_such}: {NO_NU_DTYPE}")
        close = difflib.get_close_matches(name, parameters, 1)
        if close:
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}; did you"
                f" mean {close[0]!r}?"
            )


def _instead_of(name: str, parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """What a function of these parameters takes in place of another library's name."""
    names = OTHER_NAMES.get(name, ())
    return [text for text in names if re.split(r"\W", text)[0] in parameters]
