"""Fine-tune an encoder into a cross-encoder that re-ranks.

The loss is ListNet's (Cao et al., ICML 2007): cross-entropy between the softmax over a list's scores and
the share of each passage in being right, which with one right passage a list is its log-probability.
Scores are therefore meant for putting passages in order, not for comparison between questions.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retrieval_index.encoder import encoder_spec, model_place, unusable
from retrieval_index.reranker_data import TrainingList
from retrieval_index.staging import SHARDS, check_output, locked, partial_of, prepare, publish, sync, write_atomically
from retrieval_index.types import RetrievalError

TRAINING_FILE = "training.json"
_ONE_HOT = 20.0  # softmax([20, 0, 0, ...]) is 1 for the first to eight decimals


@dataclass(frozen=True, slots=True)
class RerankerSettings:
    """How a cross-encoder is trained.

    Args:
        encoder: what to start from: a name of `ENCODERS`, of the hub, or a directory.
        epochs: passes over the lists.
        steps: updates; None: as many as `epochs` takes.
        batch_lists: lists of an update.
        max_tokens: of a question and a passage together; what is longer is cut.
        learning_rate: highest one; it rises over `warmup_share` of the updates, then falls to 0 in a line.
        warmup_share: from 0 to 1.
        weight_decay: of AdamW.
        frozen_layers: lowest layers that stay as they are, with the embeddings below them; 0: none. Updates
            become cheaper, and there is less that a few thousand questions can spoil.
        seed: of the new scoring layer, the order of the lists and dropout.
        dtype: "float32", or "bfloat16" for the matrix products (weights stay float32); None: bfloat16 on a
            GPU that has it, float32 elsewhere.
        device: "cpu" or "cuda"; None: a GPU where there is one.

    Raises:
        ValueError: a number out of range.
    """

    encoder: str = "minilm"
    epochs: float = 1.0
    steps: int | None = None
    batch_lists: int = 8
    max_tokens: int = 192
    learning_rate: float = 1e-4
    warmup_share: float = 0.1
    weight_decay: float = 0.01
    frozen_layers: int = 0
    seed: int = 0
    dtype: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "learning_rate"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be above 0, got {value}")
        for name, least in (("steps", 1), ("batch_lists", 1), ("max_tokens", 8), ("frozen_layers", 0), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be {least} or more, got {value}")
        if not 0 <= self.warmup_share <= 1 or not 0 <= self.weight_decay < 1:
            raise ValueError(
                f"warmup_share must be from 0 to 1 and weight_decay from 0 to below 1,"
                f" got {self.warmup_share} and {self.weight_decay}"
            )
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"dtype must be float32 or bfloat16, got {self.dtype!r}")
        if self.device not in (None, "cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device!r}")

    def updates(self, lists: int) -> int:
        """Updates that so many lists take."""
        return self.steps or math.ceil(self.epochs * math.ceil(lists / self.batch_lists))


@dataclass(frozen=True, slots=True)
class RerankerResult:
    """A finished training.

    Args:
        path: the model's directory.
        steps: updates made.
        loss: mean over them.
        seconds: of training, without loading and saving.
    """

    path: Path
    steps: int
    loss: float
    seconds: float


def check_model_output(output: str | Path) -> None:
    """Refuse a place for the model that is taken.

    Raises:
        RetrievalError: the directory is there, or ``<output>.partial`` holds something else.
    """
    output = Path(output)
    if output.exists():
        raise RetrievalError(f"{output} is there already; name another directory, or remove it")
    check_output(output)


def train_reranker(
    lists: Sequence[TrainingList],
    output: str | Path,
    settings: RerankerSettings | None = None,
    *,
    notes: dict[str, Any] | None = None,
    progress: bool = False,
) -> RerankerResult:
    """Train, and put the model in its place in one step; an interrupted training leaves nothing in it.

    The directory holds the weights as safetensors and is a `model` for `compose_rerank`.
    `training.json` in it says what it was trained on and how.

    Args:
        notes: written to `training.json` too.
        progress: show a bar and the loss on stderr.

    Raises:
        ValueError: no list.
        RuntimeError: sentence-transformers, accelerate or datasets are not installed.
        RetrievalError: the place is taken, or the encoder cannot be loaded.
    """
    settings, output = settings or RerankerSettings(), Path(output)
    check_model_output(output)
    if not lists:
        raise ValueError("there is no list to train on: no question has both a right and a wrong passage")
    partial = partial_of(output)
    with locked(partial):
        plan = {"settings": asdict(settings), "lists": len(lists), "lists_sha256": _digest(lists), **(notes or {})}
        prepare(partial, plan)
        model = _load(settings)
        started = time.perf_counter()
        steps, loss = _fit(model, lists, settings, partial / SHARDS, progress)
        result = RerankerResult(output, steps, loss, time.perf_counter() - started)
        if not math.isfinite(loss):
            raise RetrievalError(f"the loss became {loss}; lower the learning rate ({settings.learning_rate})")
        model.save_pretrained(str(partial), create_model_card=False)
        told = {**plan, "steps": steps, "loss": loss, "seconds": result.seconds}
        write_atomically(partial / TRAINING_FILE, json.dumps(told, indent=2, sort_keys=True) + "\n")
        for path in partial.rglob("*"):
            if path.is_file():
                sync(path)
        publish(partial, output)
    return result


def step_seconds(lists: Sequence[TrainingList], settings: RerankerSettings) -> float:
    """Time of one update, measured: the second of two, without the optimiser.

    Raises:
        ValueError, RuntimeError, RetrievalError: as `train_reranker`.
    """
    if not lists:
        raise ValueError("there is no list to train on: no question has both a right and a wrong passage")
    import torch

    model = _load(settings)
    loss, rows = _loss(model), lists[: settings.batch_lists]
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        with torch.autocast(model.device.type, torch.bfloat16, enabled=_bfloat16(settings)):
            value = loss([[row.question for row in rows], [row.texts for row in rows]], [_labels(r) for r in rows])
        value.backward()
        seconds = time.perf_counter() - started
    return seconds


def _labels(row: TrainingList) -> Any:
    import torch

    return torch.tensor([_ONE_HOT] + [0.0] * len(row.negatives))


def _fit(
    model: Any, lists: Sequence[TrainingList], settings: RerankerSettings, scratch: Path, progress: bool
) -> tuple[int, float]:
    from datasets import Dataset  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments

    rows = Dataset.from_dict(
        {
            "query": [row.question for row in lists],
            "docs": [row.texts for row in lists],
            "labels": [_labels(row).tolist() for row in lists],
        }
    )
    updates = settings.updates(len(lists))
    trainer = CrossEncoderTrainer(
        model=model,
        args=CrossEncoderTrainingArguments(
            output_dir=str(scratch),
            max_steps=updates,
            per_device_train_batch_size=settings.batch_lists,
            learning_rate=settings.learning_rate,
            warmup_steps=round(settings.warmup_share * updates),
            weight_decay=settings.weight_decay,
            seed=settings.seed,
            bf16=_bfloat16(settings),
            use_cpu=model.device.type == "cpu",
            save_strategy="no",
            report_to="none",
            logging_steps=max(1, updates // 20),
            disable_tqdm=not progress,
            dataloader_pin_memory=False,
        ),
        train_dataset=rows,
        loss=_loss(model),
    )
    done = trainer.train()
    return int(done.global_step), float(done.training_loss)


def _load(settings: RerankerSettings) -> Any:
    try:
        import torch
        from sentence_transformers import CrossEncoder
        from sentence_transformers.cross_encoder import CrossEncoderTrainer  # noqa: F401
        from sentence_transformers.util import is_training_available
    except ImportError as error:
        raise unusable("training a re-ranker", "sentence-transformers", error) from error
    if not is_training_available():
        raise RuntimeError("training a re-ranker needs accelerate and datasets: pip install accelerate datasets")
    torch.manual_seed(settings.seed)  # for the scoring layer, which starts at random
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    place = model_place(encoder_spec(settings.encoder).model)
    try:
        model = CrossEncoder(
            place,
            num_labels=1,
            max_length=settings.max_tokens,
            device=device,
            activation_fn=torch.nn.Identity(),  # a sigmoid would make equals of good passages
            # On a CPU the backward pass of the fused attention takes longer than that of the plain one.
            model_kwargs={"dtype": torch.float32} | ({"attn_implementation": "eager"} if device == "cpu" else {}),
        )
    except (OSError, ValueError) as error:
        raise RetrievalError(f"the encoder {place} cannot be loaded ({error}); check its name, or fetch it") from error
    places = getattr(model.transformers_model.config, "max_position_embeddings", settings.max_tokens)
    if places < settings.max_tokens:
        raise RetrievalError(f"{place} reads {places} tokens at most; lower max_tokens from {settings.max_tokens}")
    _freeze(model.transformers_model.base_model, settings.frozen_layers)
    return model


def _freeze(body: Any, layers: int) -> None:
    import torch

    if layers == 0:
        return
    stack = next((module for module in body.modules() if isinstance(module, torch.nn.ModuleList)), ())
    if layers > len(stack) or not hasattr(body, "embeddings"):
        raise RetrievalError(f"frozen_layers is {layers}, but {type(body).__name__} has {len(stack)} layers to freeze")
    for module in (body.embeddings, *list(stack)[:layers]):
        module.requires_grad_(False)


def _loss(model: Any) -> Any:
    from sentence_transformers.cross_encoder.losses import ListNetLoss

    return ListNetLoss(model, mini_batch_size=-1)  # all pairs of a batch in one pass


def _bfloat16(settings: RerankerSettings) -> bool:
    import torch

    if settings.dtype is None:
        return settings.device != "cpu" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return settings.dtype == "bfloat16"


def _digest(lists: Sequence[TrainingList]) -> str:
    digest = hashlib.sha256()
    for row in lists:
        digest.update(json.dumps([row.question, *row.texts]).encode())
    return digest.hexdigest()
