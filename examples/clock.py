"""Seconds of training, as against those of a run."""

import time


class Clock:
    """Seconds spent training, compilation, validation and saving left out."""

    def __init__(self, before: float) -> None:
        self._total, self._since = before, time.perf_counter()

    def pause(self) -> float:
        """The seconds so far; those until `resume` do not count."""
        self._total = self.seconds()
        self.resume()
        return self._total

    def resume(self) -> None:
        """Count again."""
        self._since = time.perf_counter()

    def seconds(self) -> float:
        """The seconds so far."""
        return self._total + time.perf_counter() - self._since
