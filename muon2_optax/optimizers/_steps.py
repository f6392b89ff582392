"""How many Newton-Schulz steps each optimizer takes where none are given.

Not the defaults of the signatures: those are None, see ``static_arguments``.
"""

from collections.abc import Mapping
from types import MappingProxyType

NS_STEPS: Mapping[str, int] = MappingProxyType(
    {
        "muon": 5,
        "muon2": 3,
        "muon2_f": 3,
        "normuon": 5,
        "adamuon": 5,
        "muon_bp": 5,
        "muon_eq": 5,
        "soap_muon": 3,
        "muon_h": 5,
        "muon2_h": 3,
        "muon2_f_h": 3,
        "teon": 5,
    }
)
