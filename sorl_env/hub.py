"""Data sets by hub name, through the library ``datasets`` (imported here only, and only when asked for)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

_REMEDY = "is the name right and the network there? A local file (JSONL, JSON, parquet) works as well"


def hub_rows(name: str, config: str | None = None, split: str = "test") -> Iterator[dict[str, Any]]:
    """The rows of one split, streamed. Raises ImportError with the remedy, ValueError for what is not there."""
    datasets = _library()
    try:
        yield from datasets.load_dataset(name, config, split=split, streaming=True)
    except (datasets.exceptions.DatasetNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"{_named(name, config, split)} cannot be read: {error}; {_REMEDY}") from None


def hub_size(name: str, config: str | None = None, split: str = "test") -> tuple[int | None, int | None]:
    """Rows and bytes of one split as the hub states them, without fetching it; None where it does not say."""
    datasets = _library()
    try:
        info = datasets.load_dataset_builder(name, config).info
    except (datasets.exceptions.DatasetNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"{_named(name, config, split)} cannot be looked up: {error}; {_REMEDY}") from None
    found = (info.splits or {}).get(split)
    return (None, None) if found is None else (found.num_examples, found.num_bytes)


def _named(name: str, config: str | None, split: str) -> str:
    return f"data set {name!r} ({'' if config is None else f'configuration {config}, '}split {split})"


def _library() -> Any:
    try:
        import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise ImportError("hub names need the library datasets; run: pip install datasets") from error
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries: the outcome is said once, here
    return datasets
