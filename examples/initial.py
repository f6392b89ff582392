"""The state with which training begins: new, or with the parameters of --init-from."""

import hashlib
from pathlib import Path
from typing import Any

import jax

from examples import checkpoint, export, optim, runs, step
from examples.data import tokens as tok
from examples.options import check, flag
from examples.setup import Setup

# Options on which the meaning of the parameters depends, but not their shapes.
_UNSEEN = ("heads", "rope_theta", "active_experts")


def first_state(
    setup: Setup, plan: optim.Plan, abstract: step.TrainState
) -> step.TrainState:
    """The state before the first step."""
    if setup.config.run.init_from is None:
        key = jax.random.key(setup.config.run.seed)
        return step.initial_state(setup.init, plan.transform, abstract, key)
    params, old = load(setup, plan)
    state = step.initial_state(lambda p: p, plan.transform, abstract, params)
    if old is None:
        return state
    return state._replace(opt_state=optim.at_schedule_start(old))


def load(setup: Setup, plan: optim.Plan) -> tuple[Any, Any]:
    """The parameters of --init-from and, if it is wanted, the optimizer's state.

    Raises:
      UserError: they cannot be read, or would mean something else in this run.
    """
    run, params = setup.config.run, setup.params
    source = Path(str(run.init_from))
    if source.suffix == export.SUFFIX:
        return export.load(source, setup.config.model, params), None
    config, known = runs.stored_config(source), runs.stored_settings(source)
    theirs = tok.load_tokenizer(source / tok.FILE, known.get("tokenizer"))
    tokenizers = theirs, setup.data.tokenizer
    texts = [hashlib.sha256(t.content()).hexdigest()[:12] for t in tokenizers]
    pairs = {"the tokenizer's hash": texts}
    models = config.model, setup.config.model
    pairs |= {flag(key): [getattr(m, key) for m in models] for key in _UNSEEN}
    if run.init_optimizer:
        states = (c.optim.mu_dtype or "float32" for c in (config, setup.config))
        pairs["--init-optimizer: --mu-dtype"] = [*states]
    for name, (there, here) in pairs.items():
        said = f"{name} is {there} there, {here} here; give what that run had"
        check(there == here, f"--init-from {source}: {said}")
    transform = plan.transform if run.init_optimizer else None
    several = len(optim.plans(config.optim, steps=1)) > 1
    name = plan.name if several or run.init_optimizer else None
    places = {"mesh": setup.mesh, "transform": transform}
    found, _, opt_state = checkpoint.load_params(source, name, **places)
    shapes = [jax.tree.map(lambda x: x.shape, tree) for tree in (params, found)]
    said = "its parameters are not of the shapes of this run's model and vocabulary"
    check(shapes[0] == shapes[1], f"--init-from {source}: {said}")
    return found, opt_state
