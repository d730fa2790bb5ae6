"""Digests: what exactly was evaluated, on what, under which instructions. SHA-256, in hex."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def json_digest(value: Any) -> str:
    """Of plain data, whatever the order of its keys."""
    return text_digest(json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str))


def question_digest(question: Any) -> str:
    """Of all that a play and its scores depend on: id, text, gold answers, kind, options."""
    options = question.metadata.get("options")
    return json_digest([question.id, question.text, list(question.answers), question.kind, options])


def data_digest(questions: Sequence[Any]) -> str:
    """Of the questions that are played, in their order."""
    return json_digest([question_digest(question) for question in questions])


def file_digest(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_digest(directory: Path) -> str:
    """Of the weight files in a model's directory: their names and bytes.

    Raises:
        ValueError: no weight file.
    """
    for pattern in WEIGHT_FILES:
        files = sorted(directory.glob(pattern))
        if files:
            return json_digest([[path.name, file_digest(path)] for path in files])
    raise ValueError(f"{directory} holds no weight file ({', '.join(WEIGHT_FILES)})")


def tensors_digest(model: Any) -> str:
    """Of a loaded model's parameters: names, shapes, types, values. For models that have no directory of their own."""
    whole = hashlib.sha256()
    for name, value in sorted(model.named_parameters()):
        data = value.detach().cpu().contiguous()
        whole.update(f"{name} {tuple(data.shape)} {data.dtype}\n".encode())
        whole.update(data.view(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """Of the vocabulary, the special tokens and the chat template."""
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    return json_digest([tokenizer.get_vocab(), special, tokenizer.chat_template])


def differences(old: Mapping[str, Any], new: Mapping[str, Any], *, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Where two nested records differ: dotted name, old value, new value (None where there is none)."""
    found: list[tuple[str, Any, Any]] = []
    for name in [*old, *(name for name in new if name not in old)]:
        one, two = old.get(name), new.get(name)
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            found += differences(one, two, prefix=f"{prefix}{name}.")
        elif one != two:
            found.append((prefix + name, one, two))
    return found
