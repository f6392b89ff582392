"""``help()`` is complete: every argument of every public function is described."""

import inspect
import re
import types

import jax.numpy as jnp
import pytest

import muon2_optax as m2
from muon2_optax.optimizers import _shared_arguments

FUNCTIONS = sorted(
    name
    for name in m2.__all__
    if inspect.isfunction(getattr(m2, name)) and name != "REGISTRY"
)


def described(doc):
    """The names under Args, each with its text, in order."""
    doc = inspect.cleandoc(doc)
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", doc, re.M | re.S)
    if section is None:
        return {}
    found = {}
    for entry in re.split(r"\n(?=  [\w*])", "\n" + section.group(1).rstrip()):
        if ":" in entry:
            names, text = entry.split(":", 1)
            found |= {name.strip(" *"): text.strip() for name in names.split(",")}
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments(name):
    """In the order of the signature, each with words of its own."""
    function = getattr(m2, name)
    found = described(function.__doc__)
    assert list(found) == list(inspect.signature(function).parameters)
    for argument, text in found.items():
        assert len(text) > 1 and not text.startswith(("as in", "as there")), argument


@pytest.mark.parametrize("name", m2.REGISTRY)
def test_optimizers(name):
    """What they share reads alike, and no line is too long for a terminal."""
    doc = m2.REGISTRY[name].__doc__
    assert "Returns:" in doc and "\n\n\n" not in doc and "{" not in doc.split(">>>")[0]
    assert max(map(len, doc.splitlines())) <= 88
    found = described(doc)
    assert "AdamW's decay rate" in found["adam_b1"]
    if "ns_steps" in found:
        steps = m2.optimizers.NS_STEPS[name]
        assert found["ns_steps"].endswith(f"None: rows of a table, else {steps}.")


def test_an_argument_without_a_description_is_no_import():
    def new(learning_rate, no_such_argument=1):
        """New.

        Returns:
          Nothing.
        """

    with pytest.raises(ValueError, match="'no_such_argument' of new: add it to Args"):
        _shared_arguments.complete_docstring(new)


def test_names_that_mean_something_else_elsewhere():
    assert "spectral norm" in described(m2.muon2.__doc__)["shape_scale"]
    assert "elsewhere" in described(m2.muon2.__doc__)["ns_coeffs"]


def test_public_names():
    """``dir`` shows them and no modules of the inside."""
    missing = set(m2.REGISTRY) - set(m2.__all__)
    assert not missing, (
        f"muon2_optax/__init__.py must import {missing} and list it in __all__"
    )
    assert sorted(m2.__all__) == sorted(set(m2.__all__))
    assert set(dir(m2)) >= set(m2.__all__) | {"__version__"}
    for name in dir(m2):
        value = getattr(m2, name)
        if isinstance(value, types.ModuleType):
            assert name in ("diagnostics", "ready_rules"), name
        public = name.startswith("__") or name in m2.__all__
        assert public, f"{name} is imported, but not listed in __all__"
    everything = {}
    exec("from muon2_optax import *", everything)
    assert set(m2.__all__) <= set(everything)


@pytest.mark.parametrize("name", m2.REGISTRY)
def test_errors(name):
    """Every optimizer says what it refuses, in one section with its own errors."""
    doc = m2.REGISTRY[name].__doc__
    assert doc.count("Raises:") == 1
    section = doc.split("Raises:\n")[1].split("\n\n")[0]
    assert "strict" in section and "  TypeError: an unknown argument" in section
    arguments = inspect.signature(m2.REGISTRY[name]).parameters
    assert ("``radius``" in section) == ("radius" in arguments)
    assert ("``ns_steps``" in section) == ("ns_steps" in arguments)
    own = {"soap_muon": "max_precond_dim", "dion": "rank_fraction", "teon": "joint"}
    assert own.get(name, "") in section


REFUSED = [
    ({"ns_coeffs": "kellar"}, ValueError),
    ({"ns_steps": -2}, ValueError),
    ({"ns_steps": 2.5}, ValueError),
    ({"ns_coeffs": ((3.0, -3.0),)}, ValueError),
    ({"ns_coeffs": ((3.0, -4.0, 2.0),) * 3, "ns_steps": 4}, ValueError),
    ({"ns_coeffs": "muon2", "ns_steps": 6}, ValueError),
    ({"ns_coeffs": "you5", "ns_steps": 6}, ValueError),
    ({"ns_dtype": "int32"}, TypeError),
    ({"rules": ("w", None)}, TypeError),
    ({"shardings": "fsdp"}, TypeError),
]


@pytest.mark.parametrize("given, error", REFUSED, ids=str)
def test_errors_of_newton_schulz_are_those_that_it_documents(given, error):
    with pytest.raises(error):
        m2.newton_schulz_orthogonalize(**given)
    doc = m2.newton_schulz_orthogonalize.__doc__
    entry = doc.split(f"{error.__name__}: ")[1].split("Error: ")[0]
    assert all(f"``{argument}``" in entry for argument in given)
    if not {"rules", "shardings"} & set(given):
        x = jnp.ones((3, 2))
        with pytest.raises(error):
            m2.newton_schulz(x, **given)


def test_one_row_of_a_table_repeats():
    x = jnp.arange(6.0).reshape(3, 2)
    row = (3.0, -4.0, 2.0)
    one, triple = (m2.newton_schulz(x, 4, c) for c in ((row,), row))
    assert (one == triple).all()
