"""Named builds: where a corpus comes from, which index is made of it, and what that will take.

`RECIPES` is the table behind ``scripts/build_index.py NAME``. `sources` brings the corpus; `estimate_recipe`
says beforehand what time, disk and memory it takes, from the known size of the corpus, so that nothing has
to be fetched to find out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from retrieval_index.dense_plan import DenseParameters, settle, training_rows, vector_bytes
from retrieval_index.estimate import Estimate

# Measured: docs/retrieval.md, one busy core.
_BM25_ROWS_A_SECOND = 8_000
_BM25_POSTING_BYTES = 0.65  # of index for each byte of text
_LUCENE_ROWS_A_SECOND = 8_000
_LUCENE_BYTES = 0.35
_GRAPH_ROWS_A_SECOND = 1_500  # hnsw, one thread

# Multiplications and additions a second that an encoder reaches: one CPU core in float32 (MiniLM: 50
# passages a second), one data-centre GPU in bfloat16.
CPU_RATE, GPU_RATE = 1.5e11, 1.0e14
_CHARS_A_TOKEN = 4.3
# Parameters without the table of words, in millions; vectors' dimension.
ENCODER_SIZES = {
    "minilm": (10.6, 384),
    "e5-base": (85, 768),
    "e5-large": (302, 1024),
    "bge-small": (21, 384),
    "bge-base": (85, 768),
    "bge-large": (302, 1024),
    "contriever": (85, 768),
    "contriever-msmarco": (85, 768),
    "medcpt": (85, 768),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A corpus and the index made of it.

    Args:
        source: as `sources.resolve` has it.
        kind: "bm25", "dense" or "lucene".
        passages: of the corpus, as its publishers say.
        text_bytes: of a passage with its title, on the average.
        bm25: name of a set of BM25 parameters.
        encoder: name of an encoder.
        prebuilt: data set of the hub that holds the index ready made; empty: none.
    """

    source: str
    kind: str
    passages: int
    text_bytes: int
    bm25: str = "default"
    encoder: str = ""
    prebuilt: str = ""


_WIKI18 = Recipe("datasets:PeterJinGo/wiki-18-corpus", "bm25", 21_015_324, 640, bm25="lucene-parity")
_PUBMED = Recipe("datasets:MedRAG/pubmed", "bm25", 23_898_701, 1_350, bm25="stemmed")
RECIPES: dict[str, Recipe] = {
    "world": Recipe("bundled:world", "bm25", 6_279, 440),
    "wiki18-bm25": replace(_WIKI18, kind="bm25"),
    "wiki18-lucene": replace(_WIKI18, kind="lucene", prebuilt="PeterJinGo/wiki-18-bm25-index"),
    "wiki18-e5": replace(_WIKI18, kind="dense", encoder="e5-base", prebuilt="PeterJinGo/wiki-18-e5-index"),
    "pubmed-bm25": _PUBMED,
    "pubmed-medcpt": replace(_PUBMED, kind="dense", encoder="medcpt"),
    "textbooks": Recipe("datasets:MedRAG/textbooks", "bm25", 125_847, 1_100, bm25="stemmed"),
}


def estimate_recipe(
    recipe: Recipe, parameters: DenseParameters | None = None, *, gpus: int = 0, cores: int = 1, shard_rows: int = 0
) -> Estimate:
    """What a build will take, from the size of the corpus alone; good to a factor of two.

    Args:
        parameters: of a dense index.
        gpus, cores: that encode.
        shard_rows: passages held at once; 0: the default of the kind.

    Raises:
        ValueError: dense parameters that do not fit, or an encoder of unknown size.
    """
    text = recipe.passages * recipe.text_bytes
    stored = round(1.05 * text) + 8 * recipe.passages  # JSON and the offsets
    if recipe.kind == "bm25":
        postings = round(_BM25_POSTING_BYTES * text)
        held = (shard_rows or 50_000) * recipe.text_bytes * 9
        return Estimate(
            recipe.passages,
            False,
            recipe.passages / _BM25_ROWS_A_SECOND + 1,
            stored + postings,
            round(1.5 * postings),
            (120 << 20) + held + recipe.passages * 16 + round(recipe.passages**0.65 * 4_000),
        )
    if recipe.kind == "lucene":
        index = stored + round(_LUCENE_BYTES * text)
        seconds = recipe.passages / _LUCENE_ROWS_A_SECOND + 5
        return Estimate(recipe.passages, False, seconds, index, round(_LUCENE_BYTES * text), 2 << 30)
    if recipe.encoder not in ENCODER_SIZES:
        raise ValueError(f"the size of the encoder {recipe.encoder!r} is not known; there is no estimate")
    millions, dimension = ENCODER_SIZES[recipe.encoder]
    settled = settle(parameters or DenseParameters(), recipe.passages, dimension)
    tokens = min(512, recipe.text_bytes / _CHARS_A_TOKEN)
    rate = gpus * GPU_RATE or cores * CPU_RATE
    seconds = recipe.passages * 2e6 * millions * tokens / rate
    if settled.index_type == "hnsw":
        seconds += recipe.passages / _GRAPH_ROWS_A_SECOND
    vectors = recipe.passages * vector_bytes(settled, dimension)
    width = 4 if settled.index_type in ("flat", "hnsw") else 2
    sample = 4 * dimension * training_rows(settled.nlist, recipe.passages) if settled.nlist else 0
    held = (shard_rows or 10_000) * (recipe.text_bytes * 3 + 4 * dimension)
    return Estimate(
        recipe.passages,
        False,
        seconds,
        stored + vectors + 8 * recipe.passages,
        recipe.passages * dimension * width,
        (1 << 30) + round(millions * 4e6) + vectors + sample + held,
    )
