"""Measures of a running optimizer: reports, spectra, convergence zones."""

from muon2_optax.diagnostics.report import MatrixReport as MatrixReport
from muon2_optax.diagnostics.report import (
    orthogonalization_report as orthogonalization_report,
)
from muon2_optax.diagnostics.spectra import cosine_to_polar as cosine_to_polar
from muon2_optax.diagnostics.spectra import effective_rank as effective_rank
from muon2_optax.diagnostics.spectra import orthogonality_error as orthogonality_error
from muon2_optax.diagnostics.spectra import singular_values as singular_values
from muon2_optax.diagnostics.spectra import stable_rank as stable_rank
from muon2_optax.diagnostics.zones import ZoneFractions as ZoneFractions
from muon2_optax.diagnostics.zones import Zones as Zones
from muon2_optax.diagnostics.zones import convergence_zones as convergence_zones
from muon2_optax.diagnostics.zones import scalar_map as scalar_map
from muon2_optax.diagnostics.zones import zone_fractions as zone_fractions
