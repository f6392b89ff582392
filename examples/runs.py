"""The folder of a run: who may write into it, and what it was begun with."""

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from examples.config import SECTIONS, Config, parse
from examples.files import Record, locked, read_json, read_metrics, write_json
from examples.options import UserError, build, check, flag

SETTINGS_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
CHECKPOINT_FOLDER = "checkpoints"

# Of the defaults of `optim` and of what is recorded: a run goes on only under those
# with which it was begun.
_VERSION = 3

# What may differ between the start of a run and its continuation: nothing here changes
# what is computed, except that more steps make the schedule longer.
_FREE = frozenset(
    "steps accumulate mesh distributed loss_chunks max_bad_steps eval_every log_every "
    "sample_prompt out data remat attention save_every save_minutes keep keep_best "
    "resume".split()
)


def holds_run(folder: Path) -> bool:
    """Whether a run was started there; records that are empty are none."""
    metrics = folder / METRICS_FILE
    recorded = metrics.exists() and metrics.stat().st_size > 0
    names = (SETTINGS_FILE, CHECKPOINT_FOLDER)
    return recorded or any((folder / name).exists() for name in names)


def stored_settings(folder: Path) -> dict[str, Any]:
    """What `config.json` of a run says; `UserError` if it cannot be read."""
    if not (folder / SETTINGS_FILE).exists():
        lost = "holds a run that has lost its options; put back a copy of the file"
        said = lost if holds_run(folder) else "no run there"
        raise UserError(f"{folder}: {said} (no {SETTINGS_FILE})")
    return read_json(folder / SETTINGS_FILE)


def stored_config(folder: Path) -> Config:
    """The options that a run was begun with; `UserError` if they cannot be read.

    Options that have been dropped since must not have been in use.
    """
    sections = stored_settings(folder)["config"].values()
    values = {key: value for section in sections for key, value in section.items()}
    gone = [flag(k) for k in values.keys() - Config().flat().keys() if values[k]]
    check(not gone, f"{folder}: this version has no {', '.join(gone)}")
    return Config(**build(SECTIONS, values))


def check_unchanged(old: Config, new: Config, where: str) -> None:
    """Name the options that a continued run must not change, if they differ.

    `where` is the option that named the run, for the message.
    """
    before, after = old.flat(), new.flat()
    # An MoE's balance loss is a mean over the tokens of a micro-batch.
    free = _FREE - ({"accumulate"} if new.model.architecture == "moe" else set())
    changed = [k for k in after if k not in free and before[k] != after[k]]
    changed += ["steps"] if after["steps"] < before["steps"] else []
    said = ", ".join(f"{flag(k)} was {before[k]}, now {after[k]}" for k in changed)
    remedy = "leave them as they were, or choose another --out"
    check(not changed, f"{where}: options differ: {said}; {remedy}")


def read_options(argv: Sequence[str] | None) -> Config:
    """The options of a run; where it is continued, those not given are as it began."""
    config = parse(argv)
    if config.save.resume == "no":
        return config
    check(config.run.out is not None, "--resume needs --out, the folder of the run")
    folder = Path(config.run.out or "")
    if config.save.resume == "auto" and not holds_run(folder):
        return config
    old = stored_config(folder)
    config = parse(argv, old.flat() | {"resume": config.save.resume})
    check_unchanged(old, config, f"--resume {folder}")
    return config


def _new_folder() -> Path:
    """The first of runs/1, runs/2 and so on that nobody has made."""
    number = 1
    while True:
        folder = Path("runs", str(number))
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1


@contextlib.contextmanager
def claimed(config: Config) -> Generator[Path]:
    """The output folder, in which no other run begins or writes meanwhile."""
    folder = _new_folder() if config.run.out is None else Path(config.run.out)
    with locked(folder):
        taken = config.save.resume == "no" and holds_run(folder)
        said = "already holds a run; choose another, or --resume it"
        check(not taken, f"--out {folder}: {said}")
        yield folder


def records(folder: Path, kind: str) -> list[Record]:
    """Those of one kind, if there are any yet."""
    path = folder / METRICS_FILE
    found = read_metrics(path) if path.exists() else []
    return [record for record in found if record["kind"] == kind]


def check_text(folder: Path, config: Config, digest: str) -> list[str]:
    """A run that goes on must have the tokens that it had.

    Returns what it does otherwise than before, as lines to show.
    """
    if not (folder / SETTINGS_FILE).exists():
        return []
    stored, old, changes = stored_settings(folder), stored_config(folder).run, []
    said = "begun by an earlier version, whose defaults were others: finish it there"
    check(stored.get("version") == _VERSION, f"--resume {folder}: {said}")
    said = "the text or its tokenizer differs; give those that the run began with"
    same = stored["text"] == digest
    check(same, f"--resume {folder}: {said} (hash {stored['text']}, now {digest})")
    if old.steps != config.run.steps:
        follows = "the learning rate follows the schedule of the longer run from here"
        said = f"changed: --steps was {old.steps}, now {config.run.steps}: {follows}"
        changes.append(said)
    if old.mesh != config.run.mesh:
        changes.append(f"changed: --mesh was {old.mesh or 'all devices'}")
    return changes


def store_settings(
    folder: Path, config: Config, vocab_size: int, digest: str, tokenizer: str = ""
) -> None:
    """Write `config.json`; `digest` names the run's tokens, `tokenizer` its file."""
    content = {"config": dataclasses.asdict(config), "vocab_size": vocab_size}
    content |= {"text": digest, "version": _VERSION, "tokenizer": tokenizer}
    write_json(folder / SETTINGS_FILE, content)
