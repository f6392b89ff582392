"""One process's trainings: gradients compiled once, an update for each arm.

Rates, decay, seed and length of a run are values of the programs, not part of them, so
that a grid takes one compilation for each arm and control.
"""

import concurrent.futures
import contextvars
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.evidence import arms, data
from benchmarks.evidence.arms import Hyper
from benchmarks.evidence.cells import Cell
from benchmarks.evidence.sizes import Size
from examples.models import Decoder, matrix_rules
from examples.models.head import head_loss

WARMUP, FINAL = 0.05, 0.1
# The part of a run in which EMA-Nesterov looks ahead, as published.
AHEAD = 0.15, 0.75
# Validation rows during a run; the loss at its end is that of the whole text.
QUICK_ROWS = 128


def rate_at(step: int, steps: int) -> float:
    """Share of the peak rate: linear warm-up from 0, then a cosine down to a tenth.

    ``optax.warmup_cosine_decay_schedule`` in plain numbers: that one computes on the
    device, and reading it would wait for the step before.
    """
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return step / warmup
    progress = (step - warmup) / (steps - warmup)
    return FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * progress))


def ahead_at(step: int, steps: int) -> float:
    """Share of EMA-Nesterov's beta: that of the rate, 0 early and late.

    At the end the parameters are those to evaluate, not ahead of them.
    """
    inside = AHEAD[0] * steps <= step < AHEAD[1] * steps
    return rate_at(step, steps) if inside else 0.0


