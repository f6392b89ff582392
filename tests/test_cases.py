"""Every public case: faults that people reported of other optimizers, one test each.

``cases/public_cases.py`` holds the cases, ``cases/adapters.py`` puts this library
behind their neutral keywords. Cases marked exact presume plain Muon and run with
``muon`` only; the others are properties of the whole family and run with every
optimizer of the registry, at eps=0, for which the scale invariance is claimed.
"""

import jax
import pytest
from cases import adapters
from cases.public_cases import CASES, NotApplicable

import muon2_optax as m2

# What a method, by its definition, does not have.
_RANDOM_START = "Dion's Q starts at random per path: equal matrices step differently"
_NOT_ORTHOGONAL = "Dion normalizes the columns of Q but does not orthogonalize them"
_NORM_MATCHED = "AdaMuon fixes the RMS of its step, not the spectral norm"
_ON_A_SPHERE = {
    **dict.fromkeys(
        ("C15", "C47", "C63"), "the step has a length, not a spectral norm"
    ),
    **dict.fromkeys(
        ("C43", "C89", "C114"), "a step depends on the weights, and these differ"
    ),
    **dict.fromkeys(("C67", "C71"), "a step along a sphere is not linear in the rate"),
}
EXCEPTIONS = {
    "muon_h": _ON_A_SPHERE,
    "muon2_h": _ON_A_SPHERE,
    "muon2_f_h": _ON_A_SPHERE,
    "adamuon": dict.fromkeys(("C15", "C63"), _NORM_MATCHED),
    "dion": dict.fromkeys(
        ("C32", "C36", "C39", "C51", "C53", "C54", "C56", "C93", "C111"), _RANDOM_START
    )
    | dict.fromkeys(("C15", "C45", "C47", "C52", "C63"), _NOT_ORTHOGONAL),
    "muon_bp": {
        "C94": "one of two branches runs, the compiler counts both; see test_mixtures"
    },
    "soap_muon": {
        "C94": "its bases take products of the longer side, see docs/methods.md",
    },
    "teon": {
        "C94": "Polar Express is too steep for one Gram matrix per three steps",
    },
}

# Its one matrix has sides in a ratio at which the library asks what it is.
OBLONG = {"C94"}
# Their trees have convolutions that no rule covers, which the library says aloud.
UNCOVERED = {"C31", "C47"}
# By default for the one with every kind of stage; the other methods take some minutes.
DEFAULT = "muon2_f"


def _param(name, case):
    marks = [] if name == DEFAULT else [pytest.mark.slow]
    if case["id"] in UNCOVERED:
        marks.append(pytest.mark.filterwarnings("ignore:no matrix rule:UserWarning"))
    if case["id"] in OBLONG:
        marks.append(pytest.mark.filterwarnings("ignore:1 leaf may be:UserWarning"))
    if reason := EXCEPTIONS.get(name, {}).get(case["id"]):
        marks.append(pytest.mark.skip(reason=reason))
    title = f"{name}-{case['id']}-{case['fn'].__name__}"
    return pytest.param(name, case, id=title, marks=marks)


def _cases(group):
    return [case for case in CASES.values() if case["group"] == group]


def _run(case, make):
    # Nearly all of the time goes into compiling small programs, so they are compiled
    # as written, except where the case looks at the compiled program.
    compiled = case["perf"] or case["kind"] == "sharding"
    jax.config.update("jax_disable_most_optimizations", not compiled)
    try:
        case["fn"](make)
    except NotApplicable as reason:
        pytest.skip(str(reason))
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize(
    "name, case",
    [
        _param(name, case)
        for name in m2.REGISTRY
        for case in _cases("muon")
        if name == "muon" or not case["exact"]
    ],
)
def test_optimizer(name, case):
    _run(case, adapters.optimizer(name, NotApplicable))


@pytest.mark.parametrize("case", _cases("second"), ids=lambda c: c["id"])
def test_second_moment(case):
    _run(case, adapters.second)


@pytest.mark.parametrize("case", _cases("factored"), ids=lambda c: c["id"])
def test_factored_second_moment(case):
    _run(case, adapters.factored)


def test_no_case_is_left_out():
    assert {case["group"] for case in CASES.values()} == {"muon", "second", "factored"}
    assert len(CASES) == 81
