"""Arguments that cannot be meant are refused where they are given, in one sentence."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import OPTIMIZERS, sample

import muon2_optax as m2

# What needs arguments beside those that are checked.
NEEDS = {
    "ema_nesterov": {"tx": optax.sgd(0.1), "beta": 0.5},
    "keep_norm": {"inner": optax.identity()},
    "hyperball": {"learning_rate": 0.1},
}
TRANSFORMS = [
    "scale_by_momentum",
    "scale_by_second_moment",
    "factorized_second_moment",
    "scale_by_low_rank_orthonormal",
    "scale_by_output_second_moment",
    "scale_by_neuron_second_moment",
    "scale_to_rms",
    *NEEDS,
]
DECAYS = {"b1", "b2", "adam_b1", "adam_b2", "decay"}
EPS = {"eps", "eps_root", "adam_eps", "adam_eps_root"}


def factories():
    for name in OPTIMIZERS:
        yield m2.REGISTRY[name], {"learning_rate": 0.1}
    for name in TRANSFORMS:
        yield getattr(m2, name), NEEDS.get(name, {})


def have(names):
    """Every factory with each of the arguments that it has."""
    return [
        pytest.param(factory, needs, name, id=f"{factory.__name__}-{name}")
        for factory, needs in factories()
        for name in inspect.signature(factory).parameters
        if name in names
    ]


def one_sentence(error):
    text = str(error.value)
    return ". " not in text and "\n" not in text


@pytest.mark.parametrize("factory, needs, name", have(DECAYS))
def test_decay_rates(factory, needs, name):
    for value in (1.0, 1, -0.1, float("nan"), np.float32(1.5)):
        with pytest.raises(ValueError, match=rf"^{name} must lie in \[0, 1\)") as error:
            factory(**needs | {name: value})
        assert one_sentence(error)
    with pytest.raises(TypeError, match=f"^{name} must be .*inject_hyperparams"):
        factory(**needs | {name: optax.constant_schedule(0.5)})
    factory(**needs | {name: 0})
    factory(**needs | {name: np.float32(0.5)})
    factory(**needs | {name: jnp.float32(2.0)})  # an array may be a tracer elsewhere
    with pytest.raises(ValueError, match=rf"^{name} must lie in \[0, 1\)"):
        factory(**needs | {name: np.asarray(1.25)})  # which NumPy's cannot be


@pytest.mark.parametrize("factory, needs, name", have(EPS))
def test_eps(factory, needs, name):
    for value in (-1e-8, float("nan")):
        with pytest.raises(ValueError, match=f"^{name} must be 0 or more") as error:
            factory(**needs | {name: value})
        assert one_sentence(error)
    factory(**needs | {name: 0.0})


@pytest.mark.parametrize("name", [*OPTIMIZERS, "hyperball"])
def test_learning_rate(name):
    with pytest.raises(ValueError, match="^learning_rate must be .* got None"):
        getattr(m2, name)(None)
    with pytest.raises(TypeError, match="missing 1 required positional"):
        getattr(m2, name)()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_second_argument_of_optax(name):
    """``optax.contrib.muon(0.02, (3.4, -4.8, 2.0))`` has coefficients there."""
    for given in ((3.4, -4.8, 2.0), [(2.0, -1.5, 0.5)], "dion"):
        with pytest.raises(TypeError, match="^b1 must be a number.*ns_coeffs") as error:
            m2.REGISTRY[name](0.02, given)
        assert one_sentence(error)


@pytest.mark.parametrize(
    "given, name",
    [
        ({"beta": 0.9}, "b1"),
        ({"betas": (0.9, 0.9)}, "b1"),
        ({"momentum": 0.9}, "b1"),
        ({"lr": 0.1}, "learning_rate"),
        ({"eps": 1e-7}, "adam_eps.*Frobenius"),
        ({"mask": None}, "weight_decay_mask"),
        ({"ns_coefficients": (2.0, -1.5, 0.5)}, "ns_coeffs"),
        ({"adjust_lr_fn": "original"}, "shape_scale"),
        ({"consistent_rms": 0.3}, "MatchRMS"),
        ({"preconditioning": "schatten"}, "normalization"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_names_of_other_libraries(given, name):
    (other,) = given
    with pytest.raises(TypeError, match=f"no argument {other!r}: give .*{name}"):
        m2.muon(0.1, **given)
    # Unknown everywhere: Python's own error, but for what is misspelt.
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'$"):
        m2.muon(0.1, window=True)


RATES = {"learning_rate", "adam_learning_rate", "weight_decay", "adam_weight_decay"}


@pytest.mark.parametrize("factory, needs, name", have(RATES | {"beta"}))
def test_rates_that_go_the_wrong_way(factory, needs, name):
    """As far as a number shows it: a schedule or an injected array is not known."""
    for value in (-0.2, -1, np.float32(-0.3), float("nan")):
        with pytest.raises(ValueError, match=f"^{name} must be 0 or more") as error:
            factory(**needs | {name: value})
        assert one_sentence(error)
    for value in (0, 0.2, optax.constant_schedule(-0.2), jnp.float32(-0.2)):
        factory(**needs | {name: value})


@pytest.mark.parametrize(
    "name",
    [*OPTIMIZERS, *TRANSFORMS]
    + ["newton_schulz", "newton_schulz_orthogonalize", "orthogonalize_jointly"]
    + ["equilibrate", "in_blocks", "periodically", "qk_clip", "scale_by_shape"],
)
def test_misspelt_names(name):
    """The closest name stands in the same sentence, for each argument it has."""
    function = getattr(m2, name)
    for known in inspect.signature(function).parameters:
        if len(known) > 4:
            wrong = known[:-2] + known[-1]
            told = f"argument {wrong!r}; did you mean {known!r}"
            with pytest.raises(TypeError, match=told) as error:
                function(**{wrong: None})
            assert one_sentence(error)


@pytest.mark.parametrize("name", ["muon2_f", "muon", "soap_muon", "muon2_f_h"])
def test_a_second_moment_without_a_dtype_to_choose(name):
    """``mu_dtype``, which is spelt alike, is not what was meant."""
    with pytest.raises(TypeError, match="'nu_dtype': no dtype of a second moment"):
        m2.REGISTRY[name](0.1, nu_dtype="float32")


@pytest.mark.parametrize("name", ["muon_h", "muon2_h", "muon2_f_h"])
def test_what_the_hyperball_has_in_place_of_decay_and_factor(name):
    plain = name.removesuffix("_h")
    with pytest.raises(
        TypeError, match=f"no argument 'weight_decay': .*norm.* {plain} "
    ):
        m2.REGISTRY[name](0.02, weight_decay=0.3)
    with pytest.raises(TypeError, match=f"no argument 'shape_scale': .* {plain} has"):
        m2.REGISTRY[name](0.02, shape_scale="keller")


def test_the_names_given_instead_are_the_functions_own():
    with pytest.raises(TypeError, match="'betas': give b1 and b2$"):
        m2.muon2(0.1, betas=(0.9, 0.9))
    with pytest.raises(TypeError, match="'betas': give b1$"):
        m2.scale_by_momentum(betas=(0.9, 0.9))
    for factory, given in [
        (m2.scale_by_momentum, {"lr": 0.1}),
        (m2.muon, {"beta2": 0.9}),
        (m2.scale_to_rms, {"momentum": 0.9}),
    ]:
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            factory(**given)


@pytest.mark.parametrize("factory, needs, name", have({"weight_decay", "dampening"}))
def test_decay_and_dampening(factory, needs, name):
    """None is no decay to some, and would fail in the first update only."""
    for value in ("0.1", (0.1,), True, m2.AOL(), np.ones(2), jnp.ones(2)):
        with pytest.raises(TypeError, match=f"^{name} must be a number") as error:
            factory(**needs | {name: value})
        assert one_sentence(error)
    if name == "weight_decay":
        with pytest.raises(ValueError, match="^weight_decay must be .* got None"):
            factory(**needs | {name: None})
    else:
        factory(**needs | {name: None})
    for value in (0, np.float32(0.5), np.asarray(0.5), jnp.asarray(0.5)):
        factory(**needs | {name: value})


def test_arrays_of_several_numbers():
    """Coefficients in Optax's second place would broadcast along three outputs."""
    for given in (np.asarray((3.4, -4.8, 2.0)), jnp.asarray((3.4, -4.8, 2.0))):
        with pytest.raises(TypeError, match=r"^b1 must .*\(3,\); ns_coeffs"):
            m2.muon(0.02, given)
    with pytest.raises(TypeError, match=r"^adam_learning_rate must .*shape \(2,\)"):
        jax.eval_shape(
            lambda x: m2.muon2(0.1, adam_learning_rate=x).init(x), jnp.ones(2)
        )
    with pytest.raises(TypeError, match="^learning_rate must be .* got True"):
        m2.dion(True)
    with pytest.raises(ValueError, match="^rms must be 0 or more, got -0.3"):
        m2.adamuon(0.1, rms=-0.3)
    with pytest.raises(ValueError, match="^weight_decay must be .* got None"):
        m2.add_cautious_weight_decay(None)


