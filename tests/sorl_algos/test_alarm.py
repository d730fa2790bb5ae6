"""The collapse alarm: each rule by hand, made-up collapses and healthy runs, resumption, and the trainer's part."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_algos.alarm import RULES, Alarm, AlarmLog
from sorl_algos.checkpoint import latest_checkpoint
from sorl_algos.learner import make_learner
from sorl_algos.metrics import read_metrics
from sorl_algos.models import Policy
from sorl_algos.trainer import train
from tests.sorl_algos.collapses import COLLAPSES, HEALTHY, ONSET, first_alarm, lines
from tests.sorl_algos.small_game import ReplaySource, made_up, small_config


def after(calm: int, metric: str, ordinary: float, *values: float) -> list[set[str]]:
    """Rules that begin to stand with each of `values`, which follow on `calm` ordinary ones."""
    alarm = Alarm()
    for _ in range(calm):
        assert alarm.update({metric: ordinary}) == {}
    return [set(alarm.update({metric: value})) for value in values]


# --- Each rule ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_holds_from_the_second_value_beyond_its_bounds(rule: Any) -> None:
    # From an ordinary value of 1, without noise, each bound is the further of factor and margin; the median of
    # three is beyond it with the second value that is.
    up = rule.factor >= 1
    if abs(rule.factor) == 1:
        bound = 1 + rule.margin if up else 1 - rule.margin
    else:
        bound = max(rule.factor, 1 + rule.margin) if up else min(rule.factor, 1 - rule.margin)
    beyond, within = bound * (1.01 if up else 0.99), bound * (0.99 if up else 1.01)
    assert after(20, rule.metric, 1.0, beyond, beyond, beyond)[:2] == [set(), {rule.name}]
    assert after(20, rule.metric, 1.0, *[within] * 5) == [set()] * 5


def test_one_odd_update_moves_nothing() -> None:
    assert after(20, "ratio_max", 1.3, 1e6, 1.3, 1.3, 1e6, 1.3, 1.3) == [set()] * 6


def test_noise_widens_the_bounds() -> None:
    # entropies of 0.2 and 0.6 in turn: median 0.4, median absolute deviation 0.2, 3 x 1.4826 x 0.2 = 0.89 above 0.4
    def level(value: float) -> set[str]:
        alarm = Alarm()
        for number in range(40):
            alarm.update({"entropy": 0.2 + 0.4 * (number % 2)})
        return set().union(*(alarm.update({"entropy": value}) for _ in range(3)))

    assert level(1.2) == set()
    assert level(1.35) == {"entropy_explosion"}


def test_nothing_is_judged_before_there_is_a_past() -> None:
    # eleven values: three of the level, three between, five of the reference
    assert after(9, "entropy", 0.4, 4.0, 4.0)[1] == {"entropy_explosion"}
    assert after(7, "entropy", 0.4, 4.0, 4.0)[1] == set()


def test_the_alarm_stands_until_the_quantity_is_back_and_is_told_once() -> None:
    alarm = Alarm()
    for _ in range(20):
        alarm.update({"entropy": 0.4})
    told = [name for _ in range(100) for name in alarm.update({"entropy": 3.0})]
    assert told == ["entropy_explosion"], "a collapse must not become what counts as ordinary"
    assert alarm.active["entropy_explosion"] == "entropy is 3, it was 0.4"
    for _ in range(2):
        alarm.update({"entropy": 0.4})
    assert alarm.active == {}
    assert [name for _ in range(2) for name in alarm.update({"entropy": 3.0})] == ["entropy_explosion"]


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_counts_at_once(value: float | None) -> None:
    assert Alarm().update({"reward_mean": 0.5, "value_loss": value}) == {"non_finite": "not finite: value_loss"}


def test_skipped_minibatches_count_from_the_third_update_running() -> None:
    alarm = Alarm()
    begun = [set(alarm.update({"skipped_minibatches": skips})) for skips in (1.0, 2.0, 0.0, 1.0, 1.0, 1.0, 1.0)]
    assert begun == [set()] * 5 + [{"non_finite"}, set()]


def test_reward_that_falls_by_a_quarter() -> None:
    # without noise: the mean of five is below 0.75 of the best with the third value of 0.3 (0.4 -> 0.36, 0.32, 0.28)
    assert after(20, "reward_mean", 0.4, 0.2, 0.2, 0.2, 0.2)[:3] == [set(), set(), {"reward_fall"}]
    assert after(20, "reward_mean", 0.4, *[0.31] * 20) == [set()] * 20


def test_no_reward_at_all_is_no_fall() -> None:
    assert after(20, "reward_mean", 0.0, *[0.0] * 20) == [set()] * 20


def test_gradients_that_begin_to_flow_after_a_warm_up_are_no_explosion() -> None:
    assert after(20, "grad_norm", 0.0, *[1.0] * 10) == [set()] * 10


# --- Whole runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", COLLAPSES)
def test_it_fires_before_the_reward_has_halved(kind: str) -> None:
    """A quantity that changes by a factor e in 5 updates; the true rate behind the reward is what halves.

    Over 200 seeds 198 or more of each kind are in time (docs/algorithms.md); of these 12, 11 must be.
    """
    found = [first_alarm(kind, seed, 120) for seed in range(12)]
    assert all(fired is not None and fired >= ONSET for fired, _, _ in found)
    in_time = [fired < halved for fired, halved, _ in found if fired is not None and halved is not None]
    assert sum(in_time) >= 11 and len(in_time) == 12


def test_healthy_runs_stay_quiet() -> None:
    """200 seeds of 200 updates, 40 of each kind; over 1000 such runs 14 fired (docs/algorithms.md)."""
    fired = [(kind, seed) for kind in HEALTHY for seed in range(40) if first_alarm(kind, seed, 200)[0] is not None]
    assert len(fired) <= 6, fired


def test_a_resumed_alarm_goes_on_exactly() -> None:
    rows = [row for row, _ in lines("entropy blow-up", 3, 90)]
    straight = Alarm()
    wanted = [straight.update(row) for row in rows]
    assert any(wanted)
    for cut in (1, 4, 12, 66, 70):
        first = Alarm()
        begun = [first.update(row) for row in rows[:cut]]
        second = Alarm(json.loads(json.dumps(first.state())))
        assert begun + [second.update(row) for row in rows[cut:]] == wanted
        assert second.state() == straight.state()


# --- The trainer's part -------------------------------------------------------------------------------------


def test_the_file_keeps_what_the_resumed_run_has_behind_it(tmp_path: Path) -> None:
    log = AlarmLog(tmp_path, "log")
    for update in range(3):
        assert not log.watch(update, {"value_loss": math.nan if update != 1 else 0.0})
    assert [line["update"] for line in read_metrics(log.path)] == [0, 2]
    assert log.alarm_update == 1
    again = AlarmLog(tmp_path, "log", json.loads(json.dumps(log.state())), keep_updates=2)
    assert read_metrics(again.path) == [{"update": 0, "rule": "non_finite", "text": "not finite: value_loss"}]
    assert again.alarm_update == 1, "the first alarm of the run stays the first"


def test_modes(tmp_path: Path) -> None:
    for mode, ends, marked in (("log", False, 1.0), ("stop", True, 1.0), ("off", False, None)):
        metrics = {"value_loss": math.nan}
        log = AlarmLog(tmp_path / mode, mode)  # type: ignore[arg-type]
        assert log.watch(0, metrics) is ends
        assert metrics.get("alarm") == marked
        assert log.path.exists() == (mode != "off")
        assert not log.watch(1, {"value_loss": math.nan}), "a reason that goes on standing ends no resumed run"
    other_rank = AlarmLog(tmp_path / "rank1", "stop", write=False)
    assert other_rank.watch(0, {"value_loss": math.nan}) and not other_rank.path.exists()


def test_a_run_that_comes_apart_is_stopped_saved_and_marked(make_model: Any, tmp_path: Path) -> None:
    good = made_up(8)
    broken = [
        replace(item, info={**item.info, "turns": [{**note, "action_kind": "invalid"} for note in item.info["turns"]]})
        for item in good
    ]
    config = small_config(tmp_path, updates=20, save_every=4, lr=1e-7, critic_lr=1e-7, on_alarm="stop")
    torch.manual_seed(0)
    learner = make_learner(config, Policy(make_model(0), shared_critic=True))
    ended = train(config, learner, ReplaySource([*[good] * 12, *[broken] * 8]), pad_id=0)
    # broken from update 12 on, so the second of them is update 13: 14 are done
    assert (ended["updates_done"], ended["finished"], ended["alarm_update"]) == (14, False, 14)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["alarm"] for row in rows] == [0.0] * 13 + [1.0]
    assert {line["rule"] for line in read_metrics(tmp_path / "alarms.jsonl")} == {"invalid_actions", "tag_degeneration"}
    checkpoint = latest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None and checkpoint.name == "step_000014"
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["alarm_update"] == 14 and state["before_collapse_update"] == 12


def test_an_unknown_mode_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"on_alarm.*log, stop, off"):
        small_config(tmp_path, on_alarm="halt")
