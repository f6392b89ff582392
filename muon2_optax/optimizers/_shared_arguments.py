"""The arguments that optimizers share: described once, and checked by their names.

Each optimizer's docstring describes the arguments that only it has, or that mean
something else there; ``optimizer`` adds the others from ``SHARED``, in the order of the
signature. An argument that neither describes is an error of the import.
"""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ParamSpec, TypeVar

from muon2_optax.arguments import check_arguments
from muon2_optax.optimizers import _docstrings as docstrings

P = ParamSpec("P")
R = TypeVar("R")

# How many Newton-Schulz steps each optimizer takes where none are given. ``optimizer``
# fills it; the defaults of the signatures are None (``arguments`` says why).
NS_STEPS: dict[str, int] = {}

SHARED = {
    "learning_rate": "step size or schedule, of the order of 0.01 to 0.06.",
    "b1": "decay rate of the momentum M.",
    "b2": "decay rate of the second moment.",
    "eps": "added to the root of the second moment; see ``scale_by_second_moment``.",
    "weight_decay": (
        "rate or schedule, decoupled: multiplied by the learning rate but not by the"
        " shape factor (as in AdamW)."
    ),
    "ns_steps": (
        "number of Newton-Schulz iterations K; None: rows of a table, else {steps}."
    ),
    "ns_coeffs": (
        "their coefficients: a name in ``SCHEDULES``, a ``Schedule``, a triple or a"
        " (K, 3) table. A ``Schedule`` also says how the input is normalized, which"
        ' Optax calls preconditioning. ``"quintic"`` is the one triple (2, -1.5, 0.5);'
        " elsewhere (Emerging-Optimizers, Megatron) the name stands for five triples,"
        ' which are ``"you5"`` here.'
    ),
    "ns_dtype": (
        "dtype of their products; None: float16 on GPU, bfloat16 on TPU, float32 on"
        " CPU."
    ),
    "nesterov": "use ``b1 M + (1 - b1) G`` in place of M.",
    "bias_correction": (
        "correct the moments for their start at zero (matters only through eps, since"
        " the size of M / sqrt(V) drops out)."
    ),
    "shape_scale": (
        'factor by the matrix\'s shape: ``"spectral"``, sqrt(fan_out / fan_in);'
        ' ``"keller"``, sqrt(max(1, fan_out / fan_in)); ``"match_rms"`` and'
        " ``MatchRMS(rms)``, by which updates of all shapes have the root mean square"
        ' 0.2 or rms; ``"none"``; or a function of (fan_in, fan_out). Elsewhere'
        ' (Emerging-Optimizers, Megatron) ``"spectral"`` is sqrt(max(fan_in, fan_out)),'
        " which is ``MatchRMS(1.0)`` here; no spectral norm is taken. See"
        " ``scale_by_shape``."
    ),
    "rules": (
        "which leaves are matrices, and along which axes; None: ``MatrixRules()``,"
        " which sends embeddings, heads, norms, biases and routers to AdamW."
        " ``rules.describe(params)`` shows the outcome."
    ),
    "shardings": (
        "where the parameters live, on meshes with Auto axes; see ``Shardings``."
    ),
    "weight_decay_mask": (
        "tree of bools, or function from parameters to one, as in"
        " ``optax.add_decayed_weights``; for the matrices and for AdamW."
    ),
    "cautious_weight_decay": (
        "decay only entries that the update shrinks as well, among the matrices and in"
        " AdamW, as the published codes do; see ``add_cautious_weight_decay``."
    ),
    "mu_dtype": (
        "dtype in which the momenta of matrices and of AdamW are stored; None: the"
        " parameters'."
    ),
    "nu_dtype": "dtype in which V is stored; None: float32.",
    "dampening": (
        "``M = b1 M + (1 - dampening) G``; with nesterov G has the same factor again."
        " None: b1, a moving average; 0: the heavy-ball sum, which differs by a factor."
    ),
    "radius": (
        "R. None: the norm in ``init``, where no matrix may be zero: an error, or under"
        ' ``jax.jit`` NaN in the first step. See ``hyperball`` for ``"init"``, numbers'
        " and functions of (fan_in, fan_out)."
    ),
    "adam_h": (
        'regular expression of paths, such as ``"lm_head"``, that AdamH trains among'
        " those that are no matrices. It takes AdamW's direction on the hyperball, with"
        " ``learning_rate`` and without decay. Each must be a table of rank 2, or a"
        " stack of tables. None: none."
    ),
    "adam_learning_rate": (
        "step size or schedule of AdamW, which trains what is not a matrix; None:"
        " ``learning_rate``."
    ),
    "adam_b1": "AdamW's decay rate of the mean.",
    "adam_b2": "AdamW's decay rate of the square.",
    "adam_eps": "added to the root of AdamW's second moment.",
    "adam_eps_root": "added under that root; None: nothing.",
    "adam_weight_decay": "AdamW's weight decay, a rate or a schedule.",
    "rest": (
        "transformation of what is not a matrix, in place of AdamW: complete, with a"
        " learning rate of its own, as ``optax.nadamw(1e-3)``. The arguments for AdamW"
        " cannot be given beside it. None: AdamW."
    ),
}

