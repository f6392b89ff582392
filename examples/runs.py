"""The folder of a run: who may write into it, and what it was begun with."""

import contextlib
import dataclasses
import fcntl
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from examples import config as configs
from examples.config import Config
from examples.files import WriteFailed, read_json, write_json
from examples.options import UserError, check

SETTINGS_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
CHECKPOINT_FOLDER = "checkpoints"

# What may differ between the start of a run and its continuation: nothing here changes
# what is computed, except that more steps make the schedule longer.
_FREE = frozenset(
    "steps accumulate mesh distributed loss_chunks max_bad_steps eval_every log_every "
    "sample_prompt task_data task_limit out data remat attention "
    "save_every save_minutes keep keep_best resume".split()
)


def holds_run(folder: Path) -> bool:
    """Whether a run was started there."""
    names = (SETTINGS_FILE, METRICS_FILE, CHECKPOINT_FOLDER)
    return any((folder / name).exists() for name in names)


def stored_settings(folder: Path) -> dict[str, Any]:
    """What `config.json` of a run says; `UserError` if it cannot be read."""
    if not (folder / SETTINGS_FILE).exists():
        said = "no run there"
        if holds_run(folder):
            said = "holds a run that has lost its options; put back a copy of the file"
        raise UserError(f"{folder}: {said} (no {SETTINGS_FILE})")
    return read_json(folder / SETTINGS_FILE)


def stored_config(folder: Path) -> Config:
    """The options that a run was begun with; `UserError` if they cannot be read."""
    return Config.from_dict(stored_settings(folder)["config"])


def check_unchanged(old: Config, new: Config, where: str) -> None:
    """Name the options that a continued run must not change, if they differ.

    `where` is the option that named the run, for the message.
    """
    before, after = old.flat(), new.flat()
    # An MoE's balance loss is a mean over the tokens of a micro-batch.
    free = _FREE - ({"accumulate"} if new.model.architecture == "moe" else set())
    changed = [k for k in after if k not in free and before[k] != after[k]]
    changed += ["steps"] if after["steps"] < before["steps"] else []
    said = ", ".join(
        f"--{k.replace('_', '-')} was {before[k]}, now {after[k]}" for k in changed
    )
    remedy = "leave them as they were, or choose another --out"
    check(not changed, f"{where}: options differ: {said}; {remedy}")


def read_options(argv: Sequence[str] | None) -> Config:
    """The options of a run; where it is continued, those not given are as it began."""
    config = configs.parse(argv)
    if config.save.resume == "no":
        return config
    check(config.run.out is not None, "--resume needs --out, the folder of the run")
    folder = Path(config.run.out or "")
    if config.save.resume == "auto" and not holds_run(folder):
        return config
    old = stored_config(folder)
    config = configs.parse(argv, old.flat() | {"resume": config.save.resume})
    check_unchanged(old, config, f"--resume {folder}")
    return config


def claim_folder(config: Config) -> Path:
    """Create the output folder; an earlier run's files are never overwritten."""
    name = config.run.out or f"runs/pretrain-{config.fingerprint()}"
    folder, number = Path(name), 1
    while config.run.out is None and folder.exists():
        number += 1
        folder = Path(f"{name}-{number}")
    taken = config.save.resume == "no" and holds_run(folder)
    remedy = "already holds a run; choose another, or --resume it"
    check(not taken, f"--out {folder}: {remedy}")
    try:
        folder.mkdir(parents=True, exist_ok=config.run.out is not None)
    except OSError as error:
        raise UserError(f"--out {folder}: {error.strerror}") from None
    return folder


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None, None, None]:
    """Keep other runs out of the folder; the system lets go when a process is killed.

    Some network file systems know no locks: there the run goes on without one.
    """
    path = folder / "lock"
    try:
        file = path.open("ab")
    except OSError as error:
        raise WriteFailed(path, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = "another run is writing there; wait until it ends, or choose another"
            raise UserError(f"--out {folder}: {said}") from None
        except OSError:
            pass
        yield


def store_settings(
    folder: Path, config: Config, vocab_size: int, digest: str, *, write: bool
) -> list[str]:
    """Write `config.json`; a run that goes on must have the tokens that it had.

    All processes of a run check it, one may write. Returns what a run that goes on does
    otherwise than before, as lines to show.
    """
    path, changes = folder / SETTINGS_FILE, []
    if path.exists():
        stored, old = stored_settings(folder), stored_config(folder).run
        check(
            stored["text"] == digest,
            f"--resume {folder}: the text or its tokenizer differs (hash "
            f"{stored['text']}, now {digest}); give the --data and --tokenizer that "
            "the run began with",
        )
        if old.steps != config.run.steps:
            changes.append(
                f"changed: --steps was {old.steps}, now {config.run.steps}: the "
                "learning rate follows the schedule of the longer run from here on"
            )
        if old.mesh != config.run.mesh:
            changes.append(f"changed: --mesh was {old.mesh or 'all devices'}")
    if write:
        content = {"config": dataclasses.asdict(config), "vocab_size": vocab_size}
        write_json(path, content | {"text": digest})
    return changes
