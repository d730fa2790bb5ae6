"""Minibatches that were skipped because their loss or gradient was not finite: recorded, counted, limited."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_algos.batch import Batch
from sorl_algos.distributed import rank
from sorl_algos.metrics import drop_updates
from sorl_env.trajectory import Trajectory


class SkipLog:
    """Writes ``skipped_minibatches.jsonl``; its count goes with the checkpoint, so that a resumed run goes on counting.

    Args:
        limit: skipped minibatches that a run may have.
        state: ``state()`` of the run that is resumed.
        keep_updates: updates that the resumed run has behind it; lines of later ones will be made again.
    """

    def __init__(
        self, run_dir: Path, limit: int, state: Mapping[str, Any] | None = None, *, keep_updates: int = 0
    ) -> None:
        self.path, self.limit = run_dir / "skipped_minibatches.jsonl", limit
        self.skipped: int = (state or {}).get("skipped_minibatches", 0)
        if rank() == 0:
            drop_updates(self.path, keep_updates=keep_updates)

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"skipped_minibatches": self.skipped}

    def record(self, update: int, minibatch: Batch, collated: Sequence[Trajectory]) -> None:
        """Counts one skip and writes the questions that this rank had in it (``minibatch.places`` of ``collated``).

        Raises:
            RuntimeError: it is one more than the limit.
        """
        self.skipped += 1
        assert minibatch.places is not None
        played = minibatch.places[minibatch.loss_mask.any(1)].tolist()  # a silent row stands for no episode
        names = sorted({collated[place].question_id for place in played})
        line = {"update": update, "rank": rank(), "question_ids": names, "skipped": self.skipped}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self.skipped > self.limit:
            raise RuntimeError(
                f"{self.skipped} minibatches had a loss or gradient that was not finite (see {self.path}); "
                "lower --lr or --max-grad-norm, and look at ratio_max in the metrics"
            )
