"""A cache of results that are expensive to compute, for several threads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any


class ResultCache:
    """Keeps the last ``most`` results. A thread that asks for a result which another thread computes waits for it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._results: OrderedDict[Hashable, Any] = OrderedDict()
        self._locks: dict[Hashable, Lock] = {}
        self._lock = Lock()

    def __call__(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result under ``key``; call ``make`` if it is not there yet."""
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
                return self._results[key]
            own = self._locks.setdefault(key, Lock())
        with own:
            with self._lock:
                if key in self._results:
                    return self._results[key]
            try:
                value = make()
            finally:
                with self._lock:
                    self._locks.pop(key, None)
            with self._lock:
                self._results[key] = value
                while len(self._results) > self.most:
                    self._results.popitem(last=False)
            return value
