"""Public question sets: where they are, how they are read and written. ``scripts/prepare_data.py`` is its command.

A source is a name of PUBLIC_SETS, a file (JSONL, JSON, parquet; ``.gz`` unpacked), or ``hub:owner/name``.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sorl_env.files import atomic_text, numbered_lines
from sorl_env.hub import hub_rows, hub_size
from sorl_env.parquet import read_rows, write_rows
from sorl_env.question_forms import NoGold, plain_row
from sorl_env.questions import Question, QuestionSet, question_from_row
from sorl_env.verl_rows import QUESTION_SCHEMA, question_to_verl

_FLASH = "RUC-NLPIR/FlashRAG_datasets"
_MMLU_MEDICAL = (
    "anatomy", "clinical_knowledge", "college_biology", "college_medicine", "medical_genetics", "professional_medicine",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PublicSet:
    """A set on the hub. ``configs``: all of them together make the set; ``kind`` where the rows do not tell."""

    hub: str
    split: str = "test"
    configs: tuple[str | None, ...] = (None,)
    kind: str | None = None


PUBLIC_SETS: dict[str, PublicSet] = {
    "nq": PublicSet(_FLASH, configs=("nq",)),
    "triviaqa": PublicSet(_FLASH, configs=("triviaqa",)),
    "popqa": PublicSet(_FLASH, configs=("popqa",)),
    "hotpotqa": PublicSet(_FLASH, "dev", ("hotpotqa",)),
    "2wikimultihopqa": PublicSet(_FLASH, "dev", ("2wikimultihopqa",)),
    "musique": PublicSet(_FLASH, "dev", ("musique",)),
    "bamboogle": PublicSet(_FLASH, configs=("bamboogle",)),
    "nq_hotpotqa_train": PublicSet("PeterJinGo/nq_hotpotqa_train", "train"),
    "medqa": PublicSet("GBaker/MedQA-USMLE-4-options"),
    "medmcqa": PublicSet("openlifescienceai/medmcqa", "validation"),
    "pubmedqa": PublicSet("qiaojin/PubMedQA", "train", ("pqa_labeled",)),
    "mmlu_medical": PublicSet("cais/mmlu", configs=_MMLU_MEDICAL),
    "dapo_math_17k": PublicSet("BytedTsinghua-SIA/DAPO-Math-17k", "train", kind="math"),
    "aime_2024": PublicSet("HuggingFaceH4/aime_2024", "train", kind="math"),
    "aime_2025": PublicSet("math-ai/aime25", kind="math"),
    "math_500": PublicSet("HuggingFaceH4/MATH-500", kind="math"),
}
# BioASQ and MIRAGE's benchmark.json are files that their makers hand out: give their path.


@dataclass(slots=True)
class Prepared:
    """Questions that were read, and why rows were left out."""

    questions: list[Question] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def read_questions(
    source: str | Path,
    *,
    config: str | None = None,
    split: str | None = None,
    kind: str | None = None,
    limit: int | None = None,
    on_row: Callable[[int], None] | None = None,
) -> tuple[QuestionSet, Counter[str]]:
    """The questions of a source, and how many rows were left out for which reason.

    Rows with a hidden gold answer and repeated questions (same text, same answers) are left out.
    Raises ValueError, naming source and row, for a row that is broken or an unknown source.
    """
    name, rows, default_kind = open_source(source, config=config, split=split)
    made = _questions(rows, name, kind or default_kind, limit, on_row)
    if not made.questions:
        raise ValueError(f"{source} gave no question; rows left out: {dict(made.left_out) or 'none'}")
    return QuestionSet(made.questions, name), made.left_out


def open_source(
    source: str | Path, *, config: str | None = None, split: str | None = None
) -> tuple[str, Iterator[tuple[str, Mapping[str, Any]]], str | None]:
    """Name, rows (each with its place, for errors) and kind of a source."""
    text = str(source)
    if text in PUBLIC_SETS and not Path(text).is_file():
        known = PUBLIC_SETS[text]
        return text, _from_hub(known.hub, (config,) if config else known.configs, split or known.split), known.kind
    if text.startswith("hub:"):
        hub = text.removeprefix("hub:")
        return hub.rpartition("/")[2], _from_hub(hub, (config,), split or "test"), None
    path = Path(source)
    if not path.is_file():
        raise ValueError(
            f"{text} is neither a file nor a known set; known: {', '.join(PUBLIC_SETS)}; or write hub:owner/name"
        )
    return path.name.partition(".")[0], _from_file(path, config), None


def stated_size(source: str, *, config: str | None = None, split: str | None = None) -> tuple[int | None, int | None]:
    """Rows and bytes of a hub source as the hub states them, without fetching it."""
    known = PUBLIC_SETS.get(source) or PublicSet(source.removeprefix("hub:"))
    sizes = [hub_size(known.hub, one, split or known.split) for one in ((config,) if config else known.configs)]
    rows, stored = ([size[place] for size in sizes] for place in (0, 1))
    return _total(rows), _total(stored)


def write_questions(
    path: str | Path,
    questions: Iterable[Question],
    *,
    name: str,
    split: str = "train",
    prompt: str | Path = "search_r1",
) -> int:
    """Write JSONL (``.jsonl``, ``.jsonl.gz``) or verl's training rows (``.parquet``); return how many.

    Atomic. Raises ValueError for another ending.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        rows = (
            question_to_verl(question, data_source=name, split=split, index=index, prompt=prompt)
            for index, question in enumerate(questions)
        )
        return write_rows(path, rows, QUESTION_SCHEMA)
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(f"cannot write {path}: use .jsonl, .jsonl.gz, or .parquet for verl's rows")
    count = 0
    with atomic_text(path) as stream:
        for question in questions:
            stream.write(json_line(question))
            count += 1
    return count


