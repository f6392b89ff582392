"""Arguments that decide which program is traced: step counts, sizes, dtypes.

``optax.inject_hyperparams`` makes an array of every number, and of what every callable
returns for the step, among the arguments of a factory, its defaults included. A jitted
step gets these arrays traced. A number of steps that arrives so can be checked no more,
and would need a slower program that works for any. So such numbers have None as their
default, which Optax leaves alone, and traced ones are refused.
"""

from typing import Any

import jax

# What no array can be: under inject_hyperparams, what came of calling it with a step.
_NEVER_ARRAYS = ("dtype", "mask")


def check_static(**arguments: Any) -> None:
    """Refuses arguments that are traced, all of them in one sentence.

    A mask that is one bool is what a function of the parameters gives for a step: taken
    as it is, it would put weight decay on all parameters, or on none.

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
        isinstance(x, jax.core.Tracer) or n.endswith(_NEVER_ARRAYS)
        for n, x in arrays.items()
    ):
        names = tuple(arrays)
        raise TypeError(
            f"{' and '.join(names)} must be known while tracing, but arrived as"
            f" {'an array' if len(names) == 1 else 'arrays'}; under"
            f" optax.inject_hyperparams pass static_args={names!r}"
        )
