"""Train a language model on real text and compare optimizers.

Run `python -m examples.pretrain` without arguments for a comparison that ends within
three minutes on two CPU cores, or with `--help` for all options.

Exit codes: 0 finished, 1 training or saving failed, 2 the options are at fault, and
128 + n after signal n (143: SIGTERM, 130: Ctrl-C), with a checkpoint to --resume from.
"""

import sys
from collections.abc import Sequence

from examples.config import parse
from examples.flags import UserError, failed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainer; returns the exit code."""
    try:
        config = parse(argv)
    except UserError as error:
        return failed("pretrain", error)
    # Imported late: a bad option is reported without waiting for JAX.
    from examples import checkpoint, files, loop, runs, signals

    try:
        runs.run(config)
    except (
        loop.TrainingStopped,
        checkpoint.CheckpointFailed,
        files.WriteFailed,
    ) as error:
        return failed("pretrain", error, 1)
    except UserError as error:
        return failed("pretrain", error)
    except signals.Interrupted as stopped:
        print(f"pretrain: {stopped}", file=sys.stderr)
        return stopped.code
    except KeyboardInterrupt:
        return failed("pretrain", "interrupted", 130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
