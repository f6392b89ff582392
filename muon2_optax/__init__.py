"""Muon^2 and its relatives as composable Optax gradient transformations."""

from muon2_optax import diagnostics as diagnostics
from muon2_optax import ready_rules as ready_rules
from muon2_optax.attention import qk_clip as qk_clip
from muon2_optax.axes import MatchRMS as MatchRMS
from muon2_optax.axes import MatrixAxes as MatrixAxes
from muon2_optax.look_ahead import ema_nesterov as ema_nesterov
from muon2_optax.look_ahead import ema_nesterov_eval_params as ema_nesterov_eval_params
from muon2_optax.look_ahead import ema_nesterov_schedule as ema_nesterov_schedule
from muon2_optax.moments import scale_by_momentum as scale_by_momentum
from muon2_optax.moments import scale_by_second_moment as scale_by_second_moment
from muon2_optax.optimizers import REGISTRY as REGISTRY
from muon2_optax.optimizers import adamuon as adamuon
from muon2_optax.optimizers import dion as dion
from muon2_optax.optimizers import muon as muon
from muon2_optax.optimizers import muon2 as muon2
from muon2_optax.optimizers import muon2_f as muon2_f
from muon2_optax.optimizers import muon2_f_h as muon2_f_h
from muon2_optax.optimizers import muon2_h as muon2_h
from muon2_optax.optimizers import muon_bp as muon_bp
from muon2_optax.optimizers import muon_eq as muon_eq
from muon2_optax.optimizers import muon_h as muon_h
from muon2_optax.optimizers import normuon as normuon
from muon2_optax.optimizers import teon as teon
from muon2_optax.optimizers.dion import (
    scale_by_low_rank_orthonormal as scale_by_low_rank_orthonormal,
)
from muon2_optax.optimizers.muon2_f import (
    factorized_second_moment as factorized_second_moment,
)
from muon2_optax.optimizers.muon_bp import in_blocks as in_blocks
from muon2_optax.optimizers.muon_bp import periodically as periodically
from muon2_optax.optimizers.muon_eq import equilibrate as equilibrate
from muon2_optax.optimizers.teon import orthogonalize_jointly as orthogonalize_jointly
from muon2_optax.orthogonalize import newton_schulz as newton_schulz
from muon2_optax.orthogonalize import (
    newton_schulz_orthogonalize as newton_schulz_orthogonalize,
)
from muon2_optax.rules import MatrixRules as MatrixRules
from muon2_optax.scaling import keep_norm as keep_norm
from muon2_optax.scaling import scale_by_dual_norm as scale_by_dual_norm
from muon2_optax.scaling import (
    scale_by_neuron_second_moment as scale_by_neuron_second_moment,
)
from muon2_optax.scaling import (
    scale_by_output_second_moment as scale_by_output_second_moment,
)
from muon2_optax.scaling import scale_by_shape as scale_by_shape
from muon2_optax.scaling import scale_to_rms as scale_to_rms
from muon2_optax.schedules.coefficients import AOL as AOL
from muon2_optax.schedules.coefficients import SCHEDULES as SCHEDULES
from muon2_optax.schedules.coefficients import Frobenius as Frobenius
from muon2_optax.schedules.coefficients import Schatten as Schatten
from muon2_optax.schedules.coefficients import Schedule as Schedule
from muon2_optax.schedules.coefficients import Spectral as Spectral
from muon2_optax.schedules.fitting import fit_coefficients as fit_coefficients
from muon2_optax.schedules.fitting import (
    polar_express_coefficients as polar_express_coefficients,
)
from muon2_optax.sharding import Shardings as Shardings
from muon2_optax.weights import add_cautious_weight_decay as add_cautious_weight_decay
from muon2_optax.weights import hyperball as hyperball

__version__ = "0.2.0"
