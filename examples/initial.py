"""The parameters with which a run begins if --init-from names some."""

import hashlib
from pathlib import Path
from typing import Any

import jax

from examples import checkpoint, export, optim, runs
from examples.data import tokens as tok
from examples.options import check, flag
from examples.setup import Setup

# Options on which the meaning of the parameters depends, but not their shapes.
_UNSEEN = ("heads", "rope_theta", "active_experts")


def _check_same(source: str, setup: Setup) -> None:
    """Refuses a run whose parameters would mean something else in this model."""
    stored = runs.stored_settings(Path(source)).get("tokenizer")
    tokenizers = (
        tok.load_tokenizer(Path(source, tok.FILE), stored),
        setup.data.tokenizer,
    )
    texts = [hashlib.sha256(t.content()).hexdigest()[:12] for t in tokenizers]
    pairs = {"the tokenizer's hash": texts}
    models = runs.stored_config(Path(source)).model, setup.config.model
    pairs |= {flag(key): [getattr(m, key) for m in models] for key in _UNSEEN}
    for name, (theirs, ours) in pairs.items():
        said = f"{name} is {theirs} there, {ours} here; give what that run had"
        check(theirs == ours, f"--init-from {source}: {said}")


def load(setup: Setup, plan: optim.Plan) -> tuple[Any, Any]:
    """The parameters of --init-from and, if it is wanted, the optimizer's state.

    Raises:
      UserError: they cannot be read, or belong to another model or tokenizer.
    """
    run, params = setup.config.run, setup.params
    source = str(run.init_from)
    if source.endswith(export.SUFFIX):
        return export.load(Path(source), setup.config.model, params), None
    _check_same(source, setup)
    transform = plan.transform if run.init_optimizer else None
    old = optim.plans(runs.stored_config(Path(source)).optim, steps=1)
    name = plan.name if len(old) > 1 or transform is not None else None
    places = {"mesh": setup.mesh, "transform": transform}
    found, _, opt_state = checkpoint.load_params(source, name, **places)
    shapes = [jax.tree.map(lambda x: x.shape, tree) for tree in (params, found)]
    said = "its parameters are not of the shapes of this run's model and vocabulary"
    check(shapes[0] == shapes[1], f"--init-from {source}: {said}")
    return found, opt_state