class Trainer:
    """Trains one size on one device."""

    def __init__(self, size: Size, tokens: data.Tokens):
        self.size, self.rules = size, matrix_rules(size.config)
        self.length = size.config.seq_len
        self.train_windows = (tokens.train.size - 1) // self.length
        self.val_windows = (tokens.val.size - 1) // self.length
        self.tokens = jax.device_put(tokens.train), jax.device_put(tokens.val)
        self.init = _initializer(size)
        self.params = jax.eval_shape(self.init, jax.random.key(0))
        self._pool = concurrent.futures.ThreadPoolExecutor(4)
        self._updates: dict[Any, concurrent.futures.Future[Any]] = {}
        loss = functools.partial(_loss, size)
        rows = jax.ShapeDtypeStruct((size.batch_size,), jnp.int32)
        train, val = (jax.typeof(x) for x in self.tokens)
        self._gradients = self._pool.submit(
            _compiled, jax.value_and_grad(loss, has_aux=True), self.params, train, rows
        )
        self._loss = self._pool.submit(
            _compiled, lambda p, t, r: loss(p, t, r)[1], self.params, val, rows
        )

    def prepare(self, arm: str, control: str, watched: bool = False) -> Any:
        """Starts to compile in the background; a future of (init, update)."""
        # With and without decay is one program.
        control = "decay" if control == "none" else control
        key = arm, control, watched
        if key not in self._updates:
            # Threads of a pool have context variables of their own. Compile under those
            # of this thread, where ``hopper.kernels`` may be set.
            run = contextvars.copy_context().run
            self._updates[key] = self._pool.submit(run, self._compile, *key)
        return self._updates[key]

    def _compile(self, arm: str, control: str, watched: bool) -> Any:
        def make(hyper: Hyper) -> optax.GradientTransformation:
            return arms.transform(
                arms.ARMS[arm], control, self.rules, hyper, watched=watched
            )

        def update(grads: Any, state: Any, params: Any, hyper: Hyper) -> Any:
            updates, state = make(hyper).update(grads, state, params)
            return optax.apply_updates(params, updates), state

        hyper = Hyper(*(jax.ShapeDtypeStruct((), jnp.float32) for _ in Hyper._fields))
        init = jax.jit(make(Hyper(0.0, 0.0, 0.0)).init)
        state = jax.eval_shape(init, self.params)
        start = time.perf_counter()
        lowered = jax.jit(update, donate_argnums=(1, 2)).lower(
            self.params, state, self.params, hyper
        )
        compiled = lowered.compile()
        return init, compiled, round(time.perf_counter() - start, 1)

    def close(self) -> None:
        """Drops what was to be compiled and has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def run(
        self,
        cell: Cell,
        look: Callable[[int, Any], None] | None = None,
        looks: Iterable[int] = (),
        stop: int | None = None,
    ) -> dict[str, Any]:
        """Trains one cell and says how it went.

        Args:
          cell: what to train.
          look: called with the step and the optimizer's state, which then holds
            ``arms.Watched``, after each step in ``looks``.
          stop: how many steps to run; None: all. The schedule is that of all.

        Returns:
          ``loss``: of the whole validation text at the end, in nats per token, None if
          the run diverged; ``curve``: [step, loss of a part of it, training loss
          since the last point]; ``train_loss``: mean of the last tenth; ``wall_s``.
        """
        size, steps = self.size, cell.steps or self.size.steps
        init, update, compile_s = self.prepare(
            cell.arm, cell.control, look is not None
        ).result()
        gradients, looks = self._gradients.result(), set(looks)
        self._loss.result()
        start = time.perf_counter()
        params = self.init(jax.random.key(cell.seed))
        state = init(params)
        points = _points(steps, size.points)
        curve: list[list[float]] = []
        losses: list[Any] = []
        order = data.batches(self.train_windows, size.batch_size, steps, cell.seed)
        for step, windows in enumerate(itertools.islice(order, stop)):
            share = rate_at(step, steps)
            hyper = Hyper(
                *map(
                    np.float32,
                    (
                        cell.rate * share,
                        (cell.adam_rate or size.adam_rate) * share,
                        cell.decay,
                        arms.ARMS[cell.arm].ahead * ahead_at(step + 1, steps),
                    ),
                )
            )
            (_, loss), grads = gradients(params, self.tokens[0], windows)
            params, state = update(grads, state, params, hyper)
            losses.append(loss)
            if look is not None and step + 1 in looks:
                look(step + 1, state)
            if step + 1 in points:
                since = losses[int(curve[-1][0]) if curve else 0 :]
                train = float(np.mean(jax.device_get(since)))
                curve.append(
                    [step + 1, *_rounded(self.validation(params, QUICK_ROWS), train)]
                )
                if not math.isfinite(train):
                    break
        final = self.validation(params) if len(losses) == steps else math.nan
        tail = jax.device_get(losses[-max(1, steps // 10) :])
        final, train = _rounded(final, float(np.mean(tail)))
        return {
            "loss": final,
            "train_loss": train,
            "curve": curve,
            "steps_run": len(losses),
            "tokens": len(losses) * size.tokens_per_step,
            "wall_s": round(time.perf_counter() - start, 2),
            "compile_s": compile_s,
        }

    def validation(self, params: Any, rows: int = 0) -> float:
        """Mean loss of held-out windows spread over the text; 0 rows: of all.

        Whole batches only: at most ``batch_size - 1`` windows are left out.
        """
        size = self.size
        count = min(rows or self.val_windows, self.val_windows)
        chosen = np.linspace(0, self.val_windows - 1, count).round().astype(np.int32)
        whole = chosen[: len(chosen) // size.batch_size * size.batch_size]
        loss = self._loss.result()
        losses = [
            loss(params, self.tokens[1], part)
            for part in whole.reshape(-1, size.batch_size)
        ]
        return float(np.mean(jax.device_get(losses)))


def _initializer(size: Size) -> Callable[[jax.Array], Any]:
    def model(key: jax.Array) -> nnx.Module:
        return Decoder(size.config, size.vocab_size, rngs=nnx.Rngs(key))

    return jax.jit(lambda key: nnx.to_pure_dict(nnx.state(model(key), nnx.Param)))


def _loss(size: Size, params: Any, tokens: jax.Array, windows: jax.Array) -> Any:
    """The loss to minimize, and the cross entropy alone, of some windows of text."""
    length = size.config.seq_len
    rows = windows[:, None] * length + jnp.arange(length + 1)[None]
    text = tokens[rows].astype(jnp.int32)
    abstract = nnx.eval_shape(
        lambda: Decoder(size.config, size.vocab_size, rngs=nnx.Rngs(0))
    )
    graphdef, _ = nnx.split(abstract, nnx.Param)
    model = nnx.merge(graphdef, params)
    features, balance = model.features(text[:, :-1])[:2]
    loss = head_loss(features, model.head(), text[:, 1:], size.loss_chunks)
    return loss + balance, loss


def _compiled(function: Callable[..., Any], *operands: Any) -> Any:
    return jax.jit(function).lower(*operands).compile()


def _points(steps: int, count: int) -> set[int]:
    """Steps after which to validate, evenly spread; the end is not one of them."""
    return {round(steps * (i + 1) / (count + 1)) for i in range(count)}


def _rounded(*losses: float) -> list[Any]:
    """To what a loss's digits are worth; None where it is not finite."""
    return [round(x, 5) if math.isfinite(x) else None for x in losses]
