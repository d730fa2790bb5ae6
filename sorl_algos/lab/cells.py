"""What the lab runs: arms (algorithms and ablations), regimes (how far off-policy), and grids of cells of both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from sorl_algos.config import TrainConfig

EPISODES = 16
"""Episodes of a rollout batch, in every regime."""
GROUP = 4
"""Episodes of each question for the arms that compare within groups."""


@dataclass(frozen=True)
class Arm:
    """One algorithm with its settings; ``changes`` override the common settings."""

    name: str
    about: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    group: bool = False


@dataclass(frozen=True)
class Regime:
    """How far the data are from the policy that trains on them.

    Args:
        steps: optimiser steps that each rollout batch is used for (minibatches times passes).
        staleness: rollouts are sampled by the policy as it was so many updates ago.
        mismatch: what separates the sampler's weights from the trainer's: "" nothing, "bfloat16" rounding, a number:
            normal noise of that size relative to each tensor's standard deviation.
        updates: rollout batches of a run.
        changes: override the common settings (longer horizons, other tasks).
    """

    name: str
    about: str
    steps: int = 4
    staleness: int = 0
    mismatch: str = ""
    updates: int = 60
    changes: Mapping[str, Any] = field(default_factory=dict)


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("ppo", "token ratios", {"algorithm": "ppo"}),
        Arm("turn_ppo", "turn ratios", {"algorithm": "turn_ppo"}),
        Arm("s_ppo", "token ratios, normalisation", {"algorithm": "s_ppo"}),
        Arm("so_ppo", "turn ratios, normalisation", {"algorithm": "so_ppo"}),
        Arm("grpo", "group advantages, token ratios", {"algorithm": "grpo"}, group=True),
        Arm("so_grpo", "group advantages, turn ratios, normalisation", {"algorithm": "so_grpo"}, group=True),
        Arm("gspo", "group advantages, sequence ratios", {"algorithm": "gspo"}, group=True),
        Arm("ppo_dual_clip", "token ratios, dual clip at 3", {"algorithm": "ppo", "dual_clip": 3.0}),
        # Ablations
        Arm("so_ppo_sum", "so_ppo, sum of a turn's log-ratios", {"algorithm": "so_ppo", "pooling": "sum"}),
        Arm("so_ppo_norm", "so_ppo, trigger gradient_norm", {"algorithm": "so_ppo", "normalisation": "gradient_norm"}),
        Arm(
            "so_ppo_ratio",
            "so_ppo, trigger gradient_ratio",
            {"algorithm": "so_ppo", "normalisation": "gradient_ratio"},
        ),
        Arm("so_ppo_1.5", "so_ppo, threshold 1.5", {"algorithm": "so_ppo", "threshold": 1.5}),
        Arm("so_ppo_5", "so_ppo, threshold 5", {"algorithm": "so_ppo", "threshold": 5.0}),
        Arm("so_ppo_micro", "so_ppo, scope microbatch", {"algorithm": "so_ppo", "scope": "microbatch"}),
        Arm("so_ppo_sequence", "so_ppo, scope sequence", {"algorithm": "so_ppo", "scope": "sequence"}),
        Arm("so_ppo_turn_trigger", "so_ppo, trigger on turn ratios", {"algorithm": "so_ppo", "trigger_level": "turn"}),
        # What follows from the findings: ours, beside the paper's
        Arm(
            "so_ppo_step",
            "so_ppo, the factor on the step instead of the gradient",
            {"algorithm": "so_ppo", "factor_on": "step"},
        ),
        Arm(
            "s_ppo_step",
            "s_ppo, the factor on the step instead of the gradient",
            {"algorithm": "s_ppo", "factor_on": "step"},
        ),
        Arm(
            "so_ppo_ess",
            "turn ratios, trigger effective_sample_size on the step",
            {"algorithm": "so_ppo", "normalisation": "effective_sample_size", "factor_on": "step"},
        ),
        Arm(
            "s_ppo_ess",
            "token ratios, trigger effective_sample_size on the step",
            {"algorithm": "s_ppo", "normalisation": "effective_sample_size", "factor_on": "step"},
        ),
        Arm(
            "ppo_max_pass_kl",
            "token ratios, no further pass once the KL of one is above 0.02",
            {"algorithm": "ppo", "max_pass_kl": 0.02},
        ),
        Arm("turn_ppo_dual_clip", "turn ratios, dual clip at 3", {"algorithm": "turn_ppo", "dual_clip": 3.0}),
        Arm(
            "ppo_legacy",
            "token PPO as Search-R1 ran it: advantages through retrieved text, its reward",
            {"algorithm": "ppo", "advantages": "search_r1_legacy", "reward": "search_r1_legacy"},
        ),
        Arm("ppo_sgd", "ppo, SGD in the place of Adam", {"algorithm": "ppo", "optimizer": "sgd"}),
        Arm("so_ppo_sgd", "so_ppo, SGD in the place of Adam", {"algorithm": "so_ppo", "optimizer": "sgd"}),
    )
}
ALGORITHMS = ("ppo", "turn_ppo", "s_ppo", "so_ppo", "grpo", "so_grpo", "gspo", "ppo_dual_clip")
ABLATIONS = tuple(name for name in ARMS if name not in ALGORITHMS)

REGIMES: dict[str, Regime] = {
    regime.name: regime
    for regime in (
        Regime("reuse1", "1 optimiser step a batch", steps=1, updates=100, changes={"eval_every": 4}),
        Regime("reuse4", "4 steps a batch", steps=4),
        Regime("reuse16", "16 steps a batch", steps=16, updates=40),
        Regime("reuse64", "64 steps a batch", steps=64, updates=30),
        Regime("reuse128", "128 steps a batch", steps=128, updates=20, changes={"eval_every": 1}),
        Regime("stale4", "rollouts of 4 updates ago", staleness=4, changes={"eval_every": 3}),
        Regime("stale16", "rollouts of 16 updates ago", staleness=16, changes={"eval_every": 3}),
        Regime(
            "bfloat16",
            "the sampler rounds its weights to bfloat16",
            mismatch="bfloat16",
            changes={"eval_every": 3},
        ),
        Regime("noise", "the sampler's weights carry 2 % noise", mismatch="0.02", changes={"eval_every": 3}),
    )
}

# Common to all cells. lr, critic_lr and lam are the best of token PPO at 4 steps a batch (grid "tuning"), frozen
# before any other algorithm or regime was run.
COMMON = TrainConfig(
    model="base",
    lr=1e-4,
    critic_lr=5e-4,
    lam=0.95,
    prompt="short",
    max_searches=3,
    questions_per_update=EPISODES,
    minibatch_sequences=4,
    microbatch_sequences=4,
    eval_every=2,
    eval_limit=96,
    save_every=10_000,
    critic_warmup_updates=2,
    lr_warmup_updates=0,
    max_skipped_minibatches=0,
    on_alarm="off",
    excess_norm_every=5,
)


@dataclass(frozen=True)
class Cell:
    """One run: an arm in a regime with a seed; ``changes`` override everything (searches for settings)."""

    arm: str
    regime: str
    seed: int
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """The arm with its changes, as tables show it."""
        return self.arm + "".join(f" {name}={value}" for name, value in self.changes)

    def config(self, run_dir: Path) -> TrainConfig:
        """The settings of the run.

        Raises:
            ValueError: an unknown arm or regime, or settings that do not go together.
        """
        for name, known in ((self.arm, ARMS), (self.regime, REGIMES)):
            if name not in known:
                raise ValueError(f"the lab knows no {name!r}; known: {', '.join(known)}")
        arm, regime = ARMS[self.arm], REGIMES[self.regime]
        settings: dict[str, Any] = {"run_dir": run_dir, "seed": self.seed, "updates": regime.updates}
        settings |= reuse(regime.steps)
        if arm.group:
            settings |= {"group_size": GROUP, "questions_per_update": EPISODES // GROUP, "critic": "none"}
        if regime.staleness or regime.mismatch:
            settings["old_logprobs"] = "engine"  # the ratio is taken to the policy that sampled
        settings |= {**regime.changes, **arm.changes, **dict(self.changes)}
        return replace(COMMON, **settings)

    def digest(self) -> str:
        """Twelve hexadecimal digits of everything that decides the run; a result of other settings is not reused.

        Settings at their defaults do not enter, so that a new one leaves old results valid.
        """
        regime, settings = REGIMES[self.regime], asdict(self.config(Path("run")))
        known = {field.name: field.default for field in fields(TrainConfig)}
        changed = {name: value for name, value in settings.items() if value != known[name]}
        what = {**changed, "staleness": regime.staleness, "mismatch": regime.mismatch}
        return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:12]


def reuse(steps: int) -> dict[str, int]:
    """Minibatches and passes that make so many optimiser steps of a rollout batch.

    Raises:
        ValueError: neither 1, 2, 4 nor a multiple of 4.
    """
    minibatches = min(steps, 4)
    if EPISODES % minibatches or steps % minibatches:
        raise ValueError(f"{steps} optimiser steps cannot be made of whole passes; use 1, 2 or a multiple of 4")
    size = EPISODES // minibatches
    return {"minibatch_sequences": size, "microbatch_sequences": size, "passes": steps // minibatches}


def cells(arms: Sequence[str], regimes: Sequence[str], seeds: int) -> Iterator[Cell]:
    """Seeds outermost: whatever has been run at any time, it is a whole table of fewer seeds."""
    for seed in range(seeds):
        for regime in regimes:
            for arm in arms:
                yield Cell(arm, regime, seed)


def _tuning() -> list[Cell]:
    """Token PPO at 4 steps a batch: learning rate, critic's rate, lambda, one after the other in a small cross."""
    found = [
        Cell("ppo", "reuse4", seed, (("lr", lr), ("critic_lr", critic_lr), ("lam", lam)))
        for seed in range(2)
        for lr in (5e-5, 1e-4, 2e-4, 4e-4)
        for critic_lr, lam in ((5e-4, 1.0), (2e-3, 1.0), (5e-4, 0.95))
    ]
    return found


