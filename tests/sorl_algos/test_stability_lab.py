"""The lab's definitions on made-up runs, its statistics against worked numbers, and one real smoke cell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_algos.lab import results
from sorl_algos.lab.cells import ALGORITHMS, ARMS, EPISODES, GRIDS, REGIMES, Cell, cells, reuse
from sorl_algos.lab.collapse import FRUITLESS, SCORE, Fruitless, judge, running_score
from sorl_algos.lab.page import mean_curve, write_page
from sorl_algos.lab.schedule import side_by_side
from sorl_algos.lab.sources import DistantSource, altered
from sorl_algos.lab.summary import compare, paired_table, summarise, table, wilson

ROOT = Path(__file__).resolve().parents[2]


def lines(scores: list[float], every: int = 2, **others: list[float]) -> list[dict[str, Any]]:
    """Metric lines of a calm run with these held-out scores, one every so many updates."""
    rows: list[dict[str, Any]] = []
    for update in range(len(scores) * every):
        row: dict[str, Any] = {"update": update, "entropy": 1.0, "valid_action_rate": 0.9, "reward_mean": 0.3}
        row |= {name: values[update] for name, values in others.items()}
        if update % every == every - 1:
            row[SCORE] = scores[update // every]
        rows.append(row)
    return rows


def test_the_running_score_is_the_mean_of_ten_updates() -> None:
    # Evaluations at 1, 3, 5, ...: the last 10 updates hold five of them.
    means = running_score(lines([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]))
    assert means[0] == (1, 0.0)
    assert means[-1] == (13, pytest.approx((0.2 + 0.3 + 0.4 + 0.5 + 0.6) / 5))


def test_a_fall_below_half_of_the_best_to_the_end_is_a_collapse() -> None:
    verdict = judge(lines([0.4] * 10 + [0.0] * 10), finished=True)
    # Five evaluations a window: after three zeros the mean is 0.16, the first below 0.2: update 2 * 12 + 1.
    assert (verdict.collapsed, verdict.reason, verdict.collapse_update) == (True, "score", 25)
    assert (verdict.best, verdict.final) == pytest.approx((0.4, 0.0))


@pytest.mark.parametrize(
    "scores",
    [
        [0.4] * 10 + [0.0] * 5 + [0.4] * 5,  # it comes back
        [0.4] * 10 + [0.25] * 10,  # above half
        [0.04] * 10 + [0.0] * 10,  # no peak to fall from
        [0.1 + 0.02 * n for n in range(15)],
    ],
)
def test_what_is_no_collapse(scores: list[float]) -> None:
    assert not judge(lines(scores), finished=True).collapsed


def test_tags_that_are_gone_at_the_end_are_a_collapse_and_a_dip_is_not() -> None:
    gone = [0.9] * 20 + [0.2] * 20
    verdict = judge(lines([0.3] * 20, valid_action_rate=gone), finished=True)
    assert (verdict.reason, verdict.alarm_reason) == ("alarm:invalid_actions", "invalid_actions")
    assert verdict.alarm_update is not None
    assert 20 <= verdict.alarm_update <= 22
    dip = [0.9] * 15 + [0.2] * 6 + [0.9] * 19
    verdict = judge(lines([0.3] * 20, valid_action_rate=dip), finished=True)
    assert not verdict.collapsed
    assert verdict.alarm_update is not None


def test_an_end_before_the_time_is_a_collapse() -> None:
    assert judge(lines([0.3] * 5), finished=False).reason == "non_finite"


def test_a_run_is_ended_when_nothing_was_earned_for_ten_updates() -> None:
    fruitless = Fruitless()
    rewards = [0.1, *[0.0] * (FRUITLESS - 1), 0.1, *[0.0] * FRUITLESS]
    asked = []
    for update, reward in enumerate(rewards):
        fruitless.on_update(update, {"reward_mean": reward})
        asked.append(fruitless())
    assert asked == [False] * (len(rewards) - 1) + [True]


def test_the_last_score_of_a_run_that_was_ended_counts_for_the_rest() -> None:
    """Ten evaluations at 0.4, ten at 0.1 that were not made: the area is what it would be with them."""
    whole = judge(lines([0.4] * 9 + [0.1] * 11), finished=True)
    ended = judge(lines([0.4] * 9 + [0.1] * 5), finished=True, planned=40)
    assert (whole.ended_early, ended.ended_early) == (False, True)
    assert ended.area == pytest.approx(whole.area) and ended.final == pytest.approx(0.1)


def test_a_run_without_scores_cannot_be_judged() -> None:
    with pytest.raises(ValueError, match="evaluate at least once"):
        judge([{"update": 0}], finished=True)


def test_wilson_against_worked_numbers() -> None:
    # 8 of 10: (0.8 + 3.8415/20) / (1 + 3.8415/10) = 0.7167; half width
    # 1.96 / 1.38415 * sqrt(0.8 * 0.2 / 10 + 3.8415 / 400) = 0.2265.
    assert wilson(8, 10) == pytest.approx((0.8, 0.4902, 0.9433), abs=2e-4)
    assert wilson(0, 10)[:2] == (0.0, 0.0)
    assert wilson(10, 10)[2] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="no share"):
        wilson(3, 2)


def record(label: str, seed: int, final: float, *, collapsed: bool = False, regime: str = "reuse4") -> dict[str, Any]:
    return {
        "cell": f"{regime}/{label}/{seed}", "digest": "d", "arm": label, "label": label, "regime": regime, "seed": seed,
        "collapsed": collapsed, "final": final, "best": final + 0.1, "area": final,
        "alarm_update": 5 if collapsed else None,
        "curves": {"em": [None, final], "clip": [0.1, 0.3], "kl": [0.01, None]},
    }  # fmt: skip


RECORDS = [record("ppo", seed, 0.2 + 0.01 * seed, collapsed=seed < 2) for seed in range(4)] + [
    record("so_ppo", seed, 0.3 + 0.01 * seed) for seed in range(4)
]


def test_summaries_and_pairs() -> None:
    ppo, so_ppo = summarise(RECORDS)
    assert (ppo.collapses, ppo.runs, so_ppo.collapses) == (2, 4, 0)
    assert ppo.clip == pytest.approx(0.2)
    assert ppo.final["mean"] == pytest.approx(0.215)
    found = compare(RECORDS, "ppo", "so_ppo", "reuse4")
    assert (found["mean"], found["low"], found["high"], found["seeds"]) == pytest.approx((0.1, 0.1, 0.1, 4))
    with pytest.raises(ValueError, match="0 seeds in common"):
        compare(RECORDS, "ppo", "gspo", "reuse4")
    assert "| reuse4 | ppo | 4 | 50% (15% to 85%) |" in table(RECORDS)
    assert "| reuse4 | so_ppo | 4 | +0.100 (+0.100 to +0.100) |" in paired_table(RECORDS, "ppo")


def test_the_page_shows_every_arm_and_runs_no_foreign_script(tmp_path: Path) -> None:
    odd = record("<script>x</script>", 0, 0.1)
    page = write_page([*RECORDS, odd], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "so_ppo" in page
    assert "<script>x" not in page
    with pytest.raises(ValueError, match="run a grid first"):
        write_page([], tmp_path / "none.html")


def test_the_mean_curve_takes_what_runs_are_left() -> None:
    assert mean_curve([[(0.0, 1.0), (1.0, 3.0)], [(0.0, 2.0)]]) == [(0.0, 1.5), (1.0, 3.0)]


def test_results_survive_a_line_that_was_cut_and_are_not_made_twice(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    cell = Cell("ppo", "reuse4", 0)
    results.append(path, {"cell": results.name(cell), "digest": cell.digest(), "x": 1})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"cell": "half')
    results.append(path, {"cell": "other", "digest": "d"})
    assert [item["cell"] for item in results.read(path)] == [results.name(cell), "other"]
    other = Cell("ppo", "reuse4", 0, (("lr", 1e-3),))
    assert results.missing([cell, other, other], results.read(path)) == [other]


def test_every_cell_of_every_grid_has_valid_settings() -> None:
    for grid in GRIDS.values():
        for cell in grid():
            config = cell.config(Path("run"))
            assert config.episodes_per_update == EPISODES or dict(cell.changes)
    for regime in REGIMES.values():
        for arm in ALGORITHMS:
            config = Cell(arm, regime.name, 0).config(Path("run"))
            assert config.optimiser_steps_per_update == regime.steps
    assert len({Cell(arm, "reuse4", 0).digest() for arm in ARMS}) == len(ARMS)
    with pytest.raises(ValueError, match="no 'pppo'"):
        Cell("pppo", "reuse4", 0).config(Path("run"))


def test_a_result_is_known_by_what_differs_from_the_defaults() -> None:
    """So a setting that is new, or given at its default, leaves old results valid."""
    cell = Cell("ppo", "reuse4", 0)
    assert Cell("ppo", "reuse4", 0, (("dual_clip", None), ("factor_on", "gradient"))).digest() == cell.digest()
    others = [Cell("ppo", "reuse4", 1), Cell("so_ppo", "reuse4", 0), Cell("ppo", "stale4", 0), Cell("ppo", "noise", 0)]
    others.append(Cell("ppo", "reuse4", 0, (("lr", 3e-4),)))
    assert len({other.digest() for other in [cell, *others]}) == 6


def test_grids_are_whole_tables_at_any_time() -> None:
    order = list(cells(("a", "b"), ("x", "y"), 2))
    assert [(cell.seed, cell.regime, cell.arm) for cell in order[:4]] == [
        (0, "x", "a"), (0, "x", "b"), (0, "y", "a"), (0, "y", "b"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "minibatch", "passes"), [(1, 16, 1), (2, 8, 1), (4, 4, 1), (16, 4, 4), (128, 4, 32)]
)
def test_reuse(steps: int, minibatch: int, passes: int) -> None:
    found = reuse(steps)
    assert (found["minibatch_sequences"], found["passes"]) == (minibatch, passes)


def test_reuse_refuses_parts_of_passes() -> None:
    with pytest.raises(ValueError, match="whole passes"):
        reuse(6)


class Engine:
    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def update_weights(self, weights: Any, version: int) -> None:
        self.seen.append((version, float(dict(weights)["weight"][0, 0])))


class Inner:
    def __init__(self) -> None:
        self.engine, self.version = Engine(), 0


def test_a_stale_source_samples_with_what_was_published_then() -> None:
    policy = torch.nn.Module()
    policy.lm = torch.nn.Linear(1, 1, bias=False)
    inner = Inner()
    source = DistantSource(inner, staleness=2)
    for version in range(5):
        with torch.no_grad():
            policy.lm.weight.fill_(float(version))
        source.publish(policy, version)
        source.publish(policy, version)  # an evaluation publishes the same version again
    assert inner.engine.seen[1::2] == [(0, 0.0), (0, 0.0), (0, 0.0), (1, 1.0), (2, 2.0)]
    assert inner.version == 4


def test_a_sampler_can_differ_by_a_known_amount() -> None:
    weights = [("weight", torch.randn(200, 200, generator=torch.Generator().manual_seed(0)))]
    (_, same), (_, rounded), (_, noisy) = (next(altered(weights, kind, 1)) for kind in ("", "bfloat16", "0.02"))
    assert torch.equal(same, weights[0][1])
    assert torch.equal(rounded, weights[0][1].bfloat16().float())
    assert float((noisy - weights[0][1]).std() / weights[0][1].std()) == pytest.approx(0.02, rel=0.02)


def test_processes_side_by_side_in_order_and_with_their_output() -> None:
    def start(job: int) -> subprocess.Popen[str]:
        code = f"import sys; print('x' * 200_000); sys.exit({job})"  # more than a pipe holds
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    ended = {
        job: (left, len(done.stdout), done.returncode)
        for job, left, done in side_by_side([0, 1, 2], start, processes=2)
    }
    assert {job: found[1:] for job, found in ended.items()} == {0: (200_001, 0), 1: (200_001, 1), 2: (200_001, 2)}
    assert sorted(found[0] for found in ended.values()) == [0, 1, 2]


@pytest.mark.slow
def test_the_script_runs_reports_and_does_not_run_twice(tmp_path: Path) -> None:
    def lab(*arguments: str) -> str:
        command = [sys.executable, ROOT / "scripts" / "stability_lab.py", *arguments, "--output", tmp_path / "out"]
        done = subprocess.run(
            [*map(str, command), "--work", str(tmp_path / "work")], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    lab("run", "smoke", "--seeds", "1", "--only", "so_ppo", "--regimes", "noise")
    found = json.loads((tmp_path / "out" / "results.jsonl").read_text(encoding="utf-8"))
    assert (found["updates"], found["collapsed"]) == (3, False)
    assert len(found["curves"]["em"]) == 3
    assert "0 of 1 runs are to be made" in lab("run", "smoke", "--seeds", "1", "--only", "so_ppo", "--regimes", "noise")
    assert "report.html" in lab("report")
    assert not any((tmp_path / "work").iterdir())
