"""Ctrl-C and SIGTERM let the update at hand finish and be saved."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupt_after_update() -> Iterator[list[int]]:
    """Gives a list that the first Ctrl-C (or SIGTERM) puts its number into; a second one ends at once."""
    seen: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    try:
        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever runs us handles signals
        before = {}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
