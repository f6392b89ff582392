"""Train a small LLaMA on real text and compare optimizers.

Run `python -m examples.pretrain` without arguments for a comparison that ends within
three minutes on two CPU cores, or with `--help` for all options.
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
    """Run the trainer; returns the exit code (2: the user can fix it, 1: it failed)."""
    try:
        config = parse(argv)
        # Imported late: a bad option is reported without waiting for JAX.
        from examples import loop
    except UserError as error:
        return _fail(error, 2)
    try:
        loop.run(config)
    except UserError as error:
        return _fail(error, 2)
    except loop.TrainingStopped as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail(RuntimeError("interrupted"), 130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
