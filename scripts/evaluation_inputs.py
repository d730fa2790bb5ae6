"""What an evaluation searches: an index, or one of the controls in its place. For scripts/evaluate.py."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from retrieval_index.passages import PassageList, PassageStore
from sorl_env.controls import EmptyIndex, OraclePassages, RandomPassages, Unfailing, each, find_named, named_passages
from sorl_env.questions import QuestionSet
from sorl_env.replay import Recording

Mode = Literal["index", "none", "empty", "random", "oracle"]


@dataclass(frozen=True)
class Searching:
    """A retriever, the questions that are played with it, and what the result file says of it."""

    retriever: Any
    questions: QuestionSet
    about: dict[str, Any]
    left_out: int = 0


def searching(
    mode: Mode,
    set_name: str,
    questions: QuestionSet,
    *,
    index: str | None,
    passages: Sequence[Path] = (),
    recording: Path | None = None,
    only_with_passages: bool = False,
    seed: int = 0,
) -> Searching:
    """Puts together what a set is played with. Raises ValueError or RetrievalError where something is missing."""
    about: dict[str, Any] = {"mode": mode}
    size = len(questions)
    if mode in ("random", "oracle") or only_with_passages:
        corpus, about["corpus"] = _corpus(set_name, index, passages)
        if mode != "random" or only_with_passages:
            named = find_named(questions, each(corpus))
            if not named:
                raise ValueError(
                    f"no question of {set_name!r} names a passage of the corpus (fields positive_ids, supporting_ids, "
                    "pmids ...); take another corpus (--passages, --index) or another control"
                )
            questions = questions.filter(where=lambda question: question.id in named)
    retriever: Any = EmptyIndex()
    if mode == "random":
        own = {question.id: named_passages(question) for question in questions}
        retriever = RandomPassages(corpus, own, seed=seed)
        about["seed"] = seed
    elif mode == "oracle":
        retriever = OraclePassages(named)
    elif mode == "index":
        retriever, about["index"] = _index(set_name, index, recording)
    return Searching(Unfailing(retriever), questions, about, size - len(questions))


def _index(set_name: str, index: str | None, recording: Path | None) -> tuple[Any, dict[str, Any]]:
    """The index, behind its recording if there is one. A recording alone plays back."""
    bundled = set_name.partition(":")[0] in ("world", "medical")
    if recording is not None and index is None and not bundled:
        if not recording.is_file():
            raise ValueError(f"recording {recording} does not exist; make it with --index first")
        played = Recording(recording)
        return played, played.about
    retriever, about = _open(set_name, index)
    if recording is not None:
        retriever = Recording(recording, index=about["version"], about=about, retriever=retriever)
    return retriever, about


def _open(set_name: str, index: str | None) -> tuple[Any, dict[str, Any]]:
    if index is not None and index.startswith(("http://", "https://")):
        from retrieval_index.client import RetrieverClient

        client = RetrieverClient(index)
        info = client.info()
        return client, {name: info.get(name) for name in ("version", "kind", "passages", "parameters")}
    if index is not None:
        from retrieval_index import open_index

        return open_index(index), _about(Path(index))
    source = set_name.partition(":")[0]
    if source == "world":
        from sorl_env.world import world_retriever

        return world_retriever(), _bundled(source)
    if source == "medical":
        from sorl_env.medical import medical_retriever

        return medical_retriever(), _bundled(source)
    raise ValueError(
        f"set {set_name!r} needs an index: give --index DIR or URL, or --retrieval none, empty, random or oracle"
    )


def _about(directory: Path) -> dict[str, Any]:
    """As a server's /info gives it, so that the same index is the same in both places."""
    text = (directory / "manifest.json").read_bytes()
    manifest = json.loads(text)
    found = {"version": hashlib.sha256(text).hexdigest()[:16]}
    return found | {name: manifest.get(name) for name in ("kind", "passages", "parameters")}


def _bundled(source: str) -> dict[str, Any]:
    passages = _bundled_passages(source)
    return {"version": _digest(passages), "kind": f"bundled {source}", "passages": len(passages), "parameters": {}}


def _corpus(set_name: str, index: str | None, passages: Sequence[Path]) -> tuple[Any, dict[str, Any]]:
    """The passages that a control draws from."""
    if passages:
        from retrieval_index import read_corpus

        stored = PassageList(read_corpus(list(passages)))
        return stored, {"version": _digest(stored), "passages": len(stored)}
    if index is not None and not index.startswith(("http://", "https://")):
        if not (Path(index) / "passages.jsonl").is_file():
            raise ValueError(f"{index} holds no passages.jsonl to draw passages from; give --passages FILE")
        return PassageStore(index), _about(Path(index))
    source = set_name.partition(":")[0]
    if source in ("world", "medical"):
        return PassageList(_bundled_passages(source)), _bundled(source)
    raise ValueError(f"this control of {set_name!r} needs a corpus: give --index DIR or --passages FILE")


def _bundled_passages(source: str) -> Sequence[Any]:
    if source == "world":
        from sorl_env.world import world_passages

        return world_passages()
    from sorl_env.medical import medical_retriever

    return medical_retriever().passages


def _digest(passages: Any) -> str:
    whole = hashlib.sha256()
    for passage in each(passages):
        whole.update(json.dumps([passage.id, passage.title, passage.text]).encode())
    return whole.hexdigest()[:16]
