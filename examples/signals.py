"""Signals that ask a run to end: it saves first."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupted(RuntimeError):
    """A signal ended the run after a checkpoint; the exit code is 128 + its number."""

    def __init__(self, number: int, where: str):
        self.code = 128 + number
        name = signal.Signals(number).name
        super().__init__(f"{name}: saved at {where}; --resume goes on from there")


class Signals:
    """Remembers SIGTERM or SIGINT; a second one has its usual effect at once."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
