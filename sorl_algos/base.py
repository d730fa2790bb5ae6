"""The bundled base model: pre-trained on the bundled world, warm-started on demonstrations that leave room.

Stage 1 (pre-training): passages, and episodes played well, with the names in most of them exchanged for invented
ones, so that the model must copy from what it reads and cannot recall. Stage 2 (warm start): imitation of episodes
in which a coin often chooses a poor query or a wrong answer. Nothing that concerns the world's "unseen" entities is
used in either stage.
"""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sorl_algos.demonstrations import MixedScript, common_words, demonstrate, renamed
from sorl_algos.models import Policy
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.tiny import tiny_language_model, train_tokenizer
from sorl_algos.warmup import supervised
from sorl_env.trajectory import Trajectory, Turn


@dataclass(frozen=True)
class BaseConfig:
    """Settings of the base model; the defaults are those of the bundled one."""

    seed: int = 0
    vocab_size: int = 4096
    hidden_size: int = 192
    layers: int = 4
    heads: int = 6
    intermediate_size: int = 512
    pretrain_steps: int = 4000
    pretrain_lr: float = 2e-3
    warm_steps: int = 250
    warm_lr: float = 4e-4
    batch_sequences: int = 24
    good_query: float = 0.62
    good_answer: float = 0.42
    guess: float = 0.1
    max_searches: int = 3
    bfloat16: bool = False
    """Autocast the forward passes to bfloat16 (faster on processors that have it)."""


Progress = Callable[[str, int, int, float], None]


def make_base(
    config: BaseConfig,
    env: Any,
    questions: Sequence[Any],
    passages: Sequence[Any],
    *,
    on_step: Progress | None = None,
    checkpoints: Path | None = None,
) -> tuple[Any, Any, dict[str, Any]]:
    """Makes tokenizer and model; returns (model, tokenizer, record of losses).

    Args:
        env: a vector environment over the questions, with the options of the later run.
        questions: training questions with ``queries`` and ``hop_answers`` in their metadata.
        passages: passages the model may read (those of unseen entities left out).
        on_step: called with stage, step, steps, loss.
        checkpoints: where pre-training is saved as it goes, and resumed from.
    """
    texts = [f"Doc 1(Title: {p.title}) {p.text}" for p in passages]
    texts += [f"Question: {q.text}\n" for q in questions]
    texts += [f" {query}" for q in questions for query in q.metadata["queries"]]
    tokenizer = train_tokenizer(texts, config.vocab_size)
    model = tiny_language_model(
        len(tokenizer),
        hidden_size=config.hidden_size,
        layers=config.layers,
        heads=config.heads,
        intermediate_size=config.intermediate_size,
        seed=config.seed,
        pad_id=tokenizer.pad_token_id,
        end_id=tokenizer.eos_token_id,
    )
    policy = Policy(model)
    renderer = Renderer(tokenizer)
    names = NameStock(passages, questions)
    report = on_step or (lambda *_: None)
    dtype = torch.bfloat16 if config.bfloat16 else None

    good = MixedScript(max_searches=config.max_searches)

    def lessons(number: int) -> list[Trajectory]:
        """One pass of pre-training: a third of the passages, and every question, three times in four renamed."""
        rewrite = names.rewriter if number % 4 else None
        seed = config.seed * 1000 + number
        return [passage_lesson(renderer, text) for text in texts[: len(passages)][number % 3 :: 3]] + demonstrate(
            env, renderer, questions, good, seed=seed, rewrite=rewrite
        )

    pretrain = supervised(
        policy,
        lessons,
        steps=config.pretrain_steps,
        batch_sequences=config.batch_sequences,
        lr=config.pretrain_lr,
        pad_id=tokenizer.pad_token_id,
        seed=config.seed,
        observation_share=0.15,
        weight_decay=0.02,
        autocast_dtype=dtype,
        on_step=lambda step, loss: report("pre-training", step + 1, config.pretrain_steps, loss),
        checkpoints=checkpoints,
    )
    warm = warm_start(config, policy, tokenizer, env, questions, report=report)
    return model, tokenizer, {"pretrain_loss": pretrain, "warm_loss": warm}


