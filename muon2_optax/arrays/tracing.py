"""Decorators for functions of leaves: leaves that are alike share one trace.

A step has hundreds of leaves of few shapes. If each were traced and lowered by itself,
JAX would take as long as XLA takes to compile the step. XLA inlines the calls, so the
compiled program is the same either way.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax

from muon2_optax.arrays import limits
from muon2_optax.arrays.grouping import consecutive

P = ParamSpec("P")
R = TypeVar("R")


def once(fn: Callable[P, R]) -> Callable[P, R]:
    """Puts ``fn`` under ``jax.jit``, with its keyword-only parameters as static ones.

    They are static because numbers that are known while tracing are computed with in
    Python, in higher precision. Where one of them is an array, as under
    ``optax.inject_hyperparams``, ``fn`` runs as it is. So it does where nothing is
    traced, because each new setting would be compiled.
    """
    return _share_traces(fn, _settings(fn))


def each(fn: Callable[..., R]) -> Callable[..., list[R]]:
    """Makes of a function of one leaf a function of lists of leaves of one length.

    It returns ``[fn(*row) for row in zip(*lists)]``, with keyword-only parameters as in
    ``once``. Successive rows of equal shapes and dtypes share a call,
    ``limits.LEAVES_PER_CALL`` at a time, and equal calls share a trace.
    """
    leaf = once(fn)

    def few(*rows: Sequence[jax.Array], **kwargs: Any) -> list[R]:
        return [leaf(*row, **kwargs) for row in rows]

    few.__name__ = fn.__name__  # for profiles
    together = _share_traces(few, _settings(fn))

    def kind(row: Sequence[jax.Array]) -> Any:
        # Rows that are not traced are kept out of the calls, which would compile them.
        return _is_traced(row), [(x.shape, x.dtype) for x in row]

    @functools.wraps(fn)
    def call(*lists: Iterable[jax.Array], **kwargs: Any) -> list[R]:
        groups = consecutive(
            zip(*lists, strict=True), kind, lambda _: limits.LEAVES_PER_CALL
        )
        return [y for group in groups for y in together(*group, **kwargs)]

    return call


def _settings(fn: Callable[..., Any]) -> list[str]:
    """The names of the keyword-only parameters."""
    kinds = inspect.signature(fn).parameters.items()
    return [n for n, p in kinds if p.kind is inspect.Parameter.KEYWORD_ONLY]


def _share_traces(fn: Callable[P, R], settings: Sequence[str]) -> Callable[P, R]:
    shared = jax.jit(fn, static_argnames=settings)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        run = shared if _is_traced(args) and _are_hashable(kwargs.values()) else fn
        return run(*args, **kwargs)

    return call


def _is_traced(args: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))


def _are_hashable(values: Iterable[Any]) -> bool:
    try:
        hash(tuple(values))
    except TypeError:
        return False
    return True
