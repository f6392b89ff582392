"""The optimizers by name: what the contract tests and the trainer's options read."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import optax

from muon2_optax.optimizers.muon import muon as muon
from muon2_optax.optimizers.muon2 import muon2 as muon2
from muon2_optax.optimizers.muon2_f import muon2_f as muon2_f

REGISTRY: Mapping[str, Callable[..., optax.GradientTransformationExtraArgs]] = (
    MappingProxyType(
        {
            "muon": muon,
            "muon2": muon2,
            "muon2_f": muon2_f,
        }
    )
)
