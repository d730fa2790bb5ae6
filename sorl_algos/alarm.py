"""The collapse alarm: a rule over the stream of metric lines that says when a run comes apart, and why.

Every watched quantity is compared with its own recent past. Its level is the median of its last 3 values (one odd
update moves nothing); its reference is the median of up to 30 values that are at least 3 updates older and were seen
while the quantity was calm. A rule holds when the level is beyond `factor` times the reference, further from it than
`margin`, and further than 3 robust standard deviations of the reference values. Reward is judged by means instead,
because it is the noisiest. docs/algorithms.md lists the rules with their numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from sorl_algos.metrics import read_metrics, write_text_atomically

OnAlarm = Literal["log", "stop", "off"]

LEVEL, GAP, REFERENCE, NEEDED = 3, 3, 30, 5
"""Values of the level, between level and reference, of the reference at most, and before any rule can hold."""
NOISE = 3.0
"""Robust standard deviations of the reference (1.4826 x median absolute deviation) that count as noise."""
NOW, BEST, FALL, REWARD_NOISE = 5, 10, 0.75, 5.5
"""Reward: updates of the present mean, of the best mean, the share of the best below which it has fallen, and standard
errors that count as noise (more than above: the best is a maximum, and lucky)."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Holds when a metric rises above (``factor`` > 1) or falls below (``factor`` < 1) its reference by both bounds.

    A factor of +1 or -1 leaves the direction and the margin alone (for shares, where a factor means little).
    """

    name: str
    metric: str
    factor: float
    margin: float

    def beyond(self, level: float, reference: float, calm: Sequence[float]) -> bool:
        """Whether ``level`` is further from ``reference``, the median of ``calm``, than bounds and noise allow."""
        upwards = self.factor >= 1
        away = level - reference if upwards else reference - level
        if away <= self.margin:
            return False
        if abs(self.factor) != 1:
            if reference <= 0 and not self.margin:  # nothing to be a multiple of
                return False
            if not (level > self.factor * reference if upwards else level < self.factor * reference):
                return False
        return away > NOISE * 1.4826 * median(abs(x - reference) for x in calm)


RULES: tuple[Rule, ...] = (
    Rule("entropy_explosion", "entropy", 1.5, 0.15),
    Rule("entropy_collapse", "entropy", 0.3, 0.05),
    Rule("invalid_actions", "valid_action_rate", -1.0, 0.15),
    Rule("tag_degeneration", "tag_fault_rate", 1.0, 0.15),
    Rule("loops", "loop_rate", 1.0, 0.1),
    Rule("cut_turns", "cut_rate", 1.0, 0.15),
    Rule("length_explosion", "response_tokens_mean", 2.0, 8.0),
    Rule("kl_runaway", "approx_kl", 30.0, 0.05),
    Rule("clip_runaway", "clip_fraction", 4.0, 0.2),
    Rule("ratio_explosion", "ratio_max", 20.0, 10.0),
    Rule("sample_size_loss", "ess", 0.5, 0.2),
    Rule("gradient_explosion", "grad_norm", 10.0, 0.0),
)
WATCHED = tuple(dict.fromkeys(rule.metric for rule in RULES))


class Alarm:
    """Reads one metrics line after another; `active` holds the reasons that stand, by name of their rule.

    Args:
        state: of an earlier `state()` call, to go on exactly where that run stood.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        self._recent: dict[str, list[float]] = {name: list(values) for name, values in state.get("recent", {}).items()}
        self._calm: dict[str, list[float]] = {name: list(values) for name, values in state.get("calm", {}).items()}
        self._rewards: list[float] = list(state.get("rewards", []))
        self._best: float | None = state.get("best")
        self._skips: int = state.get("skips", 0)
        self.active: dict[str, str] = dict(state.get("active", {}))

    def state(self) -> dict[str, Any]:
        """Everything that the next line's judgement rests on, as JSON."""
        return {
            "recent": {name: list(values) for name, values in self._recent.items()},
            "calm": {name: list(values) for name, values in self._calm.items()},
            "rewards": list(self._rewards),
            "best": self._best,
            "skips": self._skips,
            "active": dict(self.active),
        }

    def update(self, row: Mapping[str, float | None]) -> dict[str, str]:
        """Takes in one line and returns the reasons that begin to stand with it: rule name to a sentence.

        A value that is missing is passed over; one that is None or not finite is a reason of its own.
        """
        standing = {**self._non_finite(row), **self._moved(row), **self._reward(row.get("reward_mean"))}
        begun = {name: text for name, text in standing.items() if name not in self.active}
        self.active = standing
        return begun

    def _non_finite(self, row: Mapping[str, float | None]) -> dict[str, str]:
        odd = [name for name, value in row.items() if value is None or not math.isfinite(value)]
        self._skips = self._skips + 1 if row.get("skipped_minibatches") else 0
        if odd:
            return {"non_finite": f"not finite: {', '.join(odd)}"}
        if self._skips >= LEVEL:
            return {"non_finite": f"gradients were not finite (minibatches skipped) in {self._skips} updates running"}
        return {}

    def _moved(self, row: Mapping[str, float | None]) -> dict[str, str]:
        standing: dict[str, str] = {}
        for name in WATCHED:
            value = row.get(name)
            if value is None or not math.isfinite(value):
                continue
            recent, calm = self._recent.setdefault(name, []), self._calm.setdefault(name, [])
            recent.append(value)
            level = median(recent[-LEVEL:])
            held = {}
            if len(calm) >= NEEDED and len(recent) >= LEVEL:
                reference = median(calm)
                for rule in RULES:
                    if rule.metric == name and rule.beyond(level, reference, calm):
                        held[rule.name] = f"{name} is {level:.3g}, it was {reference:.3g}"
            standing |= held
            if len(recent) > LEVEL + GAP - 1:
                oldest = recent.pop(0)
                if not held:  # what is seen in a collapse must not become what counts as ordinary
                    calm.append(oldest)
                    del calm[:-REFERENCE]
        return standing

    def _reward(self, reward: float | None) -> dict[str, str]:
        if reward is None or not math.isfinite(reward):
            return {}
        rewards = self._rewards
        rewards.append(reward)
        del rewards[:-REFERENCE]
        if len(rewards) < BEST:
            return {}
        mean = fmean(rewards[-BEST:])
        self._best = mean if self._best is None else max(self._best, mean)
        now = fmean(rewards[-NOW:])
        # Neighbouring updates differ by noise alone, or nearly: the sampling error of an update from that.
        error = math.sqrt(fmean((b - a) ** 2 for a, b in pairwise(rewards)) / 2)
        noise = REWARD_NOISE * error * math.sqrt(1 / NOW + 1 / BEST)
        if self._best > 0 and now < FALL * self._best and self._best - now > noise:
            return {"reward_fall": f"reward_mean is {now:.3g} over {NOW} updates, its best was {self._best:.3g}"}
        return {}


