"""Build a BM25 index of a corpus: streamed, resumable, atomic.

    python scripts/build_index.py world --output indexes/world
    python scripts/build_index.py part1.jsonl.gz part2.jsonl.gz --output indexes/wiki --preset stemmed

Run it again after an interruption and it goes on; run it again after success and it says so.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from retrieval_index import open_index
from retrieval_index.analysis import PRESETS, BM25Parameters
from retrieval_index.estimate import estimate_build

REPOSITORY = Path(__file__).resolve().parents[1]
CORPORA = {"world": REPOSITORY / "sorl_env" / "world" / "corpus.jsonl.gz"}
STAGES = {
    "hash": "hashing the corpus",
    "read": "reading and counting terms",
    "score": "scoring",
    "check": "hashing the index",
}


@dataclass(frozen=True)
class Arguments:
    """Build a BM25 index of one corpus file or several."""

    corpus: tyro.conf.Positional[tuple[str, ...]]
    """Corpus files (.jsonl, .jsonl.gz, .jsonl.zst) in order, or the name of a bundled corpus: world."""
    output: Path
    """Directory of the index."""
    preset: Literal["default", "stemmed", "lucene-parity"] = "default"
    """Parameters to start from; the options below change single ones."""
    k1: float | None = None
    """How fast repeated terms stop counting (0 or more)."""
    b: float | None = None
    """How much long passages are held back (0 to 1)."""
    stemmer: Literal["none", "english", "snowball", "porter"] | None = None
    """Stemmer of PyStemmer; english is Snowball's."""
    stop_words: Literal["english", "lucene", "none"] | None = None
    """Words left out."""
    tokens: Literal["words", "lucene", "whitespace"] | None = None
    """How text is cut: two or more word characters, Lucene's word boundaries, or white space."""
    shard_rows: int = 50_000
    """Passages held in memory at once."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the estimate of time, disk and memory, and stop."""
    verify: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Compare every file's SHA-256 and the number of rows with the manifest at the end."""

    def parameters(self) -> BM25Parameters:
        names = ("k1", "b", "stemmer", "stop_words", "tokens")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(PRESETS[self.preset], **given)


def run(arguments: Arguments, console: Console) -> None:
    from retrieval_index.build import build_bm25
    from retrieval_index.staging import check_output

    paths = [CORPORA.get(name, Path(name)) for name in arguments.corpus]
    parameters = arguments.parameters()
    check_output(arguments.output)
    guess = estimate_build(paths, parameters, shard_rows=arguments.shard_rows)
    building = guess.index_bytes + guess.scratch_bytes
    console.print(
        f"{'' if guess.exact else 'about '}{guess.passages:,} passages: about {_duration(guess.seconds)},"
        f" {_size(guess.index_bytes)} of disk ({_size(building)} while building),"
        f" {_size(guess.memory_bytes)} of memory"
    )
    if arguments.dry_run:
        return
    with Progress(
        TextColumn("{task.description:27}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as bars:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(STAGES[stage])
            bars.update(tasks[stage], completed=done, total=total)

        result = build_bm25(
            paths, arguments.output, parameters=parameters, progress=show, shard_rows=arguments.shard_rows
        )
    if arguments.verify:
        open_index(result.path, verify=True, corpus=paths)
    what = "was there already, for the same corpus and parameters" if result.reused else "is ready"
    taken = f", {result.resumed_shards} shards taken over from an interrupted build" if result.resumed_shards else ""
    checked = ", all hashes and rows verified" if arguments.verify else ""
    console.print(
        f"{result.path} {what}: {result.manifest.passages:,} passages, {result.seconds:.1f} s{taken}{checked}"
    )


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit != "GB" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        run(arguments, console)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"build_index: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"build_index: {error.name} is not installed; pip install 'sorl[retrieval]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("build_index: stopped; run the same command again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
