"""The frozen classes of options refuse what is not of the type of their fields."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import muon2_optax as m2

NUMBERS = (
    (m2.Frobenius, "factor"),
    (m2.Frobenius, "eps"),
    (m2.Frobenius, "floor"),
    (m2.AOL, "eps"),
    (m2.Schatten, "eps"),
    (m2.Spectral, "eps"),
    (m2.MatchRMS, "rms"),
)
NO_NUMBERS = {
    "None": None,
    "str": "1e-7",
    "bool": True,
    "complex": 1 + 0j,
    "tuple": (1e-7,),
    "tree": {"w": jnp.ones((4, 4))},
    "NumPy array": np.ones(3),
    "JAX array": jnp.ones((2, 2)),
    "NumPy bool": np.True_,
    "NumPy complex": np.complex64(1),
    "JAX bool": jnp.asarray(True),
    "function": lambda step: 1e-7,
    "negative": -1e-7,
    "negative JAX": jnp.float32(-1.0),
    "NaN": float("nan"),
    "infinite": np.inf,
}
REAL = (2, 0.5, np.float32(0.5), np.int64(2), np.asarray(0.5), jnp.float32(0.5))


@pytest.mark.parametrize("value", NO_NUMBERS.values(), ids=NO_NUMBERS)
@pytest.mark.parametrize("kind, field", NUMBERS)
def test_a_number_is_one_real_finite_number(kind, field, value):
    wanted = rf"^{field}( of {kind.__name__})? must be (0 or more|a positive number)"
    with pytest.raises(ValueError, match=wanted) as error:
        kind(**{field: value})
    assert len(str(error.value)) < 200  # the tree itself is not printed


@pytest.mark.parametrize("value", REAL, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("kind, field", NUMBERS)
def test_numbers_of_all_libraries_are_numbers(kind, field, value):
    assert getattr(kind(**{field: value}), field) == value


@pytest.mark.parametrize("kind, field", NUMBERS)
def test_a_known_number_stays_known_inside_of_jit(kind, field):
    known, negative, kept = jnp.float32(0.5), jnp.float32(-0.5), []
    jax.jit(lambda x: kept.append(kind(**{field: known})) or x)(1.0)
    assert float(getattr(kept[0], field)) == 0.5
    with pytest.raises(ValueError, match="must be"):
        jax.jit(lambda x: kind(**{field: negative}) and x)(1.0)


@pytest.mark.parametrize("dtype", ["int4", "float8_e4m3fn"])
def test_numbers_of_few_bits_are_numbers(dtype):
    one = jnp.ones((), dtype)
    assert float(m2.AOL(one).eps) == m2.MatchRMS(one).rms == 1


def test_a_normalization_takes_traced_numbers_and_bfloat16():
    kept = []
    jax.jit(lambda eps: kept.append(m2.AOL(eps)))(1e-7)
    assert isinstance(kept[0].eps, jax.core.Tracer)
    assert m2.AOL(jnp.bfloat16(0.5)).eps == 0.5
    with pytest.raises(ValueError, match="eps of AOL must be 0 or more"):
        jax.jit(lambda eps: m2.AOL(eps) and 0)(jnp.ones(2))


MESH = jax.sharding.AbstractMesh((2,), ("x",))
OTHER_TYPES = {
    "strict": (m2.MatrixRules, {"strict": "yes"}),
    "by_name": (m2.MatrixRules, {"by_name": None}),
    "allow_unused": (m2.MatrixRules, {"allow_unused": np.ones(2)}),
    "leaves": (m2.MatrixRules, {"leaves": ("w",)}),
    "leaves of MatrixRules": (m2.MatrixRules, {"leaves": 3}),
    "patterns": (m2.MatrixRules, {"patterns": 3}),
    "patterns of MatrixRules": (m2.MatrixRules, {"patterns": {"w": None}}),
    "patterns of": (m2.MatrixRules, {"patterns": np.ones(0)}),
    "patterns of Matrix": (m2.MatrixRules, {"patterns": np.array(1)}),
    "patterns of M": (m2.MatrixRules, {"patterns": b""}),
    "in_axis": (m2.MatrixAxes, {"in_axis": "0", "out_axis": 1}),
    "in_axis of MatrixAxes": (m2.MatrixAxes, {"in_axis": None, "out_axis": 1}),
    "out_axis": (m2.MatrixAxes, {"in_axis": 0, "out_axis": 1.0}),
    "out_axis of MatrixAxes": (m2.MatrixAxes, {"in_axis": 0, "out_axis": True}),
    "out_splits": (m2.MatrixAxes, {"in_axis": 0, "out_axis": 1, "out_splits": None}),
    "mesh": (m2.Shardings, {"mesh": "x", "specs": ()}),
    "specs": (m2.Shardings, {"mesh": MESH, "specs": {"w": PartitionSpec()}}),
    "specs of Shardings": (m2.Shardings, {"mesh": MESH, "specs": (("w", "x"),)}),
    "take": (m2.Schedule, {"triples": ((1, 0, 0),), "take": np.ones(2)}),
    "source": (m2.Schedule, {"triples": ((1, 0, 0),), "source": 3}),
    "shorter": (m2.Schedule, {"triples": ((1, 0, 0),), "shorter": np.ones((1, 1, 3))}),
    "normalization": (m2.Schedule, {"triples": ((1, 0, 0),), "normalization": 1.0}),
}


@pytest.mark.parametrize("start", OTHER_TYPES)
def test_a_field_is_of_its_own_type(start):
    kind, fields = OTHER_TYPES[start]
    with pytest.raises(TypeError, match=f"^{start}.* must be ") as error:
        kind(**fields)
    assert error.value.__suppress_context__ or error.value.__context__ is None


NO_TABLES = (None, 3.0, np.array(1.0), m2.AOL(), "keller", {"a": 1})


@pytest.mark.parametrize("triples", NO_TABLES, ids=repr)
def test_triples_are_a_table(triples):
    with pytest.raises((TypeError, ValueError), match="^a schedule is a table"):
        m2.Schedule(triples)


@pytest.mark.parametrize(
    "value", (None, "1.0", 1j, True, np.True_, np.ones(1), {}), ids=repr
)
def test_coefficients_are_numbers(value):
    with pytest.raises(TypeError, match="^coefficients must be numbers, got"):
        m2.Schedule(((1.0, 0.0, value),))


def test_fields_of_their_own_types_pass():
    axes = m2.MatrixAxes(np.int32(0), [np.int64(1)], (2, jnp.int32(2)))
    assert axes == m2.MatrixAxes(0, 1, (2, 2))
    assert m2.MatrixAxes(range(2), 2).in_axis == (0, 1)
    assert m2.MatrixRules([["w", axes]], np.True_, leaves=()).strict
    specs = (("w", PartitionSpec("x")),)
    assert m2.Shardings(MESH, [["w", PartitionSpec("x")]]).specs == specs
    assert m2.MatrixRules(leaves=[]) == m2.MatrixRules(leaves=())
    assert m2.Schedule(np.ones((2, 3))).triples == ((1.0,) * 3,) * 2
