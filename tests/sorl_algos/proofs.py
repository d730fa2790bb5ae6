"""Comparisons that can be recorded: what was compared, the tolerance, the worst difference seen.

With SORL_PROOFS=file.jsonl in the environment every comparison appends a line to that file, and
`python -m tests.sorl_algos.proofs file.jsonl` prints the table of docs/algorithms.md.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

torch.set_num_threads(1)  # small tensors: threads only wait for one another


@dataclass(frozen=True, slots=True)
class RandomBatch:
    """Float64 tensors (B, T) with observations between turns; group_ids (B,)."""

    logp: Tensor
    old_logp: Tensor
    advantages: Tensor
    mask: Tensor
    turn_ids: Tensor
    rewards: Tensor
    values: Tensor
    group_ids: Tensor

    @property
    def five(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.logp, self.old_logp, self.advantages, self.mask, self.turn_ids


def random_batch(seed: int, rows: int = 5, width: int = 14, spread: float = 0.4) -> RandomBatch:
    """Row 0 has no action token, row 1 nothing but action tokens; the others mix turns and observations.

    spread: standard deviation of the log-ratios, and of a drift that a row's tokens share (so that the clip
    is active at the sequence level too).
    """
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    mask = torch.zeros(rows, width, dtype=torch.bool)
    ids = torch.full((rows, width), -1)
    mask[1], ids[1] = True, 0
    for row in range(2, rows):
        column, turn = int(torch.randint(0, 3, (), generator=generator)), 0
        while column < width:
            length = int(torch.randint(1, 5, (), generator=generator))
            mask[row, column : column + length] = True
            ids[row, column : column + length] = turn
            column += length + int(torch.randint(1, 4, (), generator=generator))
            turn += 1
    old_logp = -normal().abs() - 0.1
    return RandomBatch(
        logp=old_logp + spread * (normal() + normal()[:, :1]),
        old_logp=old_logp,
        advantages=normal(),
        mask=mask,
        turn_ids=ids,
        rewards=normal(),
        values=normal(),
        group_ids=torch.randint(0, 3, (rows,), generator=generator),
    )


def same(what: str, actual: Tensor, expected: object, *, tolerance: float) -> None:
    """Assert that the largest absolute difference is within `tolerance`, and record it."""
    target = expected if isinstance(expected, Tensor) else torch.tensor(expected, dtype=torch.float64)
    assert actual.shape == target.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(target.shape)}"
    difference = (actual.detach().double() - target.detach().double()).abs()
    worst = float(difference.max()) if difference.numel() else 0.0
    if "SORL_PROOFS" in os.environ:
        with Path(os.environ["SORL_PROOFS"]).open("a") as file:
            file.write(json.dumps({"what": what, "tolerance": tolerance, "worst": worst}) + "\n")
    assert worst <= tolerance, f"{what}: differs by {worst:.3g}, tolerance {tolerance:.3g}"


def table(path: Path) -> str:
    """Markdown table of the recorded comparisons, in order of first appearance."""
    rows: dict[str, list[float]] = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        tolerance, worst, count = rows.get(entry["what"], (0.0, 0.0, 0.0))
        rows[entry["what"]] = [max(tolerance, entry["tolerance"]), max(worst, entry["worst"]), count + 1]
    lines = ["| what | comparisons | tolerance | worst seen |", "|---|---|---|---|"]
    lines += [f"| {what} | {count:.0f} | {tol:.0e} | {worst:.1e} |" for what, (tol, worst, count) in rows.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