# What three of these arguments mean to the optimizers on the hyperball.
ON_SPHERE = {
    "learning_rate": (
        "length of a step relative to the weights, or a schedule of it, of the order of"
        " 0.02 to 0.045 (start with 0.03); see ``hyperball``."
    ),
    "weight_decay_mask": (
        "tree of bools, or function from parameters to one, as in"
        " ``optax.add_decayed_weights``; for AdamW, since matrices have no decay."
    ),
    "cautious_weight_decay": (
        "in AdamW, decay only entries that the update shrinks as well; see"
        " ``add_cautious_weight_decay``."
    ),
}

# Arguments that these optimizers lack, and why. ``{plain}`` becomes the name of the
# optimizer that takes the same direction without the hyperball.
NOT_ON_SPHERE = {
    "weight_decay": (
        "matrices keep their norm in place of decay; {plain} decays them, and"
        " adam_weight_decay decays the rest"
    ),
    "shape_scale": (
        "the step is relative to the norm of the weights, so no factor of the shape"
        " enters; {plain} has one"
    ),
}

# What optimizers refuse, by the error that they raise. Each text stands under an
# argument, and is in the docstrings of the optimizers that have it. The texts under ""
# are in all docstrings.
RAISES = {
    "ValueError": {
        "": (
            "a decay rate outside of [0, 1); a negative rate, decay or eps; arguments"
            " for AdamW beside ``rest``."
        ),
        "ns_coeffs": (
            "``ns_coeffs`` and ``ns_steps`` that ``newton_schulz_orthogonalize``"
            " refuses."
        ),
        "radius": (
            "A ``radius`` that is not positive, and in ``init`` matrices that are zero"
            " where it is None."
        ),
        "rules": (
            "In ``init``, rules whose axes do not fit, that match no leaf, or that are"
            " strict and leave out a leaf of rank 3 or more."
        ),
        "learning_rate": (
            "On update, the state of another optimizer; updates whose paths or shapes"
            " are not those of ``params`` or of the state; no ``params``, where they"
            " are needed."
        ),
    },
    "TypeError": {
        "": (
            "an unknown argument; a wrong type, or an array of several numbers;"
            " a dtype that cannot hold what it is for; what must be known while tracing"
            " and is not, which ``optax.inject_hyperparams`` takes in ``static_args``."
        ),
        "rules": "A matrix of integers.",
    },
}


def optimizer(
    ns_steps: int | None = None,
    texts: Mapping[str, str] = MappingProxyType({}),
    missing: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates an optimizer: checks its arguments and completes its docstring.

    Args:
      ns_steps: what None stands for as the optimizer's argument ``ns_steps``.
      texts: descriptions of arguments that mean something else than in ``SHARED``.
      missing: arguments that the other optimizers have and this one lacks, and why.
    """

    def decorate(factory: Callable[P, R]) -> Callable[P, R]:
        if ns_steps is not None:
            NS_STEPS[factory.__name__] = ns_steps
        plain = factory.__name__.removesuffix("_h")
        why = {name: text.format(plain=plain) for name, text in missing.items()}
        return complete_docstring(check_arguments(factory, ns_steps, why), texts)

    return decorate


def complete_docstring(
    factory: Callable[P, R], texts: Mapping[str, str] = MappingProxyType({})
) -> Callable[P, R]:
    """Adds to the docstring of ``factory`` what it does not describe.

    That is arguments, and the errors that all optimizers raise.

    Raises:
      ValueError: an argument that neither the docstring, ``texts`` nor ``SHARED``
        describes.
    """
    if factory.__doc__ is None:  # python -OO
        return factory
    before, own, after = docstrings.split(inspect.cleandoc(factory.__doc__))
    steps = str(NS_STEPS.get(factory.__name__, ""))
    described = SHARED | dict(texts)
    parameters = inspect.signature(factory).parameters
    entries = []
    for name in parameters:
        if name in own:
            entries.append(own[name])
            continue
        if name not in described:
            raise ValueError(
                f"nothing describes the argument {name!r} of {factory.__name__}: add it"
                " to Args in its docstring or, if other optimizers share it, to SHARED"
            )
        text = described[name].replace("{steps}", steps)
        entries.append(docstrings.entry(name, text))
    errors = {
        error: " ".join(t for n, t in by_name.items() if not n or n in parameters)
        for error, by_name in RAISES.items()
    }
    after = docstrings.add_errors(after, errors)
    factory.__doc__ = "\n".join([before, "Args:", *entries, "", after])
    return factory
