"""Checkpoints that survive a kill at any moment, a full disk and a damaged file.

Orbax writes each into a temporary folder and renames it when all is on disk. Every
checkpoint also holds digests of its numbers, so that damage is noticed when it is
read; training then takes the one before it.
"""

import contextlib
import io
import logging
import math
import tempfile
import textwrap
import warnings
from collections.abc import Collection, Generator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from examples import optim, runs
from examples.config import Config
from examples.files import WriteFailed
from examples.mesh import make_mesh
from examples.models import make_model
from examples.options import Failed, UserError, check
from examples.step import TrainState, abstract_params
from muon2_optax.state_sharding import abstract_state

# What they log of a damaged checkpoint reaches us as an exception as well.
for _name in ("absl", "asyncio"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)
# Orbax leaves coroutines behind where a file is missing; Python tells later.
warnings.filterwarnings("ignore", "coroutine .* never awaited", RuntimeWarning)

_PARTS = ("params", "opt_state")
_COUNTERS = ("step", "skipped", "skipped_in_a_row")


class CheckpointFailed(Failed):
    """A checkpoint could not be written."""


@jax.jit
def digest(tree: Any) -> jax.Array:
    """A 32-bit sum over all numbers of a tree, the same however they are divided."""
    total = jnp.zeros((), jnp.uint32)
    for place, leaf in enumerate(jax.tree.leaves(tree)):
        words = leaf.view(f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32)
        total += jnp.uint32(2 * place + 1) * words.sum(dtype=jnp.uint32)
    return total


@jax.jit
def all_finite(tree: Any) -> jax.Array:
    """Whether every number of a tree is finite."""
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def _reason(error: BaseException) -> str:
    """One short line out of what Orbax raises."""
    text = str(error)
    for known in ("No space left on device", "File too large", "Disk quota exceeded"):
        if known in text:
            return known
    if "incompatible handler" in text or isinstance(error, OSError):
        return "files of it are missing, cut short or unreadable"
    return f"{type(error).__name__}: {textwrap.shorten(text, 150, placeholder=' ...')}"


def _read(manager: Any, step: int, parts: dict[str, Any]) -> dict[str, Any]:
    """The parts of a checkpoint, whose abstract values are given, and its counters.

    Raises:
      Exception: of many kinds, whatever is damaged; `ValueError` if its numbers are.
    """
    mesh = jax.tree.leaves(parts)[0].sharding.mesh
    whole = NamedSharding(mesh, PartitionSpec())
    count = jax.ShapeDtypeStruct((), jnp.uint32, sharding=whole)
    names = [*_COUNTERS, *(f"{part}_digest" for part in _PARTS)]
    abstract = parts | {"counters": dict.fromkeys(names, count)}
    # Threads of Orbax print to stderr about files that they cannot read.
    with contextlib.redirect_stderr(io.StringIO()):
        found = manager.load_checkpointables(step, abstract)
    for part in parts:
        if int(digest(found[part])) != int(found["counters"][f"{part}_digest"]):
            raise ValueError("its numbers are not those that were saved")
    if (saved := int(found["counters"]["step"])) != step:
        raise ValueError(f"it is that of step {saved} under another name")
    if not bool(all_finite(found["params"])):
        raise ValueError("its parameters are not finite numbers")
    return found


def best_step(
    run_folder: Path, optimizer: str, known: Collection[int]
) -> tuple[float, int]:
    """The lowest validation loss of the known steps, and its step; else 0."""
    losses = [(math.inf, 0)]
    for record in runs.records(run_folder, "eval"):
        mine = record["optimizer"] == optimizer and record["step"] in known
        if mine and record["loss"] is not None:
            losses.append((record["loss"], record["step"]))
    return min(losses, key=lambda pair: pair[0])


