"""The optimizers by name: what the contract tests and the trainer's options read."""

from collections.abc import Callable, Iterator, Mapping

import optax

from muon2_optax.optimizers._shared_arguments import NS_STEPS as NS_STEPS
from muon2_optax.optimizers.adamuon import adamuon as adamuon
from muon2_optax.optimizers.dion import dion as dion
from muon2_optax.optimizers.muon import muon as muon
from muon2_optax.optimizers.muon2 import muon2 as muon2
from muon2_optax.optimizers.muon2_f import muon2_f as muon2_f
from muon2_optax.optimizers.muon2_f_h import muon2_f_h as muon2_f_h
from muon2_optax.optimizers.muon2_h import muon2_h as muon2_h
from muon2_optax.optimizers.muon_bp import muon_bp as muon_bp
from muon2_optax.optimizers.muon_eq import muon_eq as muon_eq
from muon2_optax.optimizers.muon_h import muon_h as muon_h
from muon2_optax.optimizers.normuon import normuon as normuon
from muon2_optax.optimizers.soap_muon import soap_muon as soap_muon
from muon2_optax.optimizers.teon import teon as teon

Optimizer = Callable[..., optax.GradientTransformationExtraArgs]


class Registry(Mapping[str, Optimizer]):
    """The optimizers by name, which cannot be changed: ``REGISTRY["muon2"](0.02)``."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = dict(optimizers)

    def __getitem__(self, name: str) -> Optimizer:
        return self._optimizers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._optimizers)

    def __len__(self) -> int:
        return len(self._optimizers)

    def __repr__(self) -> str:
        return f"Registry({', '.join(self)})"


REGISTRY: Mapping[str, Optimizer] = Registry(
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
