"""Parquet files as rows of plain data, both ways. The only user of pyarrow in this package."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from sorl_env.files import atomic_path

_ROWS_A_GROUP = 1024


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of a parquet file, one at a time.

    Raises FileNotFoundError, ValueError (no parquet file, or damaged), or ImportError with the remedy.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    arrow, parquet = _libraries()
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_A_GROUP):
                yield from batch.to_pylist()
    except (arrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is not a parquet file, or is damaged ({error}); fetch or write it again") from None


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]], schema: Mapping[str, Any]) -> int:
    """Write rows of these columns and return how many. Atomic: the file appears complete or not at all.

    ``schema`` maps a column to its type: "text", "whole", "number", "yes_no", a list of one type (``["whole"]``),
    or a mapping of the same form. Raises ValueError for a value that does not fit its column.
    """
    arrow, parquet = _libraries()
    columns = arrow.schema([(name, _type(arrow, kind)) for name, kind in schema.items()])
    count, waiting = 0, iter(rows)
    try:
        with atomic_path(Path(path)) as temporary, parquet.ParquetWriter(temporary, columns) as writer:
            while group := [dict(row) for row in islice(waiting, _ROWS_A_GROUP)]:
                writer.write_table(arrow.Table.from_pylist(group, schema=columns))
                count += len(group)
    except (arrow.ArrowInvalid, arrow.ArrowTypeError, UnicodeEncodeError, OverflowError) as error:
        raise ValueError(f"{path}: a value does not fit its column ({error}); JSONL holds anything") from None
    return count


def _type(arrow: Any, kind: Any) -> Any:
    if isinstance(kind, list):
        return arrow.list_(_type(arrow, kind[0]))
    if isinstance(kind, Mapping):
        return arrow.struct([(name, _type(arrow, inner)) for name, inner in kind.items()])
    plain = {"text": arrow.string, "whole": arrow.int64, "number": arrow.float64, "yes_no": arrow.bool_}
    return plain[kind]()


def _libraries() -> tuple[Any, Any]:
    try:
        import pyarrow  # type: ignore[import-not-found, import-untyped, unused-ignore]
        import pyarrow.parquet  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise ImportError("parquet files need pyarrow; run: pip install pyarrow") from error
    return pyarrow, pyarrow.parquet
