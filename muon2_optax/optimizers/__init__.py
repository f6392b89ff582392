"""The optimizers by name: what the contract tests and the trainer's options read."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import optax

from muon2_optax.optimizers._steps import NS_STEPS as NS_STEPS
from muon2_optax.optimizers.adamuon import adamuon as adamuon
from muon2_optax.optimizers.dion import dion as dion
from muon2_optax.optimizers.hyperball import muon2_f_h as muon2_f_h
from muon2_optax.optimizers.hyperball import muon2_h as muon2_h
from muon2_optax.optimizers.hyperball import muon_h as muon_h
from muon2_optax.optimizers.muon import muon as muon
from muon2_optax.optimizers.muon2 import muon2 as muon2
from muon2_optax.optimizers.muon2_f import muon2_f as muon2_f
from muon2_optax.optimizers.muon_bp import muon_bp as muon_bp
from muon2_optax.optimizers.muon_eq import muon_eq as muon_eq
from muon2_optax.optimizers.normuon import normuon as normuon
from muon2_optax.optimizers.soap_muon import soap_muon as soap_muon
from muon2_optax.optimizers.teon import teon as teon

REGISTRY: Mapping[str, Callable[..., optax.GradientTransformationExtraArgs]] = (
    MappingProxyType(
        {
            "muon": muon,
            "muon2": muon2,
            "muon2_f": muon2_f,
            "normuon": normuon,
            "adamuon": adamuon,
            "dion": dion,
            "muon_bp": muon_bp,
            "teon": teon,
            "muon_eq": muon_eq,
            "soap_muon": soap_muon,
            "muon_h": muon_h,
            "muon2_h": muon2_h,
            "muon2_f_h": muon2_f_h,
        }
    )
)
