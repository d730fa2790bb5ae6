from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from retrieval_index import open_index
from retrieval_index.estimate import estimate_build

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "build_index.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        timeout=120,
    )


def test_it_builds_then_reuses_and_verifies(tmp_path: Path, write_corpus) -> None:
    corpus, output = write_corpus(["the red kites", "blue sea"]), tmp_path / "index"
    first = run(corpus, "--output", output, "--preset", "stemmed", "--k1", "1.2")
    assert first.returncode == 0, first.stderr
    assert "is ready: 2 passages" in first.stderr
    parameters = json.loads((output / "manifest.json").read_text())["parameters"]
    assert (parameters["k1"], parameters["b"], parameters["stemmer"]) == (1.2, 0.4, "english")
    assert open_index(output).search(["kite"], 1)[0][0].passage.id == "0"
    again = run(corpus, "--output", output, "--preset", "stemmed", "--k1", "1.2", "--verify")
    assert again.returncode == 0, again.stderr
    assert "was there already" in again.stderr
    assert "all hashes and rows verified" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.jsonl", "--output", "{tmp}/index"], "nowhere.jsonl does not exist"),
        (["--output", "{tmp}/index"], "no corpus file was named"),
        (["{tmp}/broken.jsonl", "--output", "{tmp}/index"], "broken.jsonl, line 2: no `contents`"),
        (["{tmp}/fine.jsonl", "--output", "{tmp}"], "not an index and is left alone"),
        (["{tmp}/fine.jsonl", "--output", "{tmp}/index", "--b", "2"], "b must lie between 0 and 1"),
        (["{tmp}/fine.jsonl", "--output", "{tmp}/index", "--preset", "best"], "best"),
    ],
)
def test_bad_input_is_one_clear_line_and_writes_nothing(tmp_path: Path, arguments: list[str], says: str) -> None:
    (tmp_path / "broken.jsonl").write_text('{"id": "1", "contents": "fine"}\n{"id": "2", "text": "no title"}\n')
    (tmp_path / "fine.jsonl").write_text('{"id": "1", "contents": "fine"}\n')
    done = run(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.jsonl", "fine.jsonl"]


def test_a_dry_run_writes_nothing(tmp_path: Path, write_corpus) -> None:
    done = run(write_corpus(["a text"] * 50), "--output", tmp_path / "index", "--dry-run")
    assert done.returncode == 0
    assert done.stderr.startswith("50 passages: about ")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_an_estimate_counts_small_corpora(write_corpus) -> None:
    guess = estimate_build(write_corpus([f"word{number} and more words" for number in range(3000)]))
    assert (guess.passages, guess.exact) == (3000, True)
    # Three terms a passage at 8 bytes a posting, and about 40 bytes a passage of text and 8 of offset.
    assert 3000 * 60 < guess.index_bytes < 3000 * 150


def test_an_estimate_of_an_empty_corpus_is_an_error(write_text) -> None:
    with pytest.raises(ValueError, match="no passage"):
        estimate_build(write_text("\n"))
