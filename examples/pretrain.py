"""Train a language model on real text and compare optimizers.

Run `python -m examples.pretrain` without arguments for a comparison that takes minutes
on two CPU cores, or with `--help` for all options.

Exit codes: 0 finished, 1 training or saving failed, 2 the options are at fault, and
128 + n after signal n (143: SIGTERM, 130: Ctrl-C), with a checkpoint to --resume from.
"""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from examples import runs
from examples.config import Config
from examples.options import Failed, UserError, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainer; returns the exit code."""
    return run_command("pretrain", lambda: _pretrain(argv))


def _pretrain(argv: Sequence[str] | None) -> None:
    """A run from its options to its table."""
    begin = time.perf_counter()
    config = runs.read_options(argv)
    # Imported late: a bad option is reported without waiting for JAX.
    import jax

    from examples import optim, setup, train
    from examples.data import loader
    from examples.report import Report

    optim.plans(config.optim, config.run.steps)  # bad names are refused at once
    config = _settle_devices(config)
    data = loader.load(config)
    first = jax.process_index() == 0
    with contextlib.ExitStack() as stack, _advice_for_full_memory():
        folder = Path(str(config.run.out))
        if first:
            folder = stack.enter_context(runs.claimed(config))
        made = setup.Setup(config, data)
        results = runs.records(folder, "result")  # before anything is written
        done = {r["optimizer"]: r for r in results if r["steps"] == config.run.steps}
        changes = runs.check_text(folder, config, data.about["digest"])
        plans = made.plans()
        if config.run.init_from and not runs.holds_run(folder):
            for plan in plans:  # what is refused leaves the folder free
                made.load_source(plan)
        if first:  # before the records: what has them can be continued
            made.write_down(folder)
        report = stack.enter_context(Report(config, folder))
        received = stack.enter_context(train.signals())
        stack.enter_context(jax.set_mesh(made.mesh))
        made.describe(report, folder, changes)
        for plan in plans:
            if plan.name not in done:
                training = train.Training(made, plan, report, folder, received)
                with contextlib.closing(training):
                    done[plan.name] = training.result()
        if first:
            results = [done[plan.name] for plan in plans]
            report.table(results, time.perf_counter() - begin)


def _settle_devices(config: Config) -> Config:
    """What must be done before JAX looks for its devices; the options that follow."""
    import jax

    if config.run.deterministic:  # bit-identical continuation on GPUs
        # Their fastest operations add in any order, cuDNN's backward pass among them.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true"
        model = dataclasses.replace(config.model, attention="xla")
        config = dataclasses.replace(config, model=model)
    if config.run.distributed and not jax.distributed.is_initialized():
        # JAX itself reads the coordinator's address, and asks launchers that it knows.
        names = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
        found = (os.environ.get(name) for name in names)
        try:
            count, number = (int(text) if text else None for text in found)
            jax.distributed.initialize(num_processes=count, process_id=number)
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"--distributed: {error} (start one process a host with Slurm, Open "
                "MPI or on a TPU pod, which JAX asks for the others; elsewhere set "
                "JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and "
                "JAX_PROCESS_ID for each)"
            ) from None
    return config


@contextlib.contextmanager
def _advice_for_full_memory() -> Generator[None]:
    import jax

    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            said = str(error).strip().split("\n")[0][:200]
            raise Failed(
                f"out of memory ({said}): try a smaller --batch-size, --accumulate 2 "
                "or more, --remat full, or a --mesh of more devices"
            ) from None
        raise


if __name__ == "__main__":
    sys.exit(main())
