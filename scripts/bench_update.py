"""What an update costs: the turn level and the normalisation beside token PPO, and ours beside TRL's GRPOTrainer.

    taskset -c 1 python scripts/bench_update.py                    five ratios, some minutes on one core
    python scripts/bench_update.py --rounds 3 --no-trl             a quick look, without TRL installed

An update here is: log-probabilities of the old policy, advantages, and two optimiser steps (forward, loss, backward,
step), with all metrics, on the same episodes of random tokens and the bundled model. Everything that is compared runs
in one process, a round of each after the other; the ratio of each round is taken, and their median shown.
"""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from bench.timing import Times, interleaved, ratio
from bench.trl_updates import trl_update
from bench.updates import batch_of, clipped_share, episodes, learner_of, rows_with_clips, update

DRIFT = 0.42
"""Share of the sequences in which a policy's drift clips 5 % of the tokens: the bundled model on 64 episodes of its
world, with noise on its weights until the token-level clip was active on 5 % (turn level: 0.14)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--episodes", type=int, default=16, help="of one update, in two minibatches")
    parser.add_argument("--microbatch", type=int, default=4, help="sequences of one forward")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--observation", type=int, default=60, help="mean tokens of an observation")
    parser.add_argument("--action", type=int, default=20, help="mean tokens of an action")
    parser.add_argument("--clipped", type=float, default=0.05, help="share of action tokens with an active clip")
    parser.add_argument("--model", default="base")
    parser.add_argument("--no-trl", action="store_true")
    parser.add_argument("--output", type=Path, help="write the figures as JSON too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    group_size = 4
    items = episodes(
        arguments.episodes, group_size=group_size, turns=arguments.turns, observation=arguments.observation,
        action=arguments.action, vocabulary=4000,
    )  # fmt: skip
    batch = batch_of(items)
    tokens, actions = int(batch.attention_mask.sum()), int(batch.loss_mask.sum())
    print(f"{len(items)} episodes, {tokens} tokens, {actions} of them sampled; micro-batches of {arguments.microbatch}")

    def learner(**settings: Any) -> Any:
        return learner_of(
            arguments.model, items, group_size=group_size, microbatch=arguments.microbatch, **settings
        )

    rows: list[dict[str, Any]] = []

    def compare(what: str, target: float, above: str, below: str, found: dict[str, Times], note: str = "") -> None:
        cpu, wall = (ratio(getattr(found[above], kind), getattr(found[below], kind)) for kind in ("cpu", "wall"))
        rate = tokens / sorted(found[above].cpu)[len(found[above].cpu) // 2]
        rows.append(
            {"what": what, "target": target, "cpu": str(cpu), "wall": str(wall), "tokens_per_cpu_s": round(rate),
             "median": cpu.median, "note": note}
        )  # fmt: skip
        held = "held" if cpu.median <= target else "NOT held"
        print(f"{what}: {cpu} of processor time, {wall} by the clock; at most {target:g}: {held}. {note}", flush=True)

    token, turn = learner(algorithm="ppo"), learner(algorithm="so_ppo")
    found = interleaved({"ppo": lambda: update(token, batch), "so_ppo": lambda: update(turn, batch)}, arguments.rounds)
    compare("so_ppo / ppo", 1.03, "so_ppo", "ppo", found)

    def with_gradient_norm(level: str, within: float, target: float) -> None:
        plain = learner(algorithm="ppo", level=level)
        normed = learner(algorithm="ppo", level=level, normalisation="gradient_norm")
        old = clipped_share(plain, batch, share=arguments.clipped, by=level, within=within)
        share, held = update(plain, batch, old)["clip_fraction"], rows_with_clips(plain, batch, old)
        tasks = {"gradient_norm": lambda: update(normed, batch, old), "none": lambda: update(plain, batch, old)}
        note = f"Clipped: {share:.1%} of the action tokens, by {level}, in {held:.0%} of the sequences."
        found = interleaved(tasks, arguments.rounds)
        compare(f"gradient_norm / none, {level} level", target, "gradient_norm", "none", found, note)

    with_gradient_norm("turn", 1.0, 1.4)
    with_gradient_norm("token", DRIFT, 1.4)
    with_gradient_norm("token", 1.0, 1.5)  # scattered: half as much work again is its bound

    if not arguments.no_trl:
        ours = learner(algorithm="grpo", critic="none")
        theirs = trl_update(arguments.model, items, group_size=group_size, microbatch=arguments.microbatch)
        found = interleaved({"ours": lambda: update(ours, batch), "trl": theirs}, arguments.rounds)
        compare(f"ours (grpo) / TRL {version('trl')} GRPOTrainer", 1.0, "ours", "trl", found)

    if arguments.output:
        about = {"hardware": platform.processor() or platform.machine(), "torch": version("torch"), "threads": 1}
        arguments.output.write_text(json.dumps({"about": about, "tokens": tokens, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
