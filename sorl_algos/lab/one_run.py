"""One run of the lab: from a cell to its line of results."""

from __future__ import annotations

import copy
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sorl_algos.lab import results
from sorl_algos.lab.cells import REGIMES, Cell
from sorl_algos.lab.collapse import Fruitless, judge
from sorl_algos.lab.sources import DistantSource
from sorl_algos.metrics import read_metrics
from sorl_algos.rollout.hf import HFEngine
from sorl_algos.run import Run, git_revision
from sorl_algos.trainer import train


class Silent:
    """Shows nothing."""

    def begin(self, stage: str, total: int) -> None: ...

    def advance(self, steps: int = 1, note: str = "") -> None: ...


def run_cell(cell: Cell, run_dir: Path, *, retriever: Any, train_questions: Any, dev_questions: Any) -> dict[str, Any]:
    """Trains the cell in an empty ``run_dir`` and returns its record: verdict, curves, time, revision.

    Raises:
        ValueError: an unknown arm or regime, or settings that do not go together.
    """
    config = cell.config(run_dir)
    regime = REGIMES[cell.regime]
    run_dir.mkdir(parents=True, exist_ok=True)
    run = Run(
        config,
        retriever=retriever,
        train_questions=train_questions,
        dev_questions=dev_questions,
        eval_sets=(),
        progress=Silent(),
    )
    source: Any = run.source
    if regime.staleness or regime.mismatch:
        # An engine with weights of its own, which may lag behind the policy's or differ from them.
        run.source.engine = HFEngine(copy.deepcopy(run.learner.raw_policy.lm), run.tokenizer)
        source = DistantSource(
            run.source, staleness=regime.staleness, mismatch=regime.mismatch, seed=1_000 * cell.seed
        )
    started, finished, failure, fruitless = time.monotonic(), True, "", Fruitless()
    try:
        train(
            config,
            run.learner,
            source,
            pad_id=run.tokenizer.pad_token_id,
            evaluate=run.dev_scores,
            on_update=fruitless.on_update,
            stop_requested=fruitless,
        )
    except RuntimeError as error:  # a loss or gradient that was not finite
        finished, failure = False, str(error)
    rows = read_metrics(run_dir / "metrics.jsonl")
    return {
        "cell": results.name(cell),
        "digest": cell.digest(),
        "arm": cell.arm,
        "label": cell.label,
        "regime": cell.regime,
        "seed": cell.seed,
        "updates": len(rows),
        "minutes": round((time.monotonic() - started) / 60, 2),
        "revision": git_revision(),
        "failure": failure,
        **asdict(judge(rows, finished=finished, planned=config.updates)),
        "curves": results.curves(rows),
    }
