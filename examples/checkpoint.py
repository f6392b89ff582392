"""Checkpoints that survive a kill at any moment, a full disk and a damaged file.

Orbax writes each into a temporary folder and renames it when all is on disk. Every
checkpoint also holds a digest of its numbers, so that damage is noticed when it is
read; then the one before it is taken.
"""

import contextlib
import logging
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from examples import optim
from examples.config import CHECKPOINT_FOLDER, Config
from examples.files import WriteFailed
from examples.flags import UserError
from examples.folder import stored_config, stored_settings
from examples.mesh import make_mesh
from examples.state import TrainState, abstract_params, make_model

# Its warnings are about fallbacks that are no news here; errors reach us as exceptions.
logging.getLogger("absl").setLevel(logging.CRITICAL)


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written; shown as one line, exit code 1."""


@jax.jit
def digest(tree: Any) -> jax.Array:
    """A 32-bit sum over all numbers of a tree, the same however they are divided."""
    total = jnp.zeros((), jnp.uint32)
    for place, leaf in enumerate(jax.tree.leaves(tree)):
        width = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
        if leaf.dtype == jnp.bool:
            words = leaf.astype(jnp.uint32)
        else:
            words = jax.lax.bitcast_convert_type(leaf, width).astype(jnp.uint32)
        total += jnp.uint32(2 * place + 1) * words.sum(dtype=jnp.uint32)
    return total


def _reason(error: BaseException) -> str:
    """One short line out of what Orbax raises."""
    text = str(error)
    for known in ("No space left on device", "File too large", "Disk quota exceeded"):
        if known in text:
            return known
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = textwrap.shorten(lines[0], 150, placeholder=" ...") if lines else ""
    return f"{type(error).__name__}: {said}".removesuffix(": ")


def _parts(state: TrainState) -> dict[str, Any]:
    """The state under the names that it is stored by."""
    parts = {
        "params": state.params,
        "opt_state": state.opt_state,
        "counters": {
            "step": state.step,
            "skipped": state.skipped,
            "skipped_in_a_row": state.skipped_in_a_row,
        },
    }
    return parts if state.ema is None else parts | {"ema": state.ema}


class Store:
    """The checkpoints of one optimizer, written while training goes on.

    All processes of a run call the same methods in the same order.
    """

    def __init__(self, folder: Path, keep: int):
        self._folder = folder.resolve()
        self._pending: tuple[int, Any] | None = None
        newest: Any = ocp.training.preservation_policies.LatestN(keep)
        try:
            self._manager = ocp.training.Checkpointer(
                str(self._folder),
                preservation_policy=newest,
                cleanup_tmp_directories=True,
            )
        except OSError as error:
            raise WriteFailed(self._folder, error) from None

    def steps(self) -> list[int]:
        """The complete checkpoints, oldest first."""
        return [checkpoint.step for checkpoint in self._manager.checkpoints]

    def _fail(self, step: int, error: Exception) -> CheckpointFailed:
        kept = [known for known in self.steps() if known != step]
        after = f"the one of step {kept[-1]} is kept" if kept else "there is none yet"
        return CheckpointFailed(
            f"checkpoint of step {step} in {self._folder} could not be written: "
            f"{_reason(error)}; {after}; --resume goes on once that is put right"
        )

    def save(self, state: TrainState) -> None:
        """Begin to write a checkpoint; the arrays may be donated when this returns."""
        self.wait()
        step = int(state.step)
        if step in self.steps():
            return
        parts = _parts(state)
        parts["counters"]["digest"] = digest(state)
        try:
            written = self._manager.save_checkpointables_async(step, parts, force=True)
        except Exception as error:  # Orbax raises many kinds
            raise self._fail(step, error) from None
        self._pending = step, written

    def wait(self) -> None:
        """Return when the checkpoint under way is on disk."""
        if self._pending is None:
            return
        (step, written), self._pending = self._pending, None
        try:
            written.result()
            self._manager.wait()
        except Exception as error:  # Orbax raises many kinds
            raise self._fail(step, error) from None

    def close(self) -> None:
        """Wait, and let go of the folder."""
        try:
            self.wait()
        finally:
            with contextlib.suppress(Exception):  # it repeats what `wait` has raised
                self._manager.close()

    def _read(self, step: int, abstract: TrainState) -> TrainState:
        parts = _parts(abstract)
        word = jax.ShapeDtypeStruct((), jnp.uint32, sharding=abstract.step.sharding)
        parts["counters"]["digest"] = word
        found = self._manager.load_checkpointables(step, parts)
        counters = found.pop("counters")
        expected = int(counters.pop("digest"))
        state = TrainState(**({"ema": None} | found | counters))
        if int(digest(state)) != expected:
            raise ValueError("its numbers are not those that were saved")
        return state

    def restore(self, abstract: TrainState) -> tuple[TrainState | None, list[str]]:
        """The newest readable state, placed as `abstract` says, and what was wrong.

        None if there is no checkpoint. Unreadable ones, if an older one can be read,
        are moved to a folder `damaged` beside this one.
        """
        bad: list[tuple[int, str]] = []
        for step in reversed(self.steps()):
            try:
                state = self._read(step, abstract)
            except Exception as error:  # whatever is damaged raises its own kind
                bad.append((step, _reason(error)))
                continue
            self._set_aside([number for number, _ in bad])
            return state, [f"checkpoint of step {n} skipped: {why}" for n, why in bad]
        if bad:
            step, why = bad[0]
            raise UserError(
                f"{self._folder}: none of {len(bad)} checkpoints is readable "
                f"(step {step}: {why}); put back a copy of one, or move that folder "
                "away and --resume from the first step"
            )
        return None, []

    def _set_aside(self, steps: list[int]) -> None:
        if steps and jax.process_index() == 0:
            place = self._folder.parent.parent / "damaged"
            place.mkdir(exist_ok=True)
            for step in steps:
                target = place / f"{self._folder.name}-{step}"
                number = 1
                while target.exists():
                    number += 1
                    target = place / f"{self._folder.name}-{step}-{number}"
                (self._folder / str(step)).rename(target)
        if steps:
            self._manager.reload()


def load_params(
    run_folder: str | Path, optimizer: str | None = None, step: int | None = None
) -> tuple[Any, Config]:
    """The parameters of a run, on one device, and the options that made them.

    Args:
      run_folder: what `--out` named.
      optimizer: which of the run's optimizers; None: its only one.
      step: which checkpoint; None: the newest one.

    Returns:
      The parameters (the averaged ones if the run has --ema), and the configuration.
    """
    folder = Path(run_folder)
    config = stored_config(folder)
    vocab_size = stored_settings(folder)["vocab_size"]
    names = [plan.name for plan in optim.plans(config.optim, config.run.steps)]
    if optimizer is None and len(names) == 1:
        (optimizer,) = names
    if optimizer not in names:
        said = "name one of its optimizers" if optimizer is None else f"no {optimizer}"
        raise UserError(f"{folder}: {said} (it has {', '.join(names)})")
    place = (folder / CHECKPOINT_FOLDER / optimizer).resolve()
    if not place.is_dir():
        raise UserError(f"{place}: no such folder; the run has no checkpoint yet")
    _, init = make_model(config.model, vocab_size)
    params = abstract_params(init, make_mesh("", jax.local_devices()[:1]))
    name = "params" if config.run.ema is None else "ema"
    with ocp.training.Checkpointer(str(place)) as manager:
        steps = [checkpoint.step for checkpoint in manager.checkpoints]
        if not steps or (step is not None and step not in steps):
            which = f"of step {step} " if step is not None else ""
            raise UserError(f"{place}: no checkpoint {which}(there: {steps or 'none'})")
        chosen = steps[-1] if step is None else step
        try:
            return manager.load_checkpointables(chosen, {name: params})[name], config
        except Exception as error:  # whatever is damaged raises its own kind
            raise UserError(
                f"{place}: the checkpoint of step {chosen} is unreadable "
                f"({_reason(error)}); "
                + _remedy(manager, {name: params}, [n for n in steps if n != chosen])
            ) from None


def _remedy(manager: Any, abstract: dict[str, Any], others: list[int]) -> str:
    """What to do about a damaged checkpoint: take the newest that can be read."""
    for step in reversed(others):
        with contextlib.suppress(Exception):
            manager.load_checkpointables(step, abstract)
            return f"--step {step} can be read"
    return "no other can be read: put back a copy of one, or train again"
