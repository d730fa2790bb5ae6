"""Supervised warm start on real questions: `python scripts/warm_start.py FILE.jsonl ... --index DIR`.

Splits the questions into train.jsonl and dev.jsonl by a hash of their ids, scores the model as it comes, builds
demonstrations from the training part (rows that name passages: `positive_ids`, `pmid`), imitates them, saves the
model and scores it on the dev part. Everything lies in --run-dir; the same command goes on where an earlier one
stopped, and `train.py smollm2_wiki --model RUN_DIR/model` takes over from there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from console import RichProgress, settle_processor
from train import checked, load_retriever

from sorl_algos.models import resolve_model
from sorl_algos.real_warm_start import WarmStart, WarmStartConfig, check_same, split
from sorl_env.controls import named_passages


@dataclass(frozen=True)
class Arguments:
    questions: tyro.conf.Positional[tuple[Path, ...]]
    """Question files (JSONL); rows with `positive_ids` can become demonstrations."""
    index: Path
    """A built index of the passages that `positive_ids` name."""
    warm: Annotated[WarmStartConfig, tyro.conf.arg(name="")] = field(default_factory=WarmStartConfig)
    threads: int = 0
    """Threads of torch; 0: its own choice."""


def load_questions(paths: tuple[Path, ...]) -> Any:
    """All files as one set; ids must be unique over them."""
    from sorl_env.questions import QuestionSet
    from sorl_env.questions import load_questions as load

    if not paths:
        raise ValueError("no question file given; name JSONL files whose rows have positive_ids")
    for path in paths:
        if not path.is_file():
            raise ValueError(f"question file {path} does not exist; give JSONL files whose rows have positive_ids")
    return QuestionSet(question for path in paths for question in load(path))


def main() -> None:
    settle_processor()
    arguments = checked(lambda: tyro.cli(Arguments, description=__doc__))
    if arguments.threads:
        import torch

        torch.set_num_threads(arguments.threads)
    config = arguments.warm
    questions = checked(lambda: load_questions(arguments.questions))
    retriever = checked(lambda: load_retriever(arguments.index))
    checked(lambda: resolve_model(config.model))
    checked(lambda: check_same(config, {"questions": arguments.questions, "index": arguments.index}))
    train, dev = checked(lambda: split(config, questions))
    try:
        with RichProgress() as progress:
            run = checked(lambda: WarmStart(config, train, dev, retriever, progress, named_passages))
            entries = checked(run.execute)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint")
        raise SystemExit(130) from None
    for entry in entries:
        columns = ("exact_match", "f1", "searches", "answered")
        scores = ", ".join(f"{name} {entry[name]['mean']:.3f}" for name in columns)
        print(f"{entry['name']} ({entry['prompt']} prompt, {entry['n']} dev questions): {scores}")
    print(f"{len(train)} train and {len(dev)} dev questions in {config.run_dir}; model: {run.saved}")


if __name__ == "__main__":
    main()
