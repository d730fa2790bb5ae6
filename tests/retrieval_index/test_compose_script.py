from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from retrieval_index import build_bm25, open_index

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "compose_index.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        timeout=120,
    )


def test_two_indexes_become_one(tmp_path: Path, write_corpus) -> None:
    corpus = write_corpus(["red kite", "blue sea", "red sea"])
    parts = [build_bm25(corpus, tmp_path / name).path for name in ("one", "two")]
    done = run("hybrid", *parts, "--output", tmp_path / "both", "--weights", "1", "3")
    assert done.returncode == 0, done.stderr
    assert "hybrid over 3 passages" in done.stderr
    # first in both rankings: (1 + 3) / (60 + 1)
    assert round(open_index(tmp_path / "both").search(["kite"], 1)[0][0].score, 6) == round(4 / 61, 6)


def test_bad_input_is_one_clear_line(tmp_path: Path, write_corpus) -> None:
    part = build_bm25(write_corpus(["red kite"]), tmp_path / "one").path
    done = run("rerank", part, part, "--output", tmp_path / "best")
    assert (done.returncode, done.stderr) == (2, "compose_index: rerank takes one index, got 2\n")
    assert not (tmp_path / "best").exists()
