"""The optimizers that are compared: equal in everything but what their names say.

All are chains of the library's own transforms. Momentum 0.95 with Nesterov's term, the
spectral shape factor and Adam's settings for the rest of the parameters are the same
for every arm.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import muon2_optax as m2

B1 = 0.95
# The schedule of all arms called "fitted".
FITTED = "muon2"
# That of all arms called "schatten": fitted as "muon2" is, to the same spectra divided
# by ``fit_schedules.schatten_norms`` instead of the Frobenius norm.
SCHATTEN = m2.Schedule(
    (
        (4.1475, -11.701, 8.3207),
        (3.3209, -9.0535, 6.5397),
        (5.3647, -16.2401, 15.6095),
    ),
    take="whole",
    normalization=m2.Schatten(),
)
ADAM_B1, ADAM_B2, ADAM_EPS = 0.9, 0.95, 1e-8

Transform = optax.GradientTransformation


@dataclasses.dataclass(frozen=True)
class Arm:
    """How a matrix's gradient becomes a direction.

    Attributes:
      moment: what comes before the orthogonalization: ``"momentum"`` (Muon),
        ``"second"`` (Muon^2), ``"factored"`` (Muon^2-F), ``"scaled"`` (Muon^2-F with
        the order turned: the momentum of gradients that the factored moment has
        scaled), ``"equilibrated"`` (momentum whose rows and columns are scaled to one
        size), ``"signs"`` (AdaMuon), ``"soap"`` (SOAP), or ``"adam"``, which has no
        orthogonalization.
      ns_steps, ns_coeffs: the orthogonalization.
      after: what follows it: ``"neurons"`` (NorMuon), ``"entries"`` (AdaMuon) or none.
      nesterov, b2, eps, bias_correction, shape_scale: as in the library.
      ahead: beta of EMA-Nesterov around the whole optimizer, at the peak rate; 0: none.
      only: regular expression for the paths of the matrices that this is for; all
        other matrices have the direction of ``"muon K=5"``. Empty: all of them.
    """

    moment: str
    ns_steps: int = 0
    ns_coeffs: str | m2.Schedule = "keller"
    after: str = ""
    nesterov: bool = True
    b2: float = 0.95
    eps: float = 1e-10
    bias_correction: bool = False
    shape_scale: str = "spectral"
    ahead: float = 0.0
    only: str = ""


def _named(moment: str, steps: tuple[int, ...]) -> dict[str, Arm]:
    prefix = {
        "momentum": "muon",
        "second": "muon2",
        "factored": "muon2_f",
        "equilibrated": "muon_eq",
    }[moment]
    arms = {}
    for k in steps:
        arms[f"{prefix} K={k}"] = Arm(moment, k)
        if k > 1:
            arms[f"{prefix} K={k} fitted"] = Arm(moment, k, FITTED)
    return arms


_BASE = Arm("factored", 3, FITTED)

ARMS: dict[str, Arm] = {
    "adamw": Arm("adam", nesterov=False),
    **_named("momentum", (1, 2, 3, 4, 5)),
    **_named("second", (1, 2, 3, 4, 5)),
    **_named("factored", (1, 2, 3, 4, 5)),
    **_named("equilibrated", (3, 5)),
    "polar_express K=5": Arm("momentum", 5, "polar_express"),
    "turbo K=4": Arm("momentum", 4, "turbo"),
    "normuon K=5": Arm("momentum", 5, after="neurons"),
    "soap_muon K=3 fitted": Arm("soap", 3, FITTED, eps=1e-8),
    "adamuon K=5": Arm("signs", 5, after="entries", shape_scale="none"),
    # What settles the defaults, each one step away from "muon2_f K=3 fitted".
    "muon2_f plain": dataclasses.replace(_BASE, nesterov=False),
    "muon2_f corrected": dataclasses.replace(_BASE, bias_correction=True),
    "muon2_f b2=.9": dataclasses.replace(_BASE, b2=0.9),
    "muon2_f b2=.99": dataclasses.replace(_BASE, b2=0.99),
    "muon2_f eps=1e-6": dataclasses.replace(_BASE, eps=1e-6),
    "muon2_f eps=1e-8": dataclasses.replace(_BASE, eps=1e-8),
    "muon2_f eps=1e-15": dataclasses.replace(_BASE, eps=1e-15),
    "muon2_f match_rms": dataclasses.replace(_BASE, shape_scale="match_rms"),
    "muon2_f unscaled": dataclasses.replace(_BASE, shape_scale="none"),
    # What might have made it better, and rivals with the same addition.
    "muon2_f K=3 schatten": Arm("factored", 3, SCHATTEN),
    "muon2_f K=3 neurons": dataclasses.replace(_BASE, after="neurons"),
    "muon2_f K=3 schatten neurons": Arm("factored", 3, SCHATTEN, after="neurons"),
    "muon2 K=3 neurons": Arm("second", 3, FITTED, after="neurons"),
    "muon2_f K=3 scaled gradients": dataclasses.replace(_BASE, moment="scaled"),
    "muon2_f K=3 ahead": dataclasses.replace(_BASE, ahead=0.5),
    "muon K=5 ahead": Arm("momentum", 5, ahead=0.5),
    "muon_eq K=3 schatten": Arm("equilibrated", 3, SCHATTEN),
    # Which matrices profit from the second moment.
    "muon2_f attention": Arm("factored", 5, FITTED, only="attention"),
    "muon2_f mlp in": Arm("factored", 5, FITTED, only="mlp/(gate|up)"),
    "muon2_f mlp out": Arm("factored", 5, FITTED, only="mlp/down"),
}


class Hyper(NamedTuple):
    """What changes while a program runs: a scalar array each."""

    rate: Any
    adam_rate: Any
    decay: Any
    ahead: Any = 0.0


class Watched(NamedTuple):
    """State of ``watch``: what went through it last."""

    updates: Any


def watch() -> Transform:
    """Hands its input on, and keeps a copy in its state."""

    def init_fn(params: Any) -> Watched:
        return Watched(jax.tree.map(jnp.zeros_like, params))

    def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
        del state, params
        return updates, Watched(updates)

    return optax.GradientTransformation(init_fn, update_fn)


def watched_updates(state: Any) -> Any:
    """What went last through the one ``watch`` of an optimizer, from its state."""

    def is_watched(part: Any) -> bool:
        return isinstance(part, Watched)

    parts = jax.tree.leaves(state, is_leaf=is_watched)
    (watched,) = filter(is_watched, parts)
    return watched.updates


def direction(arm: Arm, rules: m2.MatrixRules, watched: bool = False) -> Transform:
    """From gradients of matrices to the direction of their step."""
    kinds: dict[str, Callable[[], list[Transform]]] = {
        "momentum": lambda: [m2.scale_by_momentum(B1, nesterov=arm.nesterov)],
        "equilibrated": lambda: [
            m2.scale_by_momentum(B1, nesterov=arm.nesterov),
            m2.equilibrate(rules=rules),
        ],
        "signs": lambda: [
            m2.scale_by_momentum(B1, nesterov=arm.nesterov),
            optax.scale_by_sign(),
        ],
        "second": lambda: [
            m2.scale_by_second_moment(
                B1,
                arm.b2,
                arm.eps,
                nesterov=arm.nesterov,
                bias_correction=arm.bias_correction,
            )
        ],
        "factored": lambda: [
            m2.factorized_second_moment(
                B1,
                arm.b2,
                arm.eps,
                nesterov=arm.nesterov,
                bias_correction=arm.bias_correction,
                rules=rules,
            )
        ],
        "soap": lambda: [
            m2.scale_by_soap(
                B1,
                arm.b2,
                arm.eps,
                nesterov=arm.nesterov,
                bias_correction=arm.bias_correction,
                rules=rules,
            )
        ],
        "scaled": lambda: [
            m2.factorized_second_moment(0.0, arm.b2, arm.eps, rules=rules),
            m2.scale_by_momentum(B1, nesterov=arm.nesterov),
        ],
        "adam": lambda: [
            m2.scale_by_second_moment(ADAM_B1, ADAM_B2, ADAM_EPS, bias_correction=True)
        ],
    }
    pieces = kinds[arm.moment]()
    if arm.moment == "adam":
        return optax.chain(*pieces)
    if watched:
        pieces.append(watch())
    pieces.append(
        m2.newton_schulz_orthogonalize(arm.ns_steps, arm.ns_coeffs, rules=rules)
    )
    if arm.after == "neurons":
        neurons = m2.scale_by_neuron_second_moment(arm.b2, arm.eps, rules=rules)
        pieces.append(m2.keep_norm(neurons, rules=rules))
    if arm.after == "entries":
        pieces.append(m2.scale_by_output_second_moment(arm.b2, 1e-8))
        pieces.append(m2.scale_to_rms(0.2, 1e-8, rules=rules))
    pieces.append(m2.scale_by_shape(arm.shape_scale, rules=rules))
    return optax.chain(*pieces)


def step_size(control: str, rules: m2.MatrixRules, hyper: Hyper) -> list[Transform]:
    """From the direction to the update: the end of the chain."""
    if control == "hyperball":
        return [m2.hyperball(hyper.rate, rules=rules)]
    decays: dict[str, Callable[[], list[Transform]]] = {
        "none": list,
        "decay": lambda: [optax.add_decayed_weights(hyper.decay)],
        "cautious": lambda: [m2.add_cautious_weight_decay(hyper.decay)],
    }
    return [*decays[control](), optax.scale_by_learning_rate(hyper.rate)]


def transform(
    arm: Arm,
    control: str,
    rules: m2.MatrixRules,
    hyper: Hyper,
    clip: float = 1.0,
    watched: bool = False,
) -> Transform:
    """The whole optimizer; ``hyper`` may hold traced numbers.

    Args:
      arm: the direction of the matrices.
      control: one of ``cells.CONTROLS``.
      rules: which parameters are matrices; AdamW without decay takes the rest.
      hyper: learning rates and decay.
      clip: limit of the global gradient norm.
      watched: keep what enters Newton-Schulz in the state, as ``Watched``.
    """

    def of_matrices(arm: Arm) -> Transform:
        steps = step_size(control, rules, hyper)
        return optax.chain(direction(arm, rules, watched), *steps)

    rest = optax.chain(
        m2.scale_by_second_moment(ADAM_B1, ADAM_B2, ADAM_EPS, bias_correction=True),
        optax.scale_by_learning_rate(hyper.adam_rate),
    )
    groups = {"matrix": of_matrices(arm), "adam": rest}
    if arm.only:
        groups["other"] = of_matrices(ARMS["muon K=5"])

    def labels(params: Any) -> Any:
        def label(path: Any, group: str) -> str:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            others = group == "matrix" and not re.search(arm.only, name)
            return "other" if others else group

        return jax.tree_util.tree_map_with_path(label, rules.labels(params))

    routed = optax.partition(groups, labels)
    if arm.ahead:
        routed = m2.ema_nesterov(routed, hyper.ahead)
    return optax.chain(optax.clip_by_global_norm(clip), routed)
