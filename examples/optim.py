"""From options to Optax transforms: the only place that maps names to code."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax

import muon2_optax as m2
from examples.config import OptimConfig
from examples.flags import UserError

# Peak learning rates at the default model and length, each the best of a sweep over the
# same grid of factors (benchmarks/results/trainer_default_sweep.jsonl).
LEARNING_RATES = {"adamw": 4e-3, "muon": 0.04, "muon2": 0.04, "muon2_f": 0.04}
FALLBACK_LEARNING_RATE = 0.04
# Embeddings, head and norms are trained by AdamW in the Muon family as well: at the
# rate that is best for AdamW alone.
ADAM_LEARNING_RATE = LEARNING_RATES["adamw"]

# AdamW is the same as a baseline and as the partner of Muon.
ADAM_B1, ADAM_B2, ADAM_EPS = 0.9, 0.95, 1e-8

# Options handed on to every optimizer that has a parameter of that name.
_OVERRIDES = ("b1", "b2", "eps", "ns_steps", "ns_coeffs", "nesterov")


def _matrix_mask(params: optax.Params) -> Any:
    """True at the leaves that the Muon family would train as matrices."""
    labels = m2.MatrixRules().labels(params)
    return jax.tree.map(lambda label: label == "matrix", labels)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = ADAM_B1,
    b2: float = ADAM_B2,
    eps: float = ADAM_EPS,
    weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """The AdamW baseline; weight decay acts on the same matrices as in Muon."""
    return optax.adamw(
        learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=_matrix_mask
    )


def factories() -> Mapping[str, Callable[..., optax.GradientTransformation]]:
    """Every optimizer that `--optimizer` accepts."""
    return {"adamw": adamw, **m2.REGISTRY}


def schedule(
    peak: float, steps: int, warmup_steps: int, final_fraction: float
) -> optax.Schedule:
    """Linear warm-up to `peak` at step `warmup_steps`, then a cosine to the last step.

    The first step already has a rate above zero: a step of size zero teaches nothing.
    """
    warmup_steps = min(warmup_steps, steps - 1)
    rise = optax.linear_schedule(peak / (warmup_steps + 1), peak, warmup_steps)
    fall = optax.cosine_decay_schedule(
        peak, max(1, steps - 1 - warmup_steps), alpha=final_fraction
    )
    return optax.join_schedules([rise, fall], [warmup_steps])


@dataclass(frozen=True)
class Plan:
    """One optimizer, ready to train, with the numbers that the table shows."""

    name: str
    learning_rate: float
    adam_learning_rate: float | None
    ns_steps: int | None
    nesterov: bool | None
    transform: optax.GradientTransformation
    schedule: optax.Schedule


def _select(config: OptimConfig) -> list[str]:
    known = factories()
    if config.names() == ("all",):
        return list(known)
    for name in config.names():
        if name not in known:
            raise UserError(
                f"--optimizer: unknown name {name!r} (known: {', '.join(known)}, all)"
            )
    return list(config.names())


def _check_overrides(config: OptimConfig, names: list[str]) -> None:
    """An option that no chosen optimizer has would be ignored: that is an error."""
    accepted = {
        key for name in names for key in inspect.signature(factories()[name]).parameters
    }
    for key in (*_OVERRIDES, "adam_learning_rate"):
        if getattr(config, key) is not None and key not in accepted:
            flag = "--" + key.replace("_", "-")
            raise UserError(f"{flag} does not apply to {', '.join(names)}")


def _plan(name: str, config: OptimConfig, steps: int) -> Plan:
    factory = factories()[name]
    parameters = inspect.signature(factory).parameters
    peak = config.learning_rate or LEARNING_RATES.get(name, FALLBACK_LEARNING_RATE)

    def shaped(rate: float) -> optax.Schedule:
        return schedule(rate, steps, config.warmup_steps, config.final_lr_fraction)

    keywords: dict[str, Any] = {
        key: getattr(config, key)
        for key in _OVERRIDES
        if key in parameters and getattr(config, key) is not None
    }
    keywords["weight_decay"] = config.weight_decay
    adam_peak = None
    if "adam_learning_rate" in parameters:
        adam_peak = config.adam_learning_rate or ADAM_LEARNING_RATE
        keywords |= {
            "adam_learning_rate": shaped(adam_peak),
            "adam_b1": ADAM_B1,
            "adam_b2": ADAM_B2,
            "adam_eps": ADAM_EPS,
        }
    try:
        optimizer = factory(shaped(peak), **keywords)
    except (TypeError, ValueError) as error:
        raise UserError(f"--optimizer {name}: {error}") from None

    def used(key: str) -> Any:
        """The value of an argument, given or default; None where there is no such."""
        return keywords.get(key, parameters[key].default) if key in parameters else None

    clip = optax.clip_by_global_norm(config.clip_norm or math.inf)
    transform = optax.chain(clip, optimizer)
    return Plan(
        name=name,
        learning_rate=peak,
        adam_learning_rate=adam_peak,
        ns_steps=used("ns_steps"),
        nesterov=used("nesterov"),
        transform=transform,
        schedule=shaped(peak),
    )


def plans(config: OptimConfig, steps: int) -> list[Plan]:
    """The optimizers to compare, in the order of the option."""
    names = _select(config)
    _check_overrides(config, names)
    return [_plan(name, config, steps) for name in names]
