"""Prepare batches in a thread while the device computes."""

import queue
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Iterate over `items`, at most `depth` of them ahead of the consumer.

    An error in the thread is raised in the consumer at its place in the order. Use it
    in a `with` statement: leaving it stops the thread and waits for it.
    """

    def __init__(self, items: Iterable[T], depth: int = 4):
        self._items = items
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _put(self, kind: str, value: Any) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put((kind, value), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._put("item", item):
                    return
        except BaseException as error:  # whatever it is belongs to the consumer
            self._put("error", error)
        else:
            self._put("end", None)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended or self._stop.is_set():
            raise StopIteration
        kind, value = self._queue.get()
        if kind == "item":
            return value
        self._ended = True
        if kind == "error":
            raise value
        raise StopIteration

    def close(self) -> None:
        """Stop the thread; what it has prepared is dropped."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