class AlarmLog:
    """The alarm of a training run: watches its metrics, writes ``alarms.jsonl``, says when the run should end.

    A line of the file is ``{"update": 41, "rule": "entropy_explosion", "text": "entropy is 1.1, it was 0.4"}``,
    written when the reason begins to stand. A resumed run first drops the lines of updates that it will make again.

    Args:
        mode: "log" writes, "stop" also ends the run, "off" does neither.
        state: ``state()`` of the run that is resumed.
        keep_updates: updates that the resumed run has behind it.
        write: False on all ranks but the first.
    """

    def __init__(
        self,
        run_dir: Path,
        mode: OnAlarm,
        state: Mapping[str, Any] | None = None,
        *,
        keep_updates: int = 0,
        write: bool = True,
    ) -> None:
        self.mode, self.write, self.path = mode, write, run_dir / "alarms.jsonl"
        state = state or {}
        self.alarm = Alarm(state.get("alarm"))
        self.alarm_update: int | None = state.get("alarm_update")
        if write and self.path.exists():
            kept = [line for line in read_metrics(self.path) if line["update"] < keep_updates]
            write_text_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def state(self) -> dict[str, Any]:
        """For the checkpoint: ``alarm`` and ``alarm_update``, the number of updates done at the first alarm or None."""
        return {"alarm": self.alarm.state(), "alarm_update": self.alarm_update}

    def watch(self, update: int, metrics: dict[str, float]) -> bool:
        """Judges the metrics of an update and adds ``alarm`` (0 or 1) to them. True: the run should end now."""
        if self.mode == "off":
            return False
        begun = self.alarm.update(metrics)
        metrics["alarm"] = float(bool(self.alarm.active))
        if not begun:
            return False
        if self.alarm_update is None:
            self.alarm_update = update + 1
        if self.write:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                for rule, text in begun.items():
                    file.write(json.dumps({"update": update, "rule": rule, "text": text}) + "\n")
        return self.mode == "stop"
