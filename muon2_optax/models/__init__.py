"""What each parameter is, asked of the model itself: the door to the frameworks.

Each framework has a module here that finds the model's leaves and what its modules say
of them. None of the frameworks is imported: their modules are known by the names of
their types, and a model that comes from a framework has imported it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from muon2_optax.models import equinox, linen, nnx
from muon2_optax.models.layers import Found
from muon2_optax.models.logical_axes import LOGICAL_AXES
from muon2_optax.models.settle import leaf_rules as leaf_rules
from muon2_optax.models.walk import Given


def find(
    model: Any,
    inputs: tuple[Any, ...],
    keywords: Mapping[str, Any],
    modules: Given,
    axis_names: Mapping[str, str],
) -> tuple[list[Found], tuple[str, ...]]:
    """A model's leaves with what is known of them, and what may precede their paths.

    That is nothing, or for Linen also ``"params/"``, the collection around its leaves.

    Raises:
      TypeError: the model is of no kind that can be asked.
      ValueError: ``modules`` names a parameter that the model does not have.
    """
    table = {**LOGICAL_AXES, **axis_names}
    before = ("",)
    if linen.is_module(model):
        if not inputs and not keywords:
            raise TypeError(
                "a Linen module has no parameters before it runs: give example inputs,"
                " MatrixRules.of(module, *inputs), as arrays or jax.ShapeDtypeStruct"
            )
        variables, seen = linen.run(model, inputs, keywords)
        found = list(linen.find(variables, seen, modules, table))
        before = ("", "params/")
    elif inputs or keywords:
        raise TypeError("example inputs are for a Linen module only")
    elif _any(nnx.is_module, model):
        found = list(nnx.find(model, modules, table))
    elif _any(equinox.is_module, model):
        found = list(equinox.find(model, modules))
    elif isinstance(model, Mapping) and linen.is_boxed(model):
        found = list(linen.find(model, {}, modules, table))
        before = ("", "params/")
    else:
        raise TypeError(_refusal(model))
    _check_given(found, modules)
    return found, before


def _check_given(found: Sequence[Found], modules: Given) -> None:
    used = {leaf.weight.given_as for leaf in found if leaf.weight is not None}
    for key, given in modules.items():
        for path in given:
            if (key, path) not in used:
                name = key if isinstance(key, str) else key.__name__
                owners = ", ".join(dict.fromkeys(x.owner for x in found if x.owner))
                raise ValueError(
                    f"modules={{{name}: {{{path!r}: ...}}}} matches no parameter; the"
                    f" modules with parameters are {owners}"
                )


def _any(is_module: Callable[[Any], bool], model: Any) -> bool:
    """Whether the model is a module, or a container of modules."""
    if is_module(model):
        return True
    return any(map(is_module, jax.tree.leaves(model, is_leaf=is_module)))


def _refusal(model: Any) -> str:
    kind = f"{type(model).__module__}.{type(model).__name__}"
    takes = (
        "MatrixRules.of takes a Flax NNX model, an Equinox model, a Linen module with"
        " example inputs, or Linen variables with logical axis names in boxes"
    )
    if type(model).__module__.split(".")[0] == "haiku":
        return (
            f"{kind} is a pair of functions, without modules to ask. {takes}. For"
            " Haiku, use MatrixRules(), which goes by the names of the parameters"
        )
    return (
        f"{kind} does not say what its leaves are. {takes}. For a plain tree of arrays,"
        " use MatrixRules(), which goes by the names of the parameters"
    )