@pytest.mark.parametrize(
    "make, name",
    [
        (m2.keep_norm, "inner"),
        (m2.scale_by_dual_norm, "inner"),
        (lambda tx: m2.ema_nesterov(tx, beta=0.3), "tx"),
        (lambda tx: m2.periodically(optax.identity(), tx, 2), "often"),
    ],
    ids=["keep_norm", "scale_by_dual_norm", "ema_nesterov", "periodically"],
)
def test_transformations(make, name):
    for given in (None, optax.lion, 0.1):
        with pytest.raises(TypeError, match=f"^{name} must be an optax.Grad") as error:
            make(given)
        assert one_sentence(error)


def test_periods_and_grids():
    with pytest.raises(TypeError, match="^period must be a number, got '4'"):
        m2.muon_bp(0.1, period="4")
    for grid in (2, (2,), (1.5, 2), (0, 2)):
        with pytest.raises(ValueError, match="^block_grid must be two whole numbers"):
            m2.muon_bp(0.1, block_grid=grid)


def test_a_name_that_the_function_has_is_its_own():
    m2.ema_nesterov(optax.sgd(0.1), beta=0.3)


def test_traced_and_scheduled_arguments_pass():
    tx = optax.inject_hyperparams(m2.muon2)(
        optax.constant_schedule(0.1), b1=optax.linear_schedule(0.8, 0.9, 10), eps=1e-9
    )
    params = sample(0, {"w": (4, 6), "b": (6,)})
    assert set(tx.init(params).hyperparams) >= {"b1", "b2", "adam_b1", "eps"}


