"""From options to Optax transforms: the only place that maps names to code."""

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax

import muon2_optax as m2
from examples.config import OptimConfig
from examples.options import UserError, check, flag
from muon2_optax.optimizers import NS_STEPS

# Peak learning rates. Those of the tiny models are each the best of seven in a sweep
# (benchmarks/results/trainer_default_sweep.jsonl). Larger models take the rates of the
# recommended recipe at 60M parameters (docs/results.md).
TINY_RATES = {"adamw": 0.0028, "muon": 0.04, "muon2": 0.056, "muon2_f": 0.056}
TINY_RATES |= {"muon2_f_h": 0.084}
RATES = {"adamw": 0.002}
# Embeddings, head and norms are trained by AdamW in the Muon family as well, at its
# rate and with its other numbers.
ADAM = {"b1": 0.9, "b2": 0.95, "eps": 1e-8}
# Where the trainer differs from the library, whose defaults are what is published: all
# that have a momentum have Nesterov's, and the recommended recipe the fitted schedule
# with five steps.
CHOICES: dict[str, dict[str, Any]] = {
    "muon2_f_h": {"ns_coeffs": "muon2", "ns_steps": 5}
}

# Options handed on to every optimizer that has a parameter of that name.
_OVERRIDES = ("b1", "b2", "eps", "ns_steps", "ns_coeffs", "nesterov", "shape_scale")
_OVERRIDES += ("mu_dtype", "adam_learning_rate")
_DECAYS = ("weight_decay", "adam_weight_decay")
_UNDECAYED = re.compile(r"norm|scale|bias")


def decayed(params: optax.Params) -> Any:
    """True at the leaves that weight decay may act on: all but norms and biases."""

    def by_name(path: Any, _: Any) -> bool:
        return not _UNDECAYED.search(jax.tree_util.keystr(path))

    return jax.tree_util.tree_map_with_path(by_name, params)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = ADAM["b1"],
    b2: float = ADAM["b2"],
    eps: float = ADAM["eps"],
    weight_decay: float = 0.0,
    *,
    adam_weight_decay: float = 0.0,
    mu_dtype: Any = None,
    rules: m2.MatrixRules | None = None,
) -> optax.GradientTransformation:
    """The AdamW baseline; `weight_decay` acts on the same matrices as in Muon."""
    make = partial(optax.adamw, learning_rate, b1, b2, eps, mu_dtype=mu_dtype)
    matrices = make(weight_decay=weight_decay)
    others = make(weight_decay=adam_weight_decay, mask=decayed)
    labels = (rules or m2.MatrixRules()).labels

    def groups(params: optax.Params) -> Any:
        return jax.tree.map("{}_decay".format, labels(params))

    return optax.partition({"matrix_decay": matrices, "adam_decay": others}, groups)


# Every optimizer that `--optimizer` accepts.
FACTORIES: dict[str, Callable[..., optax.GradientTransformation]]
FACTORIES = {"adamw": adamw, **m2.REGISTRY}


def schedule(peak: float, steps: int, config: OptimConfig) -> optax.Schedule:
    """Linear warm-up to `peak` at step `warmup_steps`, then as `--schedule` says.

    The first step already has a rate above zero: a step of size zero teaches nothing.
    """
    warmup, end = min(config.warmup_steps, steps - 1), config.final_lr_fraction
    rest = max(1, steps - 1 - warmup)
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    if config.schedule == "cosine":
        fall = optax.cosine_decay_schedule(peak, rest, alpha=end)
    elif config.schedule == "wsd":
        decay = min(rest, max(1, round(config.decay_fraction * steps)))
        fall = optax.linear_schedule(peak, end * peak, decay, rest - decay)
    else:
        fall = optax.constant_schedule(peak)
    return optax.join_schedules([rise, fall], [warmup])


@dataclass(frozen=True)
class Plan:
    """One optimizer, ready to train; `settings` are for the table and the records."""

    name: str
    settings: dict[str, Any]
    transform: optax.GradientTransformation
    schedule: optax.Schedule


def _select(config: OptimConfig) -> list[str]:
    """The names of `--optimizer`.

    An option that none of them has would be ignored: that is an error.
    """
    check(bool(config.names()), "--optimizer names no optimizer")
    names = list(FACTORIES) if config.names() == ("all",) else list(config.names())
    for name in names:
        listed = f"(known: {', '.join(FACTORIES)}, all)"
        check(name in FACTORIES, f"--optimizer: unknown name {name!r} {listed}")
    accepted = {
        key for n in names for key in inspect.signature(FACTORIES[n]).parameters
    }
    usual = OptimConfig()
    for key in (*_OVERRIDES, *_DECAYS):
        applies = getattr(config, key) == getattr(usual, key) or key in accepted
        check(applies, f"{flag(key)} does not apply to {', '.join(names)}")
    return names


def plans(
    config: OptimConfig,
    steps: int,
    *,
    tiny: bool = True,
    rules: m2.MatrixRules | None = None,
    shardings: m2.Shardings | None = None,
) -> list[Plan]:
    """The optimizers to compare, in the order of the option, for so many steps.

    `rules` say which parameters are matrices, `shardings` where parameters live, for
    the optimizers that divide their work; `tiny` models have other default rates.
    """
    rates, usual = (TINY_RATES, 0.04) if tiny else (RATES, 0.03)
    shaped = partial(schedule, steps=steps, config=config)
    adam_peak = config.adam_learning_rate or rates["adamw"]
    asked = {key: getattr(config, key) for key in _OVERRIDES}
    asked = {key: value for key, value in asked.items() if value is not None}
    asked |= {key: getattr(config, key) for key in _DECAYS}
    asked |= {"adam_learning_rate": shaped(adam_peak), "weight_decay_mask": decayed}
    asked |= {"rules": rules, "shardings": shardings}
    adam = {f"adam_{key}": value for key, value in ADAM.items()}
    made = []
    for name in _select(config):
        peak = config.learning_rate or rates.get(name, usual)
        parameters = inspect.signature(FACTORIES[name]).parameters
        chosen = {"nesterov": True, **adam, **CHOICES.get(name, {}), **asked}
        keywords = {key: value for key, value in chosen.items() if key in parameters}
        try:
            optimizer = FACTORIES[name](shaped(peak), **keywords)
        except (TypeError, ValueError) as error:
            raise UserError(f"--optimizer {name}: {error}") from None
        used = {key: p.default for key, p in parameters.items()} | keywords
        settings = {key: used.get(key) for key in ("ns_steps", "ns_coeffs", "nesterov")}
        settings["ns_steps"] = settings["ns_steps"] or NS_STEPS.get(name)
        settings |= {"learning_rate": peak}
        settings["adam_learning_rate"] = adam_peak if "adam_b1" in parameters else None
        clip = optax.clip_by_global_norm(config.clip_norm or math.inf)
        transform = optax.chain(clip, optimizer)
        made.append(Plan(name, settings, transform, shaped(peak)))
    return made


def at_schedule_start(opt_state: optax.OptState) -> optax.OptState:
    """The state of an optimizer with its learning-rate schedules begun anew."""

    def begin(part: Any) -> Any:
        is_schedule = isinstance(part, optax.ScaleByScheduleState)
        return part._replace(count=part.count * 0) if is_schedule else part

    kind = optax.ScaleByScheduleState
    return jax.tree.map(begin, opt_state, is_leaf=lambda part: isinstance(part, kind))
