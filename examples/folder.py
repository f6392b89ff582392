"""The folder of a run: who may write into it, and how its records go on."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.config import SETTINGS_FILE, Config
from examples.flags import UserError

METRICS_FILE = "metrics.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of one JSONL file; a last line cut off by a kill is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def write_atomically(path: Path, text: str) -> None:
    """Replace a file: whoever reads it finds the old text or the new one."""
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def holds_run(folder: Path) -> bool:
    """Whether a run was started there."""
    return (folder / SETTINGS_FILE).exists() or (folder / METRICS_FILE).exists()


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


def stored_settings(folder: Path) -> dict[str, Any]:
    """What `config.json` of a run says; `UserError` if it cannot be read."""
    path = folder / SETTINGS_FILE
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder}: no run there (no {SETTINGS_FILE})") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: unreadable ({error})") from None


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
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def rewind(
    folder: Path, keep: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Drop the records that `keep` refuses; returns those that stay.

    A run that goes on from a checkpoint will write them once more.
    """
    path = folder / METRICS_FILE
    if not path.exists():
        return []
    records = [record for record in read_metrics(path) if keep(record)]
    text = "".join(json.dumps(record) + "\n" for record in records)
    if text != path.read_text(encoding="utf-8"):
        write_atomically(path, text)
    return records
