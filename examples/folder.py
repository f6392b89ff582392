"""The folder of a run: who may write into it, and what it was begun with."""

import contextlib
import fcntl
import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from examples.config import CHECKPOINT_FOLDER, METRICS_FILE, SETTINGS_FILE, Config
from examples.files import WriteFailed, write_atomically
from examples.flags import UserError, check

LOCK_FILE = "lock"

# What may differ between the start of a run and its continuation: nothing here changes
# what is computed, except that more steps make the schedule longer.
_FREE = frozenset(
    "steps accumulate mesh distributed loss_chunks max_bad_steps eval_every log_every "
    "eval_tokens compile_cache tensorboard wandb out data remat attention "
    "save_every save_minutes keep resume".split()
)


def holds_run(folder: Path) -> bool:
    """Whether a run was started there."""
    names = (SETTINGS_FILE, METRICS_FILE, CHECKPOINT_FOLDER)
    return any((folder / name).exists() for name in names)


def claim_folder(config: Config) -> Path:
    """Create the output folder; an earlier run's files are never overwritten."""
    if config.run.out is not None:
        folder = Path(config.run.out)
        if config.save.resume == "no" and holds_run(folder):
            raise UserError(
                f"--out {folder}: already holds a run; choose another, or --resume it"
            )
        _make(folder, exist_ok=True)
        return folder
    name = f"pretrain-{config.fingerprint()}"
    number = 1
    while True:
        folder = Path("runs", name if number == 1 else f"{name}-{number}")
        try:
            _make(folder, exist_ok=False)
            return folder
        except FileExistsError:
            number += 1


def _make(folder: Path, *, exist_ok: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        if exist_ok:  # then it is a file that is in the way
            raise UserError(f"--out {folder}: there is a file of that name") from None
        raise
    except OSError as error:
        raise UserError(f"--out {folder}: {error.strerror}") from None


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None, None, None]:
    """Keep other runs out of the folder; the system lets go when a process is killed.

    Some network file systems know no locks: there the run goes on without one.
    """
    path = folder / LOCK_FILE
    try:
        file = path.open("ab")
    except OSError as error:
        raise WriteFailed(path, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"--out {folder}: another run is writing there; wait until it ends, or "
                "choose another --out"
            ) from None
        except OSError:
            pass
        yield


def stored_settings(folder: Path) -> dict[str, Any]:
    """What `config.json` of a run says; `UserError` if it cannot be read."""
    path = folder / SETTINGS_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder}: no run there (no {SETTINGS_FILE})") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: unreadable ({error})") from None
    needed = {"config": dict, "vocab_size": int, "text": str}
    for key, kind in needed.items():
        if not isinstance(found, dict) or not isinstance(found.get(key), kind):
            raise UserError(f"{path}: damaged (no {key!r}); put back a copy of it")
    return found


def stored_config(folder: Path) -> Config:
    """The options that a run was begun with; `UserError` if they cannot be read."""
    if holds_run(folder) and not (folder / SETTINGS_FILE).exists():
        raise UserError(
            f"{folder}: holds a run whose {SETTINGS_FILE} is lost, and with it the "
            "options to go on with; put back a copy, or choose another folder"
        )
    content = stored_settings(folder)["config"]
    try:
        return Config.from_dict(content)
    except UserError as error:
        raise UserError(f"{folder / SETTINGS_FILE}: damaged ({error})") from None


def check_unchanged(
    old: Config, new: Config, where: str, also: Sequence[str] = ()
) -> None:
    """Name the options that a continued run must not change, if they differ.

    Args:
      old: what the run was begun with.
      new: what is asked for now.
      where: the option that named the run, for the message.
      also: further options that must not change.
    """
    before, after = old.flat(), new.flat()
    fixed = (after.keys() - _FREE) | set(also)
    changed = [k for k in after if k in fixed and before[k] != after[k]]
    if after["steps"] < before["steps"]:
        changed.append("steps")
    said = ", ".join(
        f"--{k.replace('_', '-')} was {before[k]}, now {after[k]}" for k in changed
    )
    check(
        not changed,
        f"{where}: options differ: {said}; leave them as they were, or choose another "
        "--out",
    )


def accepted_changes(folder: Path, new: Config) -> list[str]:
    """What a run that goes on does otherwise than before, as lines to show."""
    if not (folder / SETTINGS_FILE).exists():
        return []
    before, after = stored_config(folder).flat(), new.flat()
    said = []
    if before["steps"] != after["steps"]:
        said.append(
            f"changed: --steps was {before['steps']}, now {after['steps']}: the "
            "learning rate follows the schedule of the longer run from here on"
        )
    if before["mesh"] != after["mesh"]:
        said.append(f"changed: --mesh was {before['mesh'] or 'none'}")
    return said


def store_settings(
    folder: Path,
    config: Config,
    vocab_size: int,
    text_digest: str,
    tokens_digest: str,
    *,
    write: bool,
) -> None:
    """Write `config.json`; a run that goes on must have the text and tokens it had.

    All processes of a run check it, one may write.
    """
    path = folder / SETTINGS_FILE
    if path.exists():
        stored = stored_settings(folder)
        before = stored["text"]
        if before != text_digest:
            raise UserError(
                f"--resume {folder}: the text differs (hash {before}, now "
                f"{text_digest}); give the --data that the run began with"
            )
        before = stored.get("tokens", tokens_digest)
        if before != tokens_digest:
            raise UserError(
                f"--resume {folder}: the tokenizer differs (hash of the tokens of the "
                f"same text {before}, now {tokens_digest}); give the --tokenizer that "
                "the run began with"
            )
    if not write:
        return
    content = {
        "config": config.as_dict(),
        "vocab_size": vocab_size,
        "text": text_digest,
        "tokens": tokens_digest,
    }
    write_atomically(path, [(json.dumps(content, indent=2) + "\n").encode()])
