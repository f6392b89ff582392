"""Muon^2 and its relatives as composable Optax gradient transformations."""

from muon2_optax import diagnostics, ready_rules
from muon2_optax.attention import qk_clip
from muon2_optax.axes import MatrixAxes
from muon2_optax.decay import add_cautious_weight_decay
from muon2_optax.look_ahead import (
    ema_nesterov,
    ema_nesterov_eval_params,
    ema_nesterov_schedule,
)
from muon2_optax.moments import scale_by_momentum, scale_by_second_moment
from muon2_optax.optimizers import (
    REGISTRY,
    adamuon,
    dion,
    muon,
    muon2,
    muon2_f,
    muon2_f_h,
    muon2_h,
    muon_bp,
    muon_eq,
    muon_h,
    normuon,
    soap_muon,
    teon,
)
from muon2_optax.optimizers.dion import scale_by_low_rank_orthonormal
from muon2_optax.optimizers.muon2_f import factorized_second_moment
from muon2_optax.optimizers.muon_bp import in_blocks, periodically
from muon2_optax.optimizers.muon_eq import equilibrate
from muon2_optax.optimizers.soap_muon import scale_by_soap
from muon2_optax.optimizers.teon import orthogonalize_jointly
from muon2_optax.orthogonalize import newton_schulz, newton_schulz_orthogonalize
from muon2_optax.output_moments import (
    scale_by_neuron_second_moment,
    scale_by_output_second_moment,
)
from muon2_optax.rules import MatrixRules
from muon2_optax.scaling import (
    keep_norm,
    scale_by_dual_norm,
    scale_by_shape,
    scale_to_rms,
)
from muon2_optax.schedules.coefficients import (
    AOL,
    SCHEDULES,
    Frobenius,
    Schatten,
    Schedule,
    Spectral,
)
from muon2_optax.schedules.fitting import fit_coefficients, polar_express_coefficients
from muon2_optax.shape_scales import MatchRMS
from muon2_optax.sharding import Shardings
from muon2_optax.sphere import hyperball

__version__ = "0.2.0"

__all__ = [
    "adamuon",
    "add_cautious_weight_decay",
    "AOL",
    "diagnostics",
    "dion",
    "ema_nesterov",
    "ema_nesterov_eval_params",
    "ema_nesterov_schedule",
    "equilibrate",
    "factorized_second_moment",
    "fit_coefficients",
    "Frobenius",
    "hyperball",
    "in_blocks",
    "keep_norm",
    "MatchRMS",
    "MatrixAxes",
    "MatrixRules",
    "muon",
    "muon2",
    "muon2_f",
    "muon2_f_h",
    "muon2_h",
    "muon_bp",
    "muon_eq",
    "muon_h",
    "newton_schulz",
    "newton_schulz_orthogonalize",
    "normuon",
    "orthogonalize_jointly",
    "periodically",
    "polar_express_coefficients",
    "qk_clip",
    "ready_rules",
    "REGISTRY",
    "scale_by_dual_norm",
    "scale_by_low_rank_orthonormal",
    "scale_by_momentum",
    "scale_by_neuron_second_moment",
    "scale_by_output_second_moment",
    "scale_by_second_moment",
    "scale_by_shape",
    "scale_by_soap",
    "scale_to_rms",
    "Schatten",
    "Schedule",
    "SCHEDULES",
    "Shardings",
    "soap_muon",
    "Spectral",
    "teon",
]


def __dir__() -> list[str]:
    """The public names: modules of the inside can be imported, but are no interface."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
