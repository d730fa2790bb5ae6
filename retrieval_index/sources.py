"""Where corpora come from: files as they are, data sets of the hub, articles to cut, NLM's XML.

Each becomes files that `read_corpus` reads; what has to be made or fetched is made beside the index once
and kept, so that an interrupted build finds it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from retrieval_index import pubmed
from retrieval_index.corpus import fetch_dataset
from retrieval_index.types import RetrievalError
from retrieval_index.wikipedia import cut_articles, fetch_articles, read_psgs, write_corpus

Tell = Callable[[str], None]


def is_local(sources: Sequence[str]) -> bool:
    """Are all of them corpus files that need no fetching and no converting?"""
    return all(not _needs_work(source) for source in sources)


def resolve(sources: Sequence[str], folder: Path, tell: Tell = lambda _: None) -> list[Path]:
    """Corpus files of the sources, in order.

    Args:
        sources: corpus files; ``bundled:world``; ``datasets:NAME[:CONFIG[:SPLIT]]``, passages of the
            `datasets` library; ``articles:NAME[:CONFIG[:SPLIT]]``, whole articles that are cut into
            passages of 100 words; DPR's ``psgs_w100.tsv[.gz]``; NLM's ``pubmed*n*.xml.gz`` or folders of
            them (all of them together, wherever they stand in the list).
        folder: where what is made goes.
        tell: hears what is being done.

    Raises:
        FileNotFoundError, ValueError: a source that is not there or is none.
        RuntimeError: a library that is not installed.
    """
    found: list[Path] = []
    xml = [Path(source) for source in sources if _is_pubmed(source)]
    if xml:
        parts, counts = pubmed.convert(
            pubmed.parts_of(xml), folder, on_file=lambda done, total: tell(f"PubMed file {done} of {total}")
        )
        tell(
            f"PubMed: {counts.kept:,} citations kept; left out: {counts.revised:,} revised, {counts.deleted:,}"
            f" deleted, {counts.empty:,} empty"
        )
        found += parts
    for source in sources:
        if not _is_pubmed(source):
            found.append(_one(source, folder, tell))
    return found


def _one(source: str, folder: Path, tell: Tell) -> Path:
    kind, _, rest = source.partition(":")
    if source == "bundled:world":
        return bundled_world()
    if kind in ("datasets", "articles") and rest:
        name, config, split = [*rest.split(":"), "", ""][:3]
        destination = folder / f"{'-'.join(filter(None, [*name.split('/'), config, split]))}.jsonl.gz"
        if destination.exists():
            return destination
        tell(f"fetching {name} to {destination}")
        if kind == "datasets":

            def on_row(count: int) -> None:
                if count % 100_000 == 0:
                    tell(f"{name}: {count:,} passages")

            return fetch_dataset(name, destination, config=config or None, split=split or "train", on_row=on_row)
        write_corpus(cut_articles(fetch_articles(name, config or None, split or "train")), destination)
        return destination
    path = Path(source)
    if _is_psgs(source):
        destination = folder / f"{path.name.partition('.')[0]}.jsonl.gz"
        if not destination.exists():
            tell(f"converting {path} to {destination}")
            write_corpus(read_psgs(path), destination)
        return destination
    return path


def bundled_world() -> Path:
    """The corpus that comes with the environments.

    Raises:
        RetrievalError: the package sorl_env is not installed beside this one.
    """
    found = find_spec("sorl_env")
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder) / "world" / "corpus.jsonl.gz"
        if path.is_file():
            return path
    raise RetrievalError("the corpus world comes with the package sorl_env, which is not installed")


def _needs_work(source: str) -> bool:
    return source.startswith(("datasets:", "articles:")) or _is_pubmed(source) or _is_psgs(source)


def _is_psgs(source: str) -> bool:
    return source.endswith((".tsv", ".tsv.gz"))


def _is_pubmed(source: str) -> bool:
    path = Path(source)
    return path.name.endswith((".xml", ".xml.gz")) or path.is_dir()
