"""Build an index of a corpus: streamed, resumable, atomic.

    python scripts/build_index.py world --output indexes/world
    python scripts/build_index.py wiki18-e5 --output indexes/wiki18-e5 --dry-run
    python scripts/build_index.py part1.jsonl.gz part2.jsonl.gz --output indexes/wiki --preset stemmed
    python scripts/build_index.py corpus.jsonl --output indexes/dense --kind dense --encoder minilm

Run it again after an interruption and it goes on; run it again after success and it says so.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from index_console import BuildBars, describe, result_line
from rich.console import Console

from retrieval_index import open_index
from retrieval_index.builds import Wanted, carry_out, estimate, make_plan
from retrieval_index.dense_plan import DenseParameters


@dataclass(frozen=True)
class Arguments:
    """Build an index of one corpus file or several, or by a recipe."""

    corpus: tyro.conf.Positional[tuple[str, ...]]
    """A recipe (world, wiki18-bm25, wiki18-lucene, wiki18-e5, pubmed-bm25, pubmed-medcpt, textbooks), and after it
    or alone: corpus files (.jsonl, .gz, .zst, .parquet), psgs_w100.tsv, NLM's pubmed*.xml.gz or a folder of them,
    datasets:NAME[:CONFIG[:SPLIT]] or articles:NAME[:CONFIG[:SPLIT]]. Files take the place of a recipe's own."""
    output: Path
    """Directory of the index; what is fetched or converted goes to the same name with .corpus."""
    kind: Literal["bm25", "dense", "lucene"] | None = None
    """bm25 (the default), dense or lucene."""
    preset: Literal["default", "stemmed", "lucene-parity"] | None = None
    """BM25: parameters to start from; the options below change single ones."""
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
    encoder: str | None = None
    """Dense: minilm, e5-base, e5-large, bge-base, contriever, medcpt ..., a hub name or a directory."""
    index_type: Literal["auto", "flat", "fp16", "hnsw", "ivf-pq"] = "auto"
    """Dense: exact, exact in 16 bits, a graph, compressed; auto goes by the number of passages."""
    nlist: int | None = None
    """Dense, ivf-pq: number of lists."""
    processes: int = 0
    """Dense: processes that encode, one a GPU where there are GPUs; 0: one for each GPU if there are several."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dense: numbers the encoder computes with; bfloat16 by default on a GPU that has it, float32 elsewhere."""
    shard_rows: int | None = None
    """Passages between two points from which an interrupted build goes on (dense 10,000, others 50,000)."""
    download: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Take the ready-made index of the recipe from the hub instead of building one."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the estimate of time, disk and memory, and stop."""
    verify: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Compare every file's SHA-256 and the number of rows with the manifest at the end."""

    def wanted(self) -> Wanted:
        """The same as the library has it."""
        names = ("k1", "b", "stemmer", "stop_words", "tokens")
        return Wanted(
            self.corpus,
            self.output,
            kind=self.kind or "",
            preset=self.preset or "",
            changes={name: getattr(self, name) for name in names if getattr(self, name) is not None},
            encoder=self.encoder or "",
            dense=DenseParameters(self.index_type, nlist=self.nlist),
            processes=self.processes,
            dtype=self.dtype,
            shard_rows=self.shard_rows,
            download=self.download,
        )


def run(arguments: Arguments, console: Console) -> None:
    plan = make_plan(arguments.wanted())
    guess = estimate(plan)
    console.print(describe(guess) if guess else "no estimate: the corpus is not here, or the encoder's size is unknown")
    if arguments.dry_run:
        return
    with BuildBars(console, plan.kind) as bars:
        result, paths = carry_out(plan, tell=console.print, progress=bars.show)
    if arguments.verify:
        open_index(result.path, verify=True, corpus=paths)
    console.print(result_line(result, verified=arguments.verify))


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        run(arguments, console)
    except ModuleNotFoundError as error:
        print(f"build_index: {error.name} is not installed; pip install 'sorl[retrieval]'", file=sys.stderr)
        return 2
    except (ValueError, OSError, RuntimeError) as error:
        print(f"build_index: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("build_index: stopped; run the same command again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
