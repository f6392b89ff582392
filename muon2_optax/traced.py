"""Functions of one leaf that are traced and lowered once for all leaves of a shape.

A step has hundreds of leaves of few shapes, and JAX takes as long to trace and to
lower them as XLA takes to compile what is left. Calls are inlined there, so that the
programs are the same.
"""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def once(fn: Callable[P, R]) -> Callable[P, R]:
    """``fn`` under ``jax.jit``, with its keyword-only parameters as static ones.

    Where one of them is an array, as under ``optax.inject_hyperparams``, it runs as it
    is: numbers known while tracing are computed with in Python, in higher precision.
    """
    kinds = inspect.signature(fn).parameters.items()
    settings = [n for n, p in kinds if p.kind is inspect.Parameter.KEYWORD_ONLY]
    shared = jax.jit(fn, static_argnames=settings)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            hash(tuple(kwargs.values()))
        except TypeError:
            return fn(*args, **kwargs)
        return shared(*args, **kwargs)

    return call
