"""Makes the bundled base model (sorl_algos/base_model): tokenizer, pre-training, warm start. Run once, by maintainers
and by `quickstart.sh --from-scratch`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import gymnasium
import torch
import tyro
from console import settle_processor
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import sorl_env  # noqa: F401  registers the environments
from sorl_algos.base import BaseConfig, make_base, record_text
from sorl_algos.models import BASE_MODEL_DIR, save_language_model
from sorl_env.world import unseen_passage_ids, world_passages, world_questions


@dataclass(frozen=True)
class Arguments:
    base: tyro.conf.OmitArgPrefixes[BaseConfig] = field(default_factory=BaseConfig)
    output: Path = BASE_MODEL_DIR
    """Directory of the saved model; it is replaced when the new one is whole."""
    checkpoints: Path = Path("runs/make_base")
    """Pre-training is saved here as it goes and resumed from here."""
    num_envs: int = 256
    top_k: int = 1
    threads: int = 0
    """Threads of torch; 0: its own choice."""


def main(arguments: Arguments) -> None:
    settle_processor()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    began = time.monotonic()
    unseen = unseen_passage_ids()
    passages = [passage for passage in world_passages() if passage.id not in unseen]
    env = gymnasium.make_vec(
        "SearchQA-v0",
        num_envs=arguments.num_envs,
        split="train",
        prompt="short",
        max_searches=arguments.base.max_searches,
        top_k=arguments.top_k,
        max_observation_words=60,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[loss]}")) as progress:
        tasks: dict[str, int] = {}

        def show(stage: str, step: int, steps: int, loss: float) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=steps, loss="")
            progress.update(tasks[stage], completed=step, loss=f"loss {loss:.3f}" if loss else "")

        model, tokenizer, record = make_base(
            arguments.base,
            env,
            list(world_questions("train")),
            passages,
            on_step=show,
            checkpoints=arguments.checkpoints,
        )
    model = model.to(torch.bfloat16)  # half the size; loaded back as fp32
    save_language_model(model, tokenizer, arguments.output)
    seconds = time.monotonic() - began
    (arguments.output / "made.json").write_text(record_text(arguments.base, record, seconds), encoding="utf-8")
    size = sum(file.stat().st_size for file in arguments.output.iterdir()) / 1e6
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"{parameters:.1f} M parameters, {size:.1f} MB, {seconds / 60:.0f} minutes: {arguments.output}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