FACTORIES = [
    *m2.REGISTRY.values(),
    m2.scale_by_momentum,
    m2.scale_by_second_moment,
    m2.scale_by_shape,
    m2.scale_to_rms,
    m2.hyperball,
    m2.keep_norm,
    m2.periodically,
    m2.in_blocks,
    m2.orthogonalize_jointly,
    m2.equilibrate,
    m2.newton_schulz_orthogonalize,
    m2.MatrixRules,
    m2.MatchRMS,
    m2.Schedule,
]


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda f: f.__name__)
def test_no_error_prints_the_parameters(factory):
    """Given in the place of any argument, they may be gigabytes."""
    params = {"w": jnp.arange(777.0).reshape(21, 37), "b": [jnp.zeros(19)]}
    parameters = inspect.signature(factory).parameters
    needed = {n: 0.5 for n, p in parameters.items() if p.default is p.empty}
    refused = 0
    for name in parameters:
        try:
            factory(**needed | {name: params})
        except Exception as err:
            refused += 1
            assert "Array(" not in str(err) and len(str(err)) < 500, name
    assert refused


@pytest.mark.parametrize("factory", m2.REGISTRY.values(), ids=lambda f: f.__name__)
def test_the_type_of_a_wrong_argument_is_said(factory):
    params = {"w": jnp.arange(6.0).reshape(2, 3)}
    with pytest.raises(TypeError, match="b1 must be a number.* of type dict"):
        factory(0.03, params)
    with pytest.raises(TypeError, match="rules must be .* of type dict"):
        factory(0.03, rules=params)
    with pytest.raises(TypeError, match="b1 must be a number, got '0.9'"):
        factory(0.03, b1="0.9")
