"""Train a language model on real text and compare optimizers.

Run `python -m examples.pretrain` without arguments for a comparison that ends within
three minutes on two CPU cores, or with `--help` for all options.

Exit codes: 0 finished, 1 training or saving failed, 2 the options are at fault, and
128 + n after signal n (143: SIGTERM, 130: Ctrl-C), with a checkpoint to --resume from.
"""

import sys
from collections.abc import Sequence

from examples.config import parse
from examples.flags import UserError


def _fail(error: BaseException, code: int) -> int:
    message = " ".join(str(error).split())  # one line, whatever a library put in it
    print(f"pretrain: error: {message}", file=sys.stderr)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainer; returns the exit code."""
    try:
        config = parse(argv)
    except UserError as error:
        return _fail(error, 2)
    # Imported late: a bad option is reported without waiting for JAX.
    from examples import checkpoint, folder, loop, runs, signals

    try:
        runs.run(config)
    except (
        loop.TrainingStopped,
        checkpoint.CheckpointFailed,
        folder.WriteFailed,
    ) as error:
        return _fail(error, 1)
    except UserError as error:
        return _fail(error, 2)
    except signals.Interrupted as error:
        return _fail(error, error.code)
    except KeyboardInterrupt:
        return _fail(RuntimeError("interrupted"), 130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
