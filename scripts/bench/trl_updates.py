"""One update of TRL's GRPOTrainer on given episodes, without its generation: what `bench_update.py` compares with.

Of the trainer's own code run its log-probabilities (old ones and those with gradient), its loss with its metrics,
and its optimiser; its loop around them (accumulation, gradient clipping, step) is that of transformers' Trainer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sorl_algos.models import load_language_model
from sorl_env.trajectory import Trajectory

PAD = 0


def trl_tensors(items: Sequence[Trajectory]) -> dict[str, Tensor]:
    """Episodes as GRPOTrainer holds them: prompts padded on the left, all that follows on the right.

    What the environment said after the prompt is completion with a tool mask of 0.
    """
    prompts = [list(item.turns[0].observation_ids) for item in items]
    completions, tools = [], []
    for item in items:
        ids: list[int] = []
        sampled: list[int] = []
        for number, turn in enumerate(item.turns):
            seen = turn.observation_ids if number else ()
            ids += [*seen, *turn.action_ids]
            sampled += [0] * len(seen) + [1] * len(turn.action_ids)
        completions.append(ids)
        tools.append(sampled)

    def padded(rows: list[list[int]], *, left: bool = False) -> Tensor:
        width = max(map(len, rows))
        return torch.tensor([[PAD] * (width - len(r)) + r if left else r + [PAD] * (width - len(r)) for r in rows])

    return {
        "prompt_ids": padded(prompts, left=True),
        "prompt_mask": padded([[1] * len(row) for row in prompts], left=True),
        "completion_ids": padded(completions),
        "completion_mask": padded([[1] * len(row) for row in completions]),
        "tool_mask": padded(tools),
    }


def trl_update(model_name: str, items: Sequence[Trajectory], *, group_size: int, microbatch: int) -> Callable[[], Any]:
    """A function that makes one update of two optimiser steps, as `bench.updates.update` does; returns the loss."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    steps = len(items) // 2 // microbatch
    language_model, tokenizer = load_language_model(model_name)
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="bench_update_trl_"),
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=steps,
        steps_per_generation=2 * steps,
        num_generations=group_size,
        learning_rate=1e-9,
        beta=0.0,
        loss_type="grpo",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=language_model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a question"] * len(items)}),
        processing_class=tokenizer,
    )
    model, optimizer = trainer.model, trainer.create_optimizer()
    model.train()
    trainer.current_gradient_accumulation_steps = steps
    tensors = trl_tensors(items)
    rewards = torch.tensor([sum(turn.reward for turn in item.turns) for item in items])

    def update() -> Any:
        whole = dict(tensors)
        ids = torch.cat([whole["prompt_ids"], whole["completion_ids"]], dim=1)
        mask = torch.cat([whole["prompt_mask"], whole["completion_mask"]], dim=1)
        with torch.no_grad():
            whole["old_per_token_logps"] = trainer._get_per_token_logps_and_entropies(
                model, ids, mask, whole["completion_ids"].shape[1], microbatch
            )[0]
        groups = rewards.view(-1, group_size)
        centred = groups - groups.mean(dim=1, keepdim=True)
        whole["advantages"] = (centred / (groups.std(dim=1, keepdim=True) + 1e-4)).flatten()
        total = torch.zeros(())
        for start in range(0, len(items), microbatch):
            piece = {name: tensor[start : start + microbatch] for name, tensor in whole.items()}
            piece["num_items_in_batch"] = (whole["completion_mask"] * whole["tool_mask"]).sum()
            loss = trainer.compute_loss(model, piece)
            trainer.accelerator.backward(loss)
            total = total + loss.detach()
            if (start // microbatch + 1) % steps == 0:
                trainer.accelerator.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
                optimizer.step()
                model.zero_grad()
        return total

    return update
