"""Functions of one leaf that are traced and lowered once for all leaves of a shape.

A step has hundreds of leaves of few shapes, and JAX takes as long to trace and to
lower them as XLA takes to compile what is left. Calls are inlined there, so that the
programs are the same.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def once(fn: Callable[P, R]) -> Callable[P, R]:
    """``fn`` under ``jax.jit``, with its keyword-only parameters as static ones.

    While something is traced only: outside, each new setting would be compiled. And not
    where a setting is an array, as under ``optax.inject_hyperparams``: numbers known
    while tracing are computed with in Python, in higher precision.
    """
    kinds = inspect.signature(fn).parameters.items()
    settings = [n for n, p in kinds if p.kind is inspect.Parameter.KEYWORD_ONLY]
    shared = jax.jit(fn, static_argnames=settings)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))
        run = shared if traced and _hashable(kwargs.values()) else fn
        return run(*args, **kwargs)

    return call


def _hashable(values: Iterable[Any]) -> bool:
    try:
        hash(tuple(values))
    except TypeError:
        return False
    return True