class Store:
    """The checkpoints of one optimizer, written while training goes on.

    All processes of a run call the same methods in the same order.
    """

    def __init__(self, folder: Path, keep: int):
        self._folder = folder.resolve()
        self._pending: tuple[int, Any] | None = None
        self.best_step = 0  # stays, however many newer ones there are
        kinds: Any = ocp.training.preservation_policies
        policy = kinds.AnyPreservationPolicy([kinds.LatestN(keep), self])
        options = {"preservation_policy": policy, "cleanup_tmp_directories": True}
        try:
            self._manager = ocp.training.Checkpointer(str(self._folder), **options)
        except OSError as error:
            raise WriteFailed(self._folder, error) from None

    def should_preserve(self, checkpoints: Sequence[Any], **_: Any) -> list[bool]:
        """What Orbax asks before it removes old checkpoints."""
        return [checkpoint.step == self.best_step for checkpoint in checkpoints]

    def steps(self) -> list[int]:
        """The complete checkpoints, oldest first."""
        return [checkpoint.step for checkpoint in self._manager.checkpoints]

    @contextlib.contextmanager
    def _failing(self, step: int) -> Generator[None]:
        """What Orbax raises, of many kinds, becomes `CheckpointFailed`."""
        try:
            yield
        except Exception as error:
            kept = [known for known in self.steps() if known != step]
            after = f"the one of step {kept[-1]} is kept" if kept else "there is none"
            said = f"checkpoint of step {step} in {self._folder} could not be written"
            raise CheckpointFailed(
                f"{said}: {_reason(error)}; {after}; --resume goes on once that is "
                "put right"
            ) from None

    def save(self, state: TrainState) -> None:
        """Begin to write a checkpoint; the arrays may be donated when this returns."""
        self.wait()
        step = int(state.step)
        if step in self.steps():
            return
        counters = {n: getattr(state, n).astype(jnp.uint32) for n in _COUNTERS}
        parts = {name: getattr(state, name) for name in _PARTS}
        counters |= {f"{name}_digest": digest(part) for name, part in parts.items()}
        content = parts | {"counters": counters}
        with self._failing(step):
            written = self._manager.save_checkpointables_async(
                step, content, force=True
            )
        self._pending = step, written

    def wait(self) -> None:
        """Return when the checkpoint under way is on disk."""
        if self._pending is None:
            return
        (step, written), self._pending = self._pending, None
        with self._failing(step):
            written.result()
            self._manager.wait()

    def close(self) -> None:
        """Wait, and let go of the folder."""
        try:
            self.wait()
        finally:
            with contextlib.suppress(Exception):  # it repeats what `wait` has raised
                self._manager.close()

    def restore(self, abstract: TrainState) -> tuple[TrainState | None, list[str]]:
        """The newest readable state, placed as `abstract` says, and what was wrong.

        None if there is no checkpoint. Unreadable ones, if an older one can be read,
        are moved to a folder `damaged` beside this one.
        """
        bad: dict[int, str] = {}
        parts = {name: getattr(abstract, name) for name in _PARTS}
        for step in reversed(self.steps()):
            try:
                found = _read(self._manager, step, parts)
            except Exception as error:  # whatever is damaged raises its own kind
                bad[step] = _reason(error)
                continue
            self._set_aside([*bad])
            counts = (found["counters"][name].astype(jnp.int32) for name in _COUNTERS)
            state = TrainState(found["params"], found["opt_state"], *counts)
            notes = (f"checkpoint of step {n} skipped: {why}" for n, why in bad.items())
            return state, [*notes]
        for step, why in bad.items():  # the newest
            raise UserError(
                f"{self._folder}: none of {len(bad)} checkpoints is readable "
                f"(step {step}: {why}); put back a copy of one, or move that folder "
                "away and --resume from the first step"
            )
        return None, []

    def _set_aside(self, steps: list[int]) -> None:
        place = self._folder.parent.parent / "damaged"
        try:
            for step in steps if jax.process_index() == 0 else []:
                place.mkdir(exist_ok=True)
                name = f"{self._folder.name}-{step}-"
                target = tempfile.mkdtemp(prefix=name, dir=place)
                (self._folder / str(step)).rename(target)
        except OSError as error:
            raise WriteFailed(place, error) from None
        if steps:
            self._manager.reload()


def load_params(
    run_folder: str | Path,
    optimizer: str | None = None,
    step: str | int | None = None,
    *,
    mesh: Mesh | None = None,
    transform: Any = None,
) -> tuple[Any, Config, Any]:
    """The parameters of a run, the options that made them, the optimizer's state.

    Args:
      run_folder: what `--out` named.
      optimizer: which of the run's optimizers; None: its only one.
      step: a number, None (the newest), or "best": of the lowest validation loss.
      mesh: where they go; None: one device.
      transform: the optimizer, to load its state as well; else that is None.

    Raises:
      UserError: there is no such checkpoint, it cannot be read, its numbers are not
        those that were saved, or they are not finite.
    """
    folder = Path(run_folder)
    config = runs.stored_config(folder)
    names = [plan.name for plan in optim.plans(config.optim, config.run.steps)]
    if optimizer is None and len(names) == 1:
        (optimizer,) = names
    ask = "name one of its optimizers with --optimizer"
    said = ask if optimizer is None else f"no {optimizer}"
    check(optimizer in names, f"{folder}: {said} (it has {', '.join(names)})")
    place = (folder / runs.CHECKPOINT_FOLDER / str(optimizer)).resolve()
    check(place.is_dir(), f"{place}: no such folder; the run has no checkpoint yet")
    mesh = mesh or make_mesh("data=1", jax.local_devices()[:1])
    _, init = make_model(config.model, runs.stored_settings(folder)["vocab_size"])
    parts = {"params": abstract_params(init, mesh)}
    if transform is not None:
        parts["opt_state"] = abstract_state(transform.init, parts["params"], mesh)
    with ocp.training.Checkpointer(str(place)) as manager:
        known = [checkpoint.step for checkpoint in manager.checkpoints]
        if step == "best":
            _, step = best_step(folder, str(optimizer), known)
            check(step > 0, f"{place}: no checkpoint with a validation loss")
        chosen = max(known, default=0) if step is None else int(step)
        there = f"(there: {', '.join(map(str, known)) or 'none'})"
        check(chosen in known, f"{place}: no checkpoint of step {chosen} {there}")
        try:
            found = _read(manager, chosen, parts)
        except Exception as error:  # whatever is damaged raises its own kind
            said = f"the checkpoint of step {chosen} is unreadable ({_reason(error)})"
            remedy = f"name another with --step {there}, or put back a copy"
            raise UserError(f"{place}: {said}; {remedy}") from None
    return found["params"], config, found.get("opt_state")
