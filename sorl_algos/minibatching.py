"""How a rollout batch is cut: minibatches of whole groups, and as many micro-batches on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sorl_algos.batch import Batch
from sorl_algos.config import TrainConfig
from sorl_algos.distributed import agreed_maximum


def minibatches(batch: Batch, config: TrainConfig, update: int, pass_number: int = 0) -> Iterator[Batch]:
    """One pass over this rank's rollout batch in an order that is a function of (seed, update, pass).

    Their number is that of the settings, on every rank and however many episodes were dropped: what is there is
    shared out evenly, whole groups together where a minibatch is made of whole groups. A minibatch that nothing is
    left for is silent.
    """
    number = config.episodes_per_update // config.minibatch_sequences
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + update)
    groups = batch.group_ids.cpu()
    total = int(groups.max()) + 1
    for _ in range(pass_number + 1):
        shuffled = torch.randperm(total, generator=generator)
    order = torch.argsort(shuffled[groups], stable=True)
    if config.minibatch_sequences % config.group_size == 0:
        share = shuffled[groups][order] * number // total
    else:
        share = torch.arange(len(batch)) * number // len(batch)
    for minibatch in range(number):
        rows = order[share == minibatch].to(batch.token_ids.device)
        yield batch.rows(rows) if len(rows) else batch.rows(slice(0, 1)).silent()


def microbatches(minibatch: Batch, config: TrainConfig) -> list[Batch]:
    """This rank's micro-batches, with as many silent ones as ranks with more of them ask for.

    Ranks meet in every forward and backward: one that ran fewer would leave the others waiting.
    """
    micros = minibatch.microbatches(config.microbatch_sequences, config.microbatch_tokens)
    wanting = agreed_maximum(len(micros), minibatch.token_ids.device) - len(micros)
    return [micros[0].rows(slice(0, 1)).silent()] * wanting + micros
