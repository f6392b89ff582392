"""From options to Optax transforms: the only place that maps names to code."""

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax

import muon2_optax as m2
from examples.config import OptimConfig
from examples.options import UserError, check
from muon2_optax.optimizers import NS_STEPS

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
_OVERRIDES = (
    *("b1", "b2", "eps", "ns_steps", "ns_coeffs", "nesterov"),
    *("shape_scale", "mu_dtype"),
)
_DECAYS = ("weight_decay", "adam_weight_decay")
_UNDECAYED = re.compile(r"norm|scale|bias")


def decayed(params: optax.Params) -> Any:
    """True at the leaves that weight decay may act on: all but norms and biases."""

    def by_name(path: Any, _: Any) -> bool:
        return not _UNDECAYED.search(jax.tree_util.keystr(path))

    return jax.tree_util.tree_map_with_path(by_name, params)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = ADAM_B1,
    b2: float = ADAM_B2,
    eps: float = ADAM_EPS,
    weight_decay: float = 0.0,
    *,
    adam_weight_decay: float = 0.0,
    mu_dtype: Any = None,
    rules: m2.MatrixRules | None = None,
) -> optax.GradientTransformation:
    """The AdamW baseline; `weight_decay` acts on the same matrices as in Muon."""
    labels = (rules or m2.MatrixRules()).labels

    def mask(wanted: str, params: optax.Params) -> Any:
        def chosen(may: bool, label: str) -> bool:
            return label == wanted and (may or label == "matrix")

        return jax.tree.map(chosen, decayed(params), labels(params))

    return optax.chain(
        optax.scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype),
        optax.add_decayed_weights(weight_decay, partial(mask, "matrix")),
        optax.add_decayed_weights(adam_weight_decay, partial(mask, "adam")),
        optax.scale_by_learning_rate(learning_rate),
    )


def factories() -> Mapping[str, Callable[..., optax.GradientTransformation]]:
    """Every optimizer that `--optimizer` accepts."""
    return {"adamw": adamw, **m2.REGISTRY}


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
    """One optimizer, ready to train, with the numbers that the table shows."""

    name: str
    learning_rate: float
    adam_learning_rate: float | None
    ns_steps: int | None
    nesterov: bool | None
    transform: optax.GradientTransformation
    schedule: optax.Schedule


def _select(config: OptimConfig) -> list[str]:
    """The names of `--optimizer`.

    An option that none of them has would be ignored: that is an error.
    """
    known = factories()
    names = list(known) if config.names() == ("all",) else list(config.names())
    for name in names:
        listed = f"(known: {', '.join(known)}, all)"
        check(name in known, f"--optimizer: unknown name {name!r} {listed}")
    accepted = {key for n in names for key in inspect.signature(known[n]).parameters}
    for key in (*_OVERRIDES, "adam_learning_rate"):
        applies = getattr(config, key) is None or key in accepted
        flag = "--" + key.replace("_", "-")
        check(applies, f"{flag} does not apply to {', '.join(names)}")
    return names


def _plan(name: str, config: OptimConfig, steps: int, given: dict[str, Any]) -> Plan:
    factory = factories()[name]
    parameters = inspect.signature(factory).parameters
    peak = config.learning_rate or LEARNING_RATES.get(name, FALLBACK_LEARNING_RATE)
    shaped = partial(schedule, steps=steps, config=config)
    adam_peak = config.adam_learning_rate or ADAM_LEARNING_RATE
    chosen = {key: getattr(config, key) for key in (*_OVERRIDES, *_DECAYS)} | given
    chosen |= {"weight_decay_mask": decayed, "adam_learning_rate": shaped(adam_peak)}
    chosen |= {"adam_b1": ADAM_B1, "adam_b2": ADAM_B2, "adam_eps": ADAM_EPS}
    keywords: dict[str, Any] = {
        key: value
        for key, value in chosen.items()
        if key in parameters and value is not None
    }
    try:
        optimizer = factory(shaped(peak), **keywords)
    except (TypeError, ValueError) as error:
        raise UserError(f"--optimizer {name}: {error}") from None

    def used(key: str) -> Any:
        """The value of an argument, given or default; None where there is no such."""
        return keywords.get(key, parameters[key].default) if key in parameters else None

    clip = optax.clip_by_global_norm(config.clip_norm or math.inf)
    return Plan(
        name=name,
        learning_rate=peak,
        adam_learning_rate=adam_peak if "adam_learning_rate" in parameters else None,
        ns_steps=used("ns_steps") or NS_STEPS.get(name),
        nesterov=used("nesterov"),
        transform=optax.chain(clip, optimizer),
        schedule=shaped(peak),
    )


def plans(
    config: OptimConfig,
    steps: int,
    *,
    rules: m2.MatrixRules | None = None,
    shardings: m2.Shardings | None = None,
) -> list[Plan]:
    """The optimizers to compare, in the order of the option, for so many steps.

    `rules` say which parameters are matrices, `shardings` where parameters live, for
    the optimizers that divide their work.
    """
    given = {"rules": rules, "shardings": shardings}
    return [_plan(name, config, steps, given) for name in _select(config)]


def at_schedule_start(opt_state: optax.OptState) -> optax.OptState:
    """The state of an optimizer with its learning-rate schedules begun anew."""

    def is_schedule(part: Any) -> bool:
        return isinstance(part, optax.ScaleByScheduleState)

    def begin(part: Any) -> Any:
        return part._replace(count=part.count * 0) if is_schedule(part) else part

    return jax.tree.map(begin, opt_state, is_leaf=is_schedule)
