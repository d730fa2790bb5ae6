"""Tables of evaluation results. For scripts/evaluate.py and scripts/compare_results.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sorl_algos.evaluation.engines import load_tokenizer
from sorl_algos.evaluation.play import Plan, longest_prompt, renderer_for
from sorl_algos.evaluation.results import write_atomically
from sorl_algos.evaluation.statistics import macro_interval


def _console() -> Console:
    """A terminal has its own width; a file or a pipe gets whole lines."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)


def print_plans(plans: Sequence[Plan], tokenizer: str, output: Path) -> None:
    """What would be played, and what of it is there already."""
    loaded = load_tokenizer(tokenizer)
    table = Table("set", "environment", "questions", "episodes", "data", "retrieval", "prompt", "longest, tokens")
    for plan in plans:
        about, longest = plan.identity, longest_prompt(plan, renderer_for(plan, loaded))[0]
        retrieval = about["retrieval"]
        searched = retrieval.get("index") or retrieval.get("corpus") or {}
        table.add_row(
            plan.name, about["environment"]["id"], str(len(plan.questions)), str(plan.episodes),
            about["data"]["sha256"][:12], f"{retrieval['mode']} {searched.get('version', '')}",
            f"{about['prompt']['name']} {about['prompt']['sha256'][:12]}", str(longest),
        )  # fmt: skip
    console = _console()
    console.print(table)
    tokens = sum(
        plan.episodes * (plan.identity["environment"]["rules"]["max_searches"] + 1) * plan.sampling.max_tokens
        for plan in plans
    )
    there = [plan.name for plan in plans if (output / f"{plan.name}.json").is_file()]
    console.print(f"at most {tokens:,} sampled tokens; results go to {output}")
    console.print((f"there already: {', '.join(there)}; " if there else "") + "nothing was played or written")


def print_results(results: Sequence[dict[str, Any]], output: Path, *, seed: int) -> None:
    """A row for each set, a macro average for each kind of questions that several sets have, and summary.json."""
    table = Table(title="95 % bootstrap intervals over questions")
    for column in ("set", "n", "score", "", "F1", "searches", "valid actions", "answered"):
        table.add_column(column, justify="left" if column in ("set", "score") else "right")
    for result in results:
        scores = result["scores"]
        table.add_row(
            name_of(result), str(result["n"]), result["headline"], with_interval(scores[result["headline"]]),
            f"{scores['f1']['mean']:.3f}" if "f1" in scores else "-", f"{scores['searches']['mean']:.2f}",
            f"{scores['valid_action_rate']['mean']:.3f}", f"{scores['answered']['mean']:.3f}",
        )  # fmt: skip
    macro = {}
    for headline in dict.fromkeys(result["headline"] for result in results):
        same = [result for result in results if result["headline"] == headline]
        if len(same) > 1:
            macro[headline] = macro_interval([result["per_question"][headline] for result in same], seed=seed)
            table.add_section()
            table.add_row("macro average", str(len(same)), headline, with_interval(macro[headline]))
    console = _console()
    console.print(table)
    for result in results:
        stops = ", ".join(f"{name} {count}" for name, count in result["stops"].items())
        console.print(f"{name_of(result)}: {stops}", markup=False)
    summary = {
        "sets": {name_of(one): {"n": one["n"], **one["scores"], "stops": one["stops"]} for one in results},
        "macro_average": macro,
    }
    write_atomically(output / "summary.json", json.dumps(summary, indent=1) + "\n")
    print(f"results: {output}")


def name_of(result: dict[str, Any]) -> str:
    """Set and control."""
    identity = result["identity"]
    mode = identity["retrieval"]["mode"]
    return identity["data"]["name"] + ("" if mode == "index" or result["headline"] == "math_equal" else f" ({mode})")


def with_interval(score: dict[str, float]) -> str:
    return f"{score['mean']:.3f} ({score['low']:.3f} to {score['high']:.3f})"


def print_comparison(found: dict[str, Any], first: str, second: str) -> None:
    """What differs between two results, and a row for each score."""
    console = _console()
    for name, was, now in found["differs"]:
        console.print(f"{name}: {_short(was)} | {_short(now)}", markup=False)
    table = Table(title=f"{found['n']} questions in common; B - A with its 95 % interval")
    columns = ("score", f"A: {first}", f"B: {second}", "difference", "p (bootstrap)", "only A", "only B", "p (McNemar)")
    for column in columns:
        table.add_column(column, justify="left" if column == "score" else "right")
    for name, score in found["scores"].items():
        exact = ["-"] * 3
        if "mcnemar" in score:
            exact = [str(score["only_first"]), str(score["only_second"]), _p(score["mcnemar"])]
        difference = score["difference"]
        means = (f"{score['first']:.3f}", f"{score['second']:.3f}", with_interval(difference), _p(difference["p"]))
        table.add_row(name, *means, *exact)
    console.print(table)
    if any(found["left_out"]):
        console.print(f"left out: {found['left_out'][0]} questions of A and {found['left_out'][1]} of B")


def _p(value: float) -> str:
    return f"{value:.4f}" if value >= 0.0001 else f"{value:.0e}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
