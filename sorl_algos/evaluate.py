"""Scores of a policy on a set of questions, with intervals: exact match, F1, searches.

What a training run needs between its updates; `sorl_algos.evaluation` holds the harness that makes result files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sorl_algos.evaluation.statistics import interval
from sorl_algos.rollout.collect import collect, usable
from sorl_algos.rollout.engine import RolloutEngine, Sampling
from sorl_algos.rollout.renderer import Renderer
from sorl_env.trajectory import Trajectory

__all__ = ["Evaluation", "evaluate", "interval", "searches"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of one set: for each name the mean and its 95 % bootstrap interval over questions.

    ``trajectories`` hold every episode; those that infrastructure failed are counted in ``failed`` and not scored.
    """

    name: str
    n: int
    failed: int
    scores: dict[str, dict[str, float]]
    trajectories: list[Trajectory]

    def means(self) -> dict[str, float]:
        return {name: score["mean"] for name, score in self.scores.items()}

    def to_dict(self, stage: str) -> dict[str, Any]:
        """As ``evaluations.json`` of a run holds it."""
        return {
            "name": f"{self.name} {stage}",
            "set": self.name,
            "stage": stage,
            "n": self.n,
            "failed": self.failed,
            **self.scores,
        }


def evaluate(
    env: Any,
    engine: RolloutEngine,
    renderer: Renderer,
    questions: Sequence[Any],
    *,
    name: str,
    max_turn_tokens: int,
    max_total_tokens: int | None,
    temperature: float = 0.0,
    seed: int = 0,
    on_episodes: Callable[[int], None] | None = None,
) -> Evaluation:
    """Plays every question once (greedily by default) and scores the answers.

    Raises:
        ValueError: no question, or every episode failed in retrieval.
    """
    if not questions:
        raise ValueError(f"evaluation set {name!r} holds no question")
    trajectories = collect(
        env,
        engine,
        renderer,
        questions,
        sampling=Sampling(max_tokens=max_turn_tokens, temperature=temperature),
        seed=seed,
        max_total_tokens=max_total_tokens,
        on_episodes=on_episodes,
    )
    kept = usable(trajectories)
    if not kept:
        raise ValueError(f"all {len(trajectories)} episodes of {name!r} failed in retrieval; is the retriever up?")
    columns = {
        "exact_match": [item.info["scores"].get("exact_match", 0.0) for item in kept],
        "f1": [item.info["scores"].get("f1", 0.0) for item in kept],
        "searches": [float(searches(item)) for item in kept],
        "answered": [float(item.stop == "answered") for item in kept],
    }
    scores = {column: interval(values, seed=seed) for column, values in columns.items()}
    return Evaluation(name, len(kept), len(trajectories) - len(kept), scores, trajectories)


def searches(trajectory: Trajectory) -> int:
    """Searches that were carried out in an episode (one asked for in the last turn is not)."""
    return int(trajectory.info["searches"])