def warm_start(
    config: BaseConfig, policy: Policy, tokenizer: Any, env: Any, questions: Sequence[Any], *, report: Progress
) -> list[float]:
    """Stage 2: imitation of episodes played well or badly by a coin."""
    mixed = MixedScript(
        good_query=config.good_query,
        good_answer=config.good_answer,
        guess=config.guess,
        max_searches=config.max_searches,
        common_words=common_words(questions),
        foreign_subjects=tuple(sorted({q.metadata["hop_answers"][0] for q in questions})),
    )
    demonstrations = demonstrate(env, Renderer(tokenizer), questions, mixed, seed=config.seed + 17)
    dtype = torch.bfloat16 if config.bfloat16 else None
    return supervised(
        policy,
        demonstrations,
        steps=config.warm_steps,
        batch_sequences=config.batch_sequences,
        lr=config.warm_lr,
        pad_id=tokenizer.pad_token_id,
        seed=config.seed + 1,
        autocast_dtype=dtype,
        on_step=lambda step, loss: report("warm start", step + 1, config.warm_steps, loss),
    )


def passage_lesson(renderer: Renderer, text: str) -> Trajectory:
    """A passage as one turn whose action is the passage, to be learnt as plain text."""
    ids = tuple(renderer.tokenizer.encode(f" {text}", add_special_tokens=False))
    turn = Turn(tuple(renderer.first("Passage:")), ids, (0.0,) * len(ids), 0.0, "Passage:", text)
    return Trajectory((turn,), "passage", "passage", 0, "length_limit", {})


class NameStock:
    """Invented names in the manner of the real ones, and which strings of a question are names."""

    def __init__(self, passages: Sequence[Any], questions: Sequence[Any]) -> None:
        words = sorted({w for p in passages for w in re.findall(r"[^\W\d_]{4,}", p.title)})
        self._heads = sorted({w[: len(w) // 2 + 1].capitalize() for w in words})
        self._tails = sorted({w[len(w) // 2 :].lower() for w in words})
        self._known = {answer for q in questions for answer in q.metadata["hop_answers"]}
        self._known |= {answer.lower() for answer in self._known}

    def rewriter(self, question: Any, rng: random.Random) -> Callable[[str], str]:
        """Other names for a question's entities; numbers keep their shape. A quarter of the episodes keep theirs."""
        if rng.random() < 0.25:
            return str
        names = self.names_of(question)
        return renamed({name: self.invent(name, rng) for name in names})

    def names_of(self, question: Any) -> set[str]:
        """Answers of the hops, and those word runs of question and queries that are names."""
        metadata = question.metadata
        names = {answer for answer in metadata["hop_answers"] if len(answer) > 2}
        for query in metadata["queries"]:
            words = query.split()
            for size in range(4, 0, -1):
                for start in range(len(words) - size + 1):
                    run = " ".join(words[start : start + size])
                    capital = all(word[:1].isupper() for word in words[start : start + size])
                    if len(run) > 2 and (run in self._known or (capital and run in question.text)):
                        names.add(run)
        return names

    def invent(self, name: str, rng: random.Random) -> str:
        """A name or number of the same form: words, case, digits."""
        if any(char.isdigit() for char in name):
            return "".join(rng.choice(string.digits) if char.isdigit() else char for char in name)
        words = []
        for word in name.split():
            made = rng.choice(self._heads) + rng.choice(self._tails)
            words.append(made if word[:1].isupper() else made.lower())
        return " ".join(words)


def record_text(config: BaseConfig, record: dict[str, Any], seconds: float) -> str:
    """What docs and the model's folder keep of how it was made (JSON)."""
    last = {name: sum(losses[-50:]) / max(1, len(losses[-50:])) for name, losses in record.items()}
    return json.dumps({"config": config.__dict__, "seconds": round(seconds), **last}, indent=1)
