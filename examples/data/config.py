"""Options of the text and its tokens."""

import dataclasses

from examples.flags import check, check_range, option


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes tokens."""

    data: tuple[str, ...] = option(
        (),
        "text files or folders (.txt, .jsonl, also with .xz or .gz), or one folder of "
        "token shards (examples.prepare), which brings its own tokenizer and "
        "validation text; without it, the Python sources installed on this machine",
    )
    tokenizer: str = option(
        "bytes", "'bytes', 'bpe' (trained on the spot) or the path of a tokenizer.json"
    )
    vocab_size: int = option(2048, "vocabulary of --tokenizer bpe")
    max_bytes: int = option(4_000_000, "read at most this much text (0: all of it)")
    val_fraction: float = option(
        0.05, "part of the text held out for validation, by whole documents"
    )

    def __post_init__(self) -> None:
        check(bool(self.tokenizer), "--tokenizer must not be empty")
        check_range(self, "vocab_size", 300, 1_000_000)
        check_range(self, "max_bytes", 0)
        check_range(self, "val_fraction", 0.001, 0.5)
