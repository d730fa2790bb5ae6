"""What `dry_run` prints."""

from __future__ import annotations

import dataclasses
import shlex

from dry_run import DryRun, check_inputs, hardware_of, index_sizes, missing

from sorl_algos.architectures import find_architecture
from sorl_algos.budget import GB, Budget, Hardware, estimate, ranks_of
from sorl_algos.config import TrainConfig


def dry_run(config: TrainConfig, asked: DryRun, arguments: list[str]) -> None:
    """Prints all of it and writes nothing.

    Raises:
        ValueError: bad input, or a run that does not fit the memory.
    """
    questions = check_inputs(config)
    for field in dataclasses.fields(config):
        print(f"{field.name:24} {getattr(config, field.name)}")
    hardware = hardware_of(asked)
    main_bytes, gpu_bytes, index = index_sizes(config.index, on_gpu=not hardware.processor)
    hardware = dataclasses.replace(hardware, index_bytes=main_bytes if hardware.processor else gpu_bytes)
    try:
        shape = find_architecture(config.model)
    except ValueError as error:
        shape, budget = None, None
        print(f"\nmemory: not estimated: {error}")
    else:
        budget = estimate(config, shape, hardware)
        print_memory(budget, hardware)
        if not hardware.processor:
            print(f"main memory: {budget.host_bytes / GB:.0f} GB at most, while {hardware.gpus} GPUs' models load")
    print(f"index: {index}; {main_bytes / GB:.1f} GB in main memory, mapped; {gpu_bytes / GB:.1f} GB a GPU")
    print_work(config)
    for line in missing(config, shape):
        print(f"to fetch: {line}")
    print(f"start: {launch_command(config, hardware, arguments)}")
    if budget is not None and not budget.fits:
        raise ValueError(f"{asked.preset} {budget.refusal()}")
    print_steps(config, questions)


def print_memory(budget: Budget, hardware: Hardware) -> None:
    """A row for each item, a column for each phase, in GB."""
    place = "this machine (no GPU)" if hardware.processor else f"each of {hardware.gpus} GPUs"
    print(f"\nmemory of {place}, GB of {hardware.gpu_bytes / GB:.1f}; docs/scaling.md says how it is reckoned")
    phases = budget.phases
    print(f"{'':32}" + "".join(f"{phase:>10}" for phase in phases))
    for item in budget.items:
        cells = "".join(f"{item.bytes / GB:10.2f}" if phase in item.phases else f"{'':10}" for phase in phases)
        print(f"{item.name:32}{cells}" + (f"  {item.note}" if item.note else ""))
    print(f"{'total':32}" + "".join(f"{budget.total(phase) / GB:10.2f}" for phase in phases))
    share = budget.peak_bytes / budget.gpu_bytes
    print(f"{'peak':32}{budget.peak_bytes / GB:10.2f}  ({budget.peak_phase}; {share:.0%} of the memory)")


def print_work(config: TrainConfig) -> None:
    """Tokens of an update, at most."""
    episodes, turns = config.episodes_per_update, config.max_searches + 1
    sampled = min(turns * config.max_turn_tokens, config.max_total_tokens)
    print(
        f"tokens per update: at most {episodes * config.max_total_tokens:,}, of which at most {episodes * sampled:,} "
        f"sampled ({turns} turns of {config.max_turn_tokens}); {config.optimiser_steps_per_update} optimiser steps, "
        f"each of {config.minibatch_sequences} episodes"
    )


def print_steps(config: TrainConfig, questions: int) -> None:
    steps = config.updates * config.optimiser_steps_per_update
    size = f"{config.updates} updates of {config.episodes_per_update} episodes, {steps} optimiser steps"
    known = f"{questions} questions; " if questions else ""
    print(f"\n{known}{size}; nothing was trained or written")


def launch_command(config: TrainConfig, hardware: Hardware, arguments: list[str]) -> str:
    """As it is typed: one process, or one for each rank."""
    words = shlex.join(arguments)
    ranks = 1 if hardware.processor else ranks_of(config, hardware.gpus)
    if ranks == 1:
        return f"python scripts/train.py {words}"
    return f"torchrun --nproc-per-node {ranks} scripts/train.py {words}"
