"""A warm start on real questions, stage by stage: score the model as it comes, imitate, save, score again.

What it writes into the run directory: ``warm_start.json`` (settings), ``train.jsonl`` and ``dev.jsonl`` (the split),
``evaluations.json``, ``episodes_*.jsonl``, ``losses.json`` and ``model/``. A stage whose result lies there is skipped.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium
import torch

from sorl_algos.evaluate import evaluate
from sorl_algos.metrics import write_text_atomically
from sorl_algos.models import Policy, load_language_model, save_language_model
from sorl_algos.real_demonstrations import Named, in_dev, positive_ids, real_demonstrations
from sorl_algos.rollout.hf import HFEngine
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.run import Progress
from sorl_algos.warmup import supervised
from sorl_env.trajectory import write_jsonl


@dataclass(frozen=True)
class WarmStartConfig:
    """Settings; the defaults suit a 135 M model on one CPU core (about half an hour)."""

    run_dir: Path = Path("runs/smollm2_warm")
    model: str = "smollm2"
    seed: int = 0
    dev_share: float = 0.2
    """Share of the questions held out, chosen by a hash of (seed, id)."""
    held_out_field: str = ""
    """Hold out the questions whose row has this field true instead (PubMedQA's official_test)."""
    env: str = "SearchQA-v0"
    """SearchQA-v0 or MedicalQA-v0."""
    prompt: str = "short"
    zero_shot_prompt: str = "search_r1"
    """Prompt of the model as it comes, which needs to be told the tags."""
    top_k: int = 1
    max_observation_words: int = 90
    max_turn_tokens: int = 64
    max_total_tokens: int = 512
    steps: int = 300
    batch_sequences: int = 8
    lr: float = 3e-4
    bfloat16: bool = True
    """Autocast the imitation to bfloat16; weights stay fp32."""
    save_every: int = 50
    zero_shot_limit: int = 32
    """Dev questions that the model as it comes plays; 0: none."""
    dev_limit: int = 64
    """Dev questions that the warm-started model plays; 0: none."""

    def __post_init__(self) -> None:
        if not 0 < self.dev_share < 1:
            raise ValueError(f"dev_share is {self.dev_share}; it must lie between 0 and 1")
        for name in ("top_k", "max_observation_words", "max_turn_tokens", "steps", "batch_sequences", "lr"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be greater than 0")


def check_same(config: WarmStartConfig, sources: dict[str, Any]) -> None:
    """Writes the settings, or refuses a run directory whose settings were others.

    Args:
        sources: what else decides the result (question files, index).

    Raises:
        ValueError: names the first setting that differs.
    """
    path = config.run_dir / "warm_start.json"
    settings = json.loads(json.dumps({**asdict(config), **sources}, default=str))
    if path.exists():
        old = json.loads(path.read_text(encoding="utf-8"))
        for name, value in settings.items():
            if name in old and old[name] != value:
                raise ValueError(
                    f"{config.run_dir} holds a warm start with {name}={old[name]!r}, this one has {value!r}; "
                    "give another --run-dir, or remove that directory to start anew"
                )
    config.run_dir.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, json.dumps(settings, indent=1))


def split(config: WarmStartConfig, questions: Any) -> tuple[Any, Any]:
    """The train and the dev part of a QuestionSet, also written as question files.

    Raises:
        ValueError: one of the parts is empty.
    """
    field = config.held_out_field
    held_out = {
        q.id
        for q in questions
        if (bool(q.metadata.get(field)) if field else in_dev(q.id, share=config.dev_share, seed=config.seed))
    }
    train = questions.select(q.id for q in questions if q.id not in held_out)
    dev = questions.select(q.id for q in questions if q.id in held_out)
    for name, part in (("train", train), ("dev", dev)):
        if not len(part):
            setting = f"held_out_field ({field})" if field else f"dev_share ({config.dev_share})"
            raise ValueError(f"no question falls into the {name} part; change {setting}")
        rows = [
            {"id": q.id, "question": q.text, "golden_answers": q.answers, "kind": q.kind, **q.metadata} for q in part
        ]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_text_atomically(config.run_dir / f"{name}.jsonl", text)
    return train, dev


class WarmStart:
    """The stages; `execute` runs those that are still due.

    Args:
        train, dev: disjoint QuestionSets.
        retriever: searches passages among which are those that the training questions name.
        named: gives the ids that a question names.
    """

    def __init__(
        self,
        config: WarmStartConfig,
        train: Any,
        dev: Any,
        retriever: Any,
        progress: Progress,
        named: Named = positive_ids,
    ) -> None:
        self.named = named
        self.config, self.train, self.dev = config, train, dev
        self.retriever, self.progress = retriever, progress
        self.saved = config.run_dir / "model"
        self.trained = (self.saved / "config.json").exists()
        language_model, self.tokenizer = load_language_model(str(self.saved) if self.trained else config.model)
        precision = torch.bfloat16 if config.bfloat16 else None
        self.policy, self.renderer = Policy(language_model, compute_dtype=precision), Renderer(self.tokenizer)

    def execute(self) -> list[dict[str, Any]]:
        """Runs what is due; returns the entries of evaluations.json.

        Raises:
            ValueError: no training question became a demonstration.
        """
        if not self.trained:
            self._score("zero shot", self.config.zero_shot_prompt, self.config.zero_shot_limit)
            self._imitate()
        self._score("warm start", self.config.prompt, self.config.dev_limit)
        return self._entries()

    def _env(self, questions: Any, prompt: str) -> Any:
        return gymnasium.make_vec(
            self.config.env,
            num_envs=min(32, len(questions)),
            retriever=self.retriever,
            questions=questions,
            prompt=prompt,
            max_searches=1,
            top_k=self.config.top_k,
            max_observation_words=self.config.max_observation_words,
        )

    def _entries(self) -> list[dict[str, Any]]:
        path = self.config.run_dir / "evaluations.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def _score(self, name: str, prompt: str, limit: int) -> None:
        """Greedy scores on dev questions, added to evaluations.json."""
        entries = self._entries()
        if not limit or any(entry["name"] == name for entry in entries):
            return
        questions = self.dev.sample_by_hash(limit)
        self.progress.begin(f"{name} on dev", len(questions))
        began = time.monotonic()
        result = evaluate(
            self._env(questions, prompt),
            HFEngine(self.policy.lm, self.tokenizer),
            self.renderer,
            list(questions),
            name=name,
            max_turn_tokens=self.config.max_turn_tokens,
            max_total_tokens=self.config.max_total_tokens,
            on_episodes=self.progress.advance,
        )
        seconds = round(time.monotonic() - began, 1)
        entry = {**result.to_dict("dev"), "name": name, "prompt": prompt, "seconds": seconds}
        write_jsonl(self.config.run_dir / f"episodes_{name.replace(' ', '_')}.jsonl", result.trajectories)
        write_text_atomically(self.config.run_dir / "evaluations.json", json.dumps([*entries, entry], indent=1))

    def _imitate(self) -> None:
        """Demonstrations, imitation, the saved model."""
        config = self.config
        demonstrations = real_demonstrations(
            self._env(self.train, config.prompt),
            self.renderer,
            list(self.train),
            self.retriever,
            top_k=config.top_k,
            seed=config.seed,
            max_tokens=config.max_total_tokens,
            named=self.named,
        )
        if not demonstrations:
            raise ValueError(
                f"none of the {len(self.train)} training questions became a demonstration; the rows need "
                "positive_ids (or pmid), and the index must hold those passages"
            )
        self.progress.begin(f"warm start ({len(demonstrations)} demonstrations)", config.steps)
        began = time.monotonic()
        losses = supervised(
            self.policy,
            demonstrations,
            steps=config.steps,
            batch_sequences=config.batch_sequences,
            lr=config.lr,
            pad_id=self.tokenizer.pad_token_id,
            seed=config.seed,
            on_step=lambda step, loss: self.progress.advance(1, f"step {step + 1}, loss {loss:.3f}"),
            checkpoints=config.run_dir / "checkpoints",
            save_every=config.save_every,
        )
        seconds = round(time.monotonic() - began, 1)
        record = {"demonstrations": len(demonstrations), "seconds": seconds, "losses": losses}
        write_text_atomically(config.run_dir / "losses.json", json.dumps(record))
        save_language_model(self.policy.lm, self.tokenizer, self.saved)
