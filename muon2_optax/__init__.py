"""Muon^2 and its relatives as composable Optax gradient transformations."""

from muon2_optax.axes import MatrixAxes as MatrixAxes
from muon2_optax.coefficients import SCHEDULES as SCHEDULES
from muon2_optax.coefficients import Frobenius as Frobenius
from muon2_optax.coefficients import Schedule as Schedule
from muon2_optax.factored import factorized_second_moment as factorized_second_moment
from muon2_optax.moments import scale_by_momentum as scale_by_momentum
from muon2_optax.moments import scale_by_second_moment as scale_by_second_moment
from muon2_optax.optimizers import REGISTRY as REGISTRY
from muon2_optax.optimizers import muon as muon
from muon2_optax.optimizers import muon2 as muon2
from muon2_optax.optimizers import muon2_f as muon2_f
from muon2_optax.orthogonalize import (
    newton_schulz_orthogonalize as newton_schulz_orthogonalize,
)
from muon2_optax.polar import newton_schulz as newton_schulz
from muon2_optax.rules import MatrixRules as MatrixRules
from muon2_optax.scaling import scale_by_shape as scale_by_shape

__version__ = "0.1.0"