def json_line(question: Question) -> str:
    """The line of a question in our JSONL, which ``load_questions`` reads back as the same question."""
    row = {
        **question.metadata,
        "id": question.id,
        "question": question.text,
        "golden_answers": list(question.answers),
        "kind": question.kind,
    }
    return json.dumps(row, ensure_ascii=True, allow_nan=False) + "\n"


def _questions(
    rows: Iterable[tuple[str, Mapping[str, Any]]],
    name: str,
    kind: str | None,
    limit: int | None,
    on_row: Callable[[int], None] | None,
) -> Prepared:
    made, ids, seen = Prepared(), set[str](), set[tuple[Any, ...]]()
    for number, (where, row) in enumerate(rows, start=1):
        if limit is not None and len(made.questions) >= limit:
            break
        if on_row is not None:
            on_row(number)
        try:
            question = question_from_row(plain_row(row, name, number), where, kind)
        except NoGold as reason:
            made.left_out[str(reason)] += 1
            continue
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where}: the row is malformed ({type(error).__name__}: {error})") from None
        key = (question.text, question.answers, str(question.metadata.get("options")))
        if key in seen:
            made.left_out["the same question again"] += 1
            continue
        if question.id in ids:
            raise ValueError(f"{where}: id {question.id!r} occurs twice with different questions; make ids unique")
        seen.add(key)
        ids.add(question.id)
        made.questions.append(question)
    return made


def _from_hub(hub: str, configs: Iterable[str | None], split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for config in configs:
        place = hub if config is None else f"{hub} ({config})"
        for number, row in enumerate(hub_rows(hub, config, split), start=1):
            yield f"{place}, row {number}", row


def _from_file(path: Path, config: str | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path.suffix == ".parquet":
        for number, row in enumerate(read_rows(path), start=1):
            yield f"{path}, row {number}", row
    elif path.name.endswith((".json", ".json.gz")):
        yield from _from_json(path, config)
    else:
        for number, line in numbered_lines(path):
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: not valid JSON ({error})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: expected a JSON object, got {type(row).__name__}")
            yield f"{path}, line {number}", row


def _from_json(path: Path, config: str | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A list of rows, ``{"questions": [...]}`` (BioASQ), or ``{set: {id: row}}`` (MIRAGE; ``config`` picks a set)."""
    raw = path.read_bytes()
    try:
        data = json.loads((gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig"))
    except (ValueError, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if isinstance(data, dict) and isinstance(data.get("questions"), list):
        data = data["questions"]
    if isinstance(data, list):
        for number, row in enumerate(data, start=1):
            yield f"{path}, row {number}", row
        return
    if not isinstance(data, dict) or not all(isinstance(part, dict) for part in data.values()):
        raise ValueError(f"{path}: expected a list of rows, {{'questions': [...]}} or {{set: {{id: row}}}}")
    if config is not None and config not in data:
        raise ValueError(f"{path} holds no set {config!r}; it holds {', '.join(data)}")
    for name in [config] if config is not None else data:
        for row_id, row in data[name].items():
            yield f"{path}, {name}/{row_id}", {"set": name} | row | {"id": f"{name}/{row_id}"}


def _total(numbers: list[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None
