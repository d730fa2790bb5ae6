"""Shapes of language models and the numbers that follow from them, without a model or a library being loaded.

Parameters are counted as transformers' Qwen2 and Llama classes have them: tables of words, and layers of two norms,
four attention matrices and three of the gated feed-forward part; Qwen2 has a bias on queries, keys and values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BASE_CONFIG = Path(__file__).parent / "base_model" / "config.json"
MODEL_TYPES = ("qwen2", "llama")


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a decoder; ``tied``: the output head is the table of words; ``bias``: on queries, keys and values."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int
    vocabulary: int
    tied: bool
    bias: bool = True
    head_size: int = 0
    """0: hidden_size / heads."""

    @property
    def query_size(self) -> int:
        return self.heads * (self.head_size or self.hidden_size // self.heads)

    @property
    def key_size(self) -> int:
        return self.kv_heads * (self.head_size or self.hidden_size // self.heads)

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear modules of a layer."""
        hidden, query, key, inner = self.hidden_size, self.query_size, self.key_size, self.intermediate_size
        return {
            "q_proj": (hidden, query), "k_proj": (hidden, key), "v_proj": (hidden, key), "o_proj": (query, hidden),
            "gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden),
        }  # fmt: skip

    @property
    def layer_parameters(self) -> int:
        matrices = sum(inputs * outputs for inputs, outputs in self.linear_shapes.values())
        biases = self.query_size + 2 * self.key_size if self.bias else 0
        return matrices + biases + 2 * self.hidden_size

    @property
    def table_parameters(self) -> int:
        """Of the table of words, and of the output head where that is a matrix of its own."""
        return self.vocabulary * self.hidden_size

    @property
    def trunk_parameters(self) -> int:
        """All but an output head of its own: what a critic copies."""
        return self.table_parameters + self.layers * self.layer_parameters + self.hidden_size

    @property
    def parameters(self) -> int:
        return self.trunk_parameters + (0 if self.tied else self.table_parameters)

    @property
    def value_head_parameters(self) -> int:
        """Of `models.ValueHead`: H x H and H x 1, with biases."""
        return self.hidden_size * (self.hidden_size + 1) + self.hidden_size + 1

    def adapter_parameters(self, rank: int, targets: str) -> int:
        """Of one low-rank adapter (arXiv 2106.09685): rank x (inputs + outputs) for every module that has one.

        Raises:
            ValueError: a name that no linear module has.
        """
        known = self.linear_shapes
        names = list(known) if targets == "all-linear" else [name.strip() for name in targets.split(",")]
        if wrong := [name for name in names if name not in known]:
            raise ValueError(f"no linear module is called {wrong[0]!r}; known: {', '.join(known)}, all-linear")
        return self.layers * rank * sum(sum(known[name]) for name in names)

    def cache_bytes_per_token(self, width: int) -> int:
        """Keys and values of one token in all layers, ``width`` bytes a number."""
        return 2 * self.layers * self.key_size * width


def _qwen2(hidden: int, layers: int, heads: int, kv: int, inner: int, vocabulary: int, tied: bool) -> Architecture:
    return Architecture(hidden, layers, heads, kv, inner, vocabulary, tied)


# As the config.json of each model says.
ARCHITECTURES: dict[str, Architecture] = {
    "Qwen/Qwen2.5-7B": _qwen2(3584, 28, 28, 4, 18944, 152064, tied=False),
    "Qwen/Qwen2.5-3B": _qwen2(2048, 36, 16, 2, 11008, 151936, tied=True),
    "Qwen/Qwen2.5-1.5B": _qwen2(1536, 28, 12, 2, 8960, 151936, tied=True),
    "Qwen/Qwen2.5-0.5B": _qwen2(896, 24, 14, 2, 4864, 151936, tied=True),
    "smollm2": Architecture(576, 30, 9, 3, 1536, 49152, tied=True, bias=False),
}


def read_architecture(config: Mapping[str, Any], name: str = "config.json") -> Architecture:
    """From what a model's config.json holds.

    Raises:
        ValueError: a kind of model whose parameters are not counted here.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"{name} is of model type {kind!r}; sizes are known of {', '.join(MODEL_TYPES)} only")
    return Architecture(
        hidden_size=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        intermediate_size=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        bias=kind == "qwen2",
        head_size=config.get("head_dim") or 0,
    )


def find_architecture(model: str) -> Architecture:
    """Of "base", "smollm2", a directory, or a hub name of the table (its -Instruct variant too). Nothing is fetched.

    Raises:
        ValueError: the shape is not known; says what would make it known.
    """
    if (known := ARCHITECTURES.get(model.removesuffix("-Instruct"))) is not None:
        return known
    path = _BASE_CONFIG if model == "base" else Path(model).expanduser() / "config.json"
    if not path.is_file():
        raise ValueError(
            f"the shape of model {model!r} is not known without fetching it; known: {', '.join(ARCHITECTURES)}, "
            "or give a directory with its config.json"
        )
    return read_architecture(json.loads(path.read_text(encoding="utf-8")), str(path))
