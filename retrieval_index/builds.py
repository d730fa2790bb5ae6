"""From what a user names to a finished index: recipe or files, estimate, fetch, build or take over."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from retrieval_index.analysis import PRESETS, BM25Parameters
from retrieval_index.builder import BuildResult
from retrieval_index.corpus import count_rows, read_corpus
from retrieval_index.dense_plan import DenseParameters
from retrieval_index.encoder import TransformerEncoder, encoder_spec, free_gpu_bytes
from retrieval_index.estimate import Estimate, estimate_build
from retrieval_index.passages import encode_passage
from retrieval_index.recipes import ENCODER_SIZES, RECIPES, Recipe, estimate_recipe
from retrieval_index.sources import Tell, is_local, resolve
from retrieval_index.staging import Progress, check_output

KINDS = ("bm25", "dense", "lucene")
_SAMPLE = 500


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a user asks for; None and "" leave the choice to the recipe or the defaults.

    Args:
        names: a recipe, files, or a recipe and the files that take the place of its own corpus.
        output: directory of the index.
        kind: "bm25", "dense" or "lucene".
        preset, changes: set of BM25 parameters, and single ones put over it.
        encoder, dense, processes, dtype: of a dense index; processes encode side by side, in numbers of this type
            (None: bfloat16 on a GPU that has it, float32 elsewhere).
        shard_rows: passages between two points from which an interrupted build goes on.
        download: take the recipe's ready-made index from the hub.
    """

    names: Sequence[str]
    output: Path
    kind: str = ""
    preset: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    encoder: str = ""
    dense: DenseParameters = field(default_factory=DenseParameters)
    processes: int = 0
    dtype: str | None = None
    shard_rows: int | None = None
    download: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be done, with every choice made."""

    recipe: Recipe | None
    sources: list[str]
    kind: str
    bm25: BM25Parameters
    encoder: str
    wanted: Wanted

    @property
    def workspace(self) -> Path:
        """Where a corpus that is fetched or converted goes."""
        return self.wanted.output.with_name(self.wanted.output.name + ".corpus")


def make_plan(wanted: Wanted) -> Plan:
    """Settle what was left open, and refuse what cannot work before anything is read.

    Raises:
        ValueError: an unknown kind, preset or encoder, or no ready-made index to download.
        RetrievalError: the output holds something else.
    """
    names = list(wanted.names)
    recipe = RECIPES.get(names[0]) if names else None
    sources = names if recipe is None else names[1:] or [recipe.source]
    kind = wanted.kind or (recipe.kind if recipe else "bm25")
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; choose {', '.join(KINDS)}")
    preset = wanted.preset or (recipe.bm25 if recipe else "default")
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; choose {', '.join(PRESETS)}")
    bm25 = replace(PRESETS[preset], **wanted.changes)
    encoder = wanted.encoder or (recipe.encoder if recipe else "") or "minilm"
    if kind == "dense":
        encoder_spec(encoder)
    if wanted.download and not (recipe and recipe.prebuilt and recipe.kind == kind):
        raise ValueError(f"the hub has no ready-made {kind} index of {' '.join(names)}; leave --download out")
    check_output(wanted.output)
    return Plan(recipe, sources, kind, bm25, encoder, wanted)


def estimate(plan: Plan) -> Estimate | None:
    """What the build will take: from a sample of the corpus if it is here, from its known size if it is a
    recipe's, None if neither.

    Raises:
        FileNotFoundError, ValueError: a corpus that cannot be read, or sizes that do not fit it.
    """
    rows = plan.wanted.shard_rows or 0
    if is_local(plan.sources):
        paths = resolve(plan.sources, plan.workspace)
        if plan.kind == "bm25":
            return estimate_build(paths, plan.bm25, shard_rows=rows or 50_000)
        recipe = _measured(paths, plan)
    elif plan.recipe:
        recipe = replace(plan.recipe, kind=plan.kind, encoder=plan.encoder)
    else:
        return None
    if plan.kind == "dense" and plan.encoder not in ENCODER_SIZES:
        return None
    # Asking for GPUs loads PyTorch, which takes seconds.
    gpus, cores = len(free_gpu_bytes()) if plan.kind == "dense" else 0, os.cpu_count() or 1
    dense = plan.wanted.dense
    guess = estimate_recipe(recipe, dense, gpus=gpus, cores=cores, shard_rows=rows)
    return replace(guess, exact=is_local(plan.sources))


def carry_out(
    plan: Plan, *, tell: Tell = lambda _: None, progress: Progress | None = None
) -> tuple[BuildResult, list[Path]]:
    """Fetch the corpus if need be, then build the index or take it over; returns the corpus files too.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: what `sources.resolve` and the builds raise.
    """
    paths = resolve(plan.sources, plan.workspace, tell)
    rows = {"shard_rows": plan.wanted.shard_rows} if plan.wanted.shard_rows else {}
    output = plan.wanted.output
    if plan.kind == "bm25":
        from retrieval_index.build import build_bm25

        return build_bm25(paths, output, parameters=plan.bm25, progress=progress, **rows), paths
    if plan.kind == "lucene":
        from retrieval_index.lucene import LuceneParameters, build_lucene

        parameters = LuceneParameters(**{k: float(v) for k, v in plan.wanted.changes.items() if k in ("k1", "b")})
        if plan.wanted.download:
            from retrieval_index.prebuilt import adopt_lucene

            folder = _fetch(plan, tell)
            return adopt_lucene(paths, folder, output, parameters=parameters, progress=progress), paths
        return build_lucene(paths, output, parameters=parameters, progress=progress, **rows), paths
    with _encoder(plan) as encoder:
        if plan.wanted.download:
            from retrieval_index.prebuilt import adopt_flat

            pieces = sorted(_fetch(plan, tell).glob("part_*"))
            return adopt_flat(paths, pieces, output, encoder, progress=progress), paths
        from retrieval_index.build_dense import build_dense

        return build_dense(paths, output, encoder, parameters=plan.wanted.dense, progress=progress, **rows), paths


def _fetch(plan: Plan, tell: Tell) -> Path:
    from retrieval_index.prebuilt import fetch

    assert plan.recipe is not None  # `make_plan` has seen to it
    tell(f"fetching {plan.recipe.prebuilt} to {plan.workspace}")
    return fetch(plan.recipe.prebuilt, plan.workspace / "prebuilt")


@contextmanager
def _encoder(plan: Plan) -> Iterator[TransformerEncoder]:
    """The encoder, with a pool of processes: one for each GPU if there are several, or as many as asked for."""
    gpus = len(free_gpu_bytes())
    count = plan.wanted.processes or (gpus if gpus > 1 else 0)
    devices = [f"cuda:{number % gpus}" if gpus else "cpu" for number in range(count)] if count > 1 else None
    encoder = TransformerEncoder(encoder_spec(plan.encoder), processes=devices, dtype=plan.wanted.dtype)
    try:
        yield encoder
    finally:
        encoder.close()


def _measured(paths: list[Path], plan: Plan) -> Recipe:
    """A recipe for a corpus that is here: counted, and its passages' size taken from the first ones."""
    sizes = [len(encode_passage(passage)) for passage, _ in zip(read_corpus(paths), range(_SAMPLE), strict=False)]
    if not sizes:
        raise ValueError(f"the corpus has no passage: {', '.join(map(str, paths))}")
    mean = max(1, sum(sizes) // len(sizes))
    return Recipe("", plan.kind, count_rows(paths), mean, encoder=plan.encoder)
