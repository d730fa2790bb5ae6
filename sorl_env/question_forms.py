"""Rows of public question sets, in whatever form they were published, become rows that we read.

Forms are told apart by their fields, so a local file and the same set from a hub go one way:

| recognised by | sets |
|---|---|
| ``reward_model`` | verl's training rows: Search-R1's NQ + HotpotQA, DAPO-Math-17k |
| ``cop``, ``opa`` … ``opd`` | MedMCQA (options counted from 0, hidden labels -1) |
| ``answer_idx``, ``options`` | MedQA |
| ``final_decision`` | PubMedQA (yes, no, maybe) |
| ``choices``, ``answer`` as a number | MMLU |
| ``body``, ``exact_answer`` | BioASQ's yes/no and factoid questions |
| ``question`` or ``problem`` with answers | FlashRAG's sets, MATH-500, AIME, GSM8K, MIRAGE, our own |
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from typing import Any

from sorl_env.choices import gold_letter

_YES_NO = {"A": "yes", "B": "no", "C": "maybe"}
_DAPO_PROMPT = re.compile(
    r"\ASolve the following math problem step by step\..*?\n\n(?P<problem>.*?)(?:\n\nRemember to put your answer.*)?\Z",
    re.DOTALL,
)
_LAST_QUESTION = re.compile(r"(?:\A|\n|\s)Question:\s*(?P<question>.+?)\s*\Z", re.DOTALL)


class NoGold(ValueError):
    """A row whose gold answer is hidden (test sets) or of a kind that is not scored here; it is left out."""


def plain_row(row: Mapping[str, Any], name: str, number: int) -> dict[str, Any]:
    """A row with ``id``, ``question`` and ``golden_answers`` or ``answer``, for ``question_from_row``.

    ``name`` and ``number`` make the id of a row that has none. Raises NoGold for a row that is to be left out,
    ValueError for one that holds nonsense.
    """
    if "reward_model" in row:
        found = _verl(row)
    elif "cop" in row and "opa" in row:
        found = _medmcqa(row)
    elif "answer_idx" in row and isinstance(row.get("options"), Mapping):
        found = _kept(row, "answer", "answer_idx") | {"answer": row["answer_idx"]}
    elif "final_decision" in row:
        found = _pubmedqa(row)
    elif isinstance(row.get("choices"), list):
        found = _mmlu(row)
    elif "body" in row and "type" in row:
        found = _bioasq(row)
    else:
        found = dict(row)
        if "unique_id" in row and not row.get("id"):
            found["id"] = row["unique_id"]
        if isinstance(row.get("answer"), str) and "####" in row["answer"]:  # GSM8K: the working, then the number
            found |= {"answer": row["answer"].rpartition("####")[2].strip(), "kind": row.get("kind") or "math"}
        if row.get("problem") and not row.get("question"):
            found.setdefault("kind", "math")
    found = {key: value for key, value in found.items() if value is not None}
    if isinstance(found.get("options"), Mapping):  # a column of structures fills up the letters that a row lacks
        found["options"] = {letter: text for letter, text in found["options"].items() if text is not None}
    if found.get("id") in (None, ""):
        found["id"] = f"{name}_{number}"
    return found


def verl_question(row: Mapping[str, Any]) -> str:
    """The question in a verl row: stated beside the prompt, or taken out of it.

    Search-R1's prompts end in ``Question: …``; DAPO's stand around the problem. Any other prompt is the question.
    """
    extra = row.get("extra_info") or {}
    stated = row.get("question") or (extra.get("question") if isinstance(extra, Mapping) else None)
    if stated:
        return str(stated)
    prompt = row.get("prompt")
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    said = [message.get("content") for message in messages if message.get("role") == "user"]
    if not said or not isinstance(said[-1], str):
        raise ValueError("verl row has no user message in `prompt` and no `question`")
    found = _DAPO_PROMPT.match(said[-1])
    if found:
        return found["problem"].strip()
    parts = said[-1].rpartition("Question:")
    return (parts[2] if parts[1] and _LAST_QUESTION.search(said[-1]) else said[-1]).strip()


def _verl(row: Mapping[str, Any]) -> dict[str, Any]:
    truth: Any = (row["reward_model"] or {}).get("ground_truth")
    if isinstance(truth, Mapping):
        truth = truth.get("target")
    if isinstance(truth, str) or not hasattr(truth, "__len__"):
        truth = [truth]
    extra = row.get("extra_info") if isinstance(row.get("extra_info"), Mapping) else {}
    assert isinstance(extra, Mapping)
    index = extra.get("index")
    metadata = json.loads(extra["metadata"]) if extra.get("metadata") else {"data_source": row.get("data_source")}
    made = f"{row.get('data_source') or 'verl'}/{extra.get('split') or 'train'}/{index}"
    kind = extra.get("kind") or ("math" if str(row.get("ability", "")).lower() == "math" else None)
    return metadata | {
        "id": row.get("id") or extra.get("question_id") or (made if index is not None else None),
        "question": verl_question(row),
        "golden_answers": list(truth),
        "kind": kind,
    }


def _medmcqa(row: Mapping[str, Any]) -> dict[str, Any]:
    letter = gold_letter(int(row["cop"]), 4, 0)
    if letter is None:
        raise NoGold("its label is hidden")
    options = {letter: row[f"op{letter.lower()}"] for letter in "ABCD"}
    return _kept(row, "opa", "opb", "opc", "opd", "cop", "exp") | {"options": options, "answer": letter}


def _pubmedqa(row: Mapping[str, Any]) -> dict[str, Any]:
    labels = {label: letter for letter, label in _YES_NO.items()}
    decision = str(row["final_decision"]).strip().lower()
    if decision not in labels:
        raise ValueError(f"final_decision is {row['final_decision']!r}; expected yes, no or maybe")
    context = row.get("context")
    if isinstance(context, Mapping):
        context = " ".join(map(str, context.get("contexts") or ()))
    kept = _kept(row, "final_decision", "context", "long_answer", "pubid")
    return kept | {"id": row.get("id") or row.get("pubid"), "options": _YES_NO, "answer": labels[decision],
                   "context": context}  # fmt: skip


def _mmlu(row: Mapping[str, Any]) -> dict[str, Any]:
    choices = list(row["choices"])
    letter = row["answer"]
    if not isinstance(letter, str):
        letter = gold_letter(int(letter), len(choices), 0)
    if letter is None:
        raise NoGold("its label is hidden")
    options = dict(zip(string.ascii_uppercase, choices, strict=False))
    return _kept(row, "choices", "answer") | {"options": options, "answer": letter}


def _bioasq(row: Mapping[str, Any]) -> dict[str, Any]:
    exact = row.get("exact_answer")
    found: dict[str, Any] = {"id": row.get("id"), "question": row["body"]}
    pmids = [str(link).rstrip("/").rpartition("/")[2] for link in row.get("documents") or ()]
    if pmids:
        found["supporting_pmids"] = pmids
    if row["type"] == "yesno" and str(exact).lower() in ("yes", "no"):
        return found | {"options": {"A": "yes", "B": "no"}, "answer": "A" if str(exact).lower() == "yes" else "B"}
    if row["type"] == "factoid" and exact:
        answers = [item for part in exact for item in (part if isinstance(part, list) else [part])]
        return found | {"golden_answers": [exact] if isinstance(exact, str) else answers}
    raise NoGold(f"its type is {row['type']!r}, or its label is hidden")


def _kept(row: Mapping[str, Any], *left_out: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in left_out}
