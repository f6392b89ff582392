"""The library behind the neutral keywords of ``public_cases``."""

import inspect

import jax
import optax

import muon2_optax as m2


def _axes(layout):
    """``(in_axes, out_axes)`` or a Spec, or None for "not a matrix"."""
    if layout is None:
        return None
    pair = (layout.in_axes, layout.out_axes) if hasattr(layout, "in_axes") else layout
    return m2.MatrixAxes(*pair)


def _exact(name):
    return f"^{name}$"


def rules_from_layout(layout, tree):
    """The rules that a ``layout(path, leaf)`` function means for one tree."""
    patterns = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        patterns.append((_exact(name), _axes(layout(path, leaf))))
    return m2.MatrixRules(tuple(patterns))


def rules_from_tree(spec_tree):
    flat = jax.tree_util.tree_flatten_with_path(
        spec_tree, is_leaf=lambda x: x is None or hasattr(x, "in_axes")
    )[0]
    patterns = []
    for path, spec in flat:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        patterns.append((f"^{name}(/|$)", _axes(spec)))
    return m2.MatrixRules(tuple(patterns))


def _lazy(build):
    """An optimizer whose rules are read off the tree that it is given.

    The cases describe the axes with a function of path and leaf, which rules are not.
    """

    def init(params):
        return build(params).init(params)

    def update(updates, state, params=None, **extra):
        return build(updates).update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _optimizer(factory, kw, not_applicable):
    kw.setdefault("learning_rate", 1.0)
    if "beta" in kw:
        kw["b1"] = kw.pop("beta")
    if (rms := kw.pop("consistent_rms", None)) is not None:
        assert rms == 0.2
        kw["shape_scale"] = "match_rms"
    if kw.pop("complex_precond", None) is not None:
        raise not_applicable("the other normalizations are schedules of their own")
    known = inspect.signature(factory).parameters
    if "radius" in known:
        kw.setdefault("radius", "init")  # some cases start from zero
        if kw.pop("weight_decay", 0.0):
            raise not_applicable(f"{factory.__name__} has no weight decay")
    for key in kw.keys() & {"b1", "nesterov", "ns_coeffs", "ns_steps", "shape_scale"}:
        if key not in known:
            raise not_applicable(f"{factory.__name__} has no {key}")
    if (layout := kw.pop("layout", None)) is not None:
        factory(**kw)  # refuses unknown keywords at once
        return _lazy(lambda tree: factory(rules=rules_from_layout(layout, tree), **kw))
    if (spec := kw.pop("spec_tree", None)) is not None:
        return factory(rules=rules_from_tree(spec), **kw)
    if (axes := kw.pop("spec_all", None)) is not None:
        return factory(rules=m2.MatrixRules(((r"", m2.MatrixAxes(*axes)),)), **kw)
    return factory(**kw)


def optimizer(name, not_applicable):
    """``make(**neutral keywords)`` for one optimizer of the registry."""
    factory = m2.REGISTRY[name]
    known = inspect.signature(factory).parameters

    def make(**kw):
        if "eps" in known:
            kw.setdefault("eps", 0.0)  # scale invariance is claimed for eps=0
        if "shape_scale" in known and known["shape_scale"].default == "match_rms":
            # The cases' bounds on singular values are in Keller's units.
            if "consistent_rms" not in kw:
                kw.setdefault("shape_scale", "keller")
        return _optimizer(factory, kw, not_applicable)

    make.raw = factory
    return make


def second(b2=0.999, eps=1e-8):
    return m2.scale_by_second_moment(b1=0.0, b2=b2, eps=eps, bias_correction=True)


def factored(b2=0.9, eps=1e-30, layout=None):
    def build(tree):
        rules = None if layout is None else rules_from_layout(layout, tree)
        return m2.factorized_second_moment(
            b1=0.0, b2=b2, eps=eps, bias_correction=True, rules=rules
        )

    return _lazy(build)
