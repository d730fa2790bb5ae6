"""Settings shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# one thread a process: the suite must not fight with itself for the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("quick", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# Words of the small games that tests play; the tokenizer below is trained on them.
GAME_TEXTS = [
    "Question: What is the capital of Peru?\n",
    "Doc 1(Title: Peru) The capital of Peru is Lima. Doc 2(Title: Chile) The capital of Chile is Santiago.",
    " Lima capital of Peru Santiago Chile Quito Ecuador red green blue north south",
]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Our own byte-level BPE tokenizer, of about 330 tokens."""
    from sorl_algos.tiny import train_tokenizer

    return train_tokenizer(GAME_TEXTS * 4, 360)


@pytest.fixture(scope="session")
def make_model(tokenizer: Any) -> Callable[..., Any]:
    """Makes a Qwen2 of two layers over `tokenizer`'s vocabulary, in milliseconds."""
    import torch

    from sorl_algos.tiny import tiny_language_model

    torch.set_num_threads(1)

    def make(seed: int = 0, *, hidden_size: int = 32, layers: int = 2, dtype: Any = torch.float32) -> Any:
        model = tiny_language_model(
            len(tokenizer),
            hidden_size=hidden_size,
            layers=layers,
            heads=4,
            intermediate_size=2 * hidden_size,
            seed=seed,
            pad_id=tokenizer.pad_token_id,
            end_id=tokenizer.eos_token_id,
        )
        return model.to(dtype).eval()

    return make
