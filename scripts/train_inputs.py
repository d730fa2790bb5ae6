"""What a run reads before torch is loaded: its questions, its index, the sets it is scored on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sorl_algos.config import TrainConfig


def load_questions(spec: str, env: str = "SearchQA-v0") -> Any:
    """The questions of ``world:SPLIT`` and the like, or of a file."""
    from sorl_env.bundled import open_questions

    return open_questions(spec, kind="math" if env == "MathQA-v0" else None)


def load_retriever(index: Path | None) -> Any:
    """The opened index; None where the environment brings its own passages.

    Each of several processes encodes queries on the GPU it trains on; by default all would take the first.
    """
    if index is None:
        return None
    from retrieval_index import open_index

    if "LOCAL_RANK" not in os.environ:
        return open_index(index)
    import torch

    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else None
    return open_index(index, encoder_device=device)


def eval_sets(config: TrainConfig, limit: int) -> list[Any]:
    """What is scored before and after: the held-out sets of the bundled questions, or the dev file."""
    from sorl_algos.run import EvalSet
    from sorl_env.bundled import held_out

    if not limit:
        return []
    splits = held_out(config.eval_questions)
    if not splits:
        return [EvalSet("dev", load_questions(config.eval_questions, config.env).sample_by_hash(limit))]
    sets = [EvalSet(split, questions.sample_by_hash(limit)) for split, questions in splits.items()]
    return sets + ([EvalSet("test_empty_index", sets[0].questions, empty_index=True)] if config.max_searches else [])