def _smoke() -> list[Cell]:
    tiny = (("updates", 3), ("eval_limit", 8), ("questions_per_update", 8), ("minibatch_sequences", 4))
    group = (("updates", 3), ("eval_limit", 8), ("questions_per_update", 2), ("minibatch_sequences", 8))
    return [
        *(Cell(arm, "reuse4", seed, tiny) for seed in range(2) for arm in ("ppo", "so_ppo")),
        Cell("so_grpo", "reuse4", 0, group),
        Cell("ppo", "stale4", 0, tiny),
        Cell("so_ppo", "noise", 0, tiny),
    ]


HARD = "reuse64"
"""The regime of the ablations: the mildest in which token PPO collapses in most seeds (from the search)."""

GRIDS: dict[str, Any] = {
    "smoke": _smoke,
    "tuning": _tuning,
    "search": lambda: list(cells(("ppo",), tuple(REGIMES), 3)),
    "reuse": lambda: list(cells(ALGORITHMS, ("reuse1", "reuse4", "reuse16", "reuse64", "reuse128"), 10)),
    "other": lambda: list(cells(ALGORITHMS, ("stale4", "stale16", "bfloat16", "noise"), 3)),
    "ablations": lambda: list(cells(ABLATIONS, (HARD,), 5)),
}
