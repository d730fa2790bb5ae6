"""`train.py PRESET --dry-run`: settings, memory on each GPU, work of an update, what would be fetched, how to start."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from train_inputs import load_questions, load_retriever

from sorl_algos.architectures import Architecture
from sorl_algos.budget import GB, Hardware
from sorl_algos.config import TrainConfig
from sorl_algos.hardware_presets import RECIPE_OF, SOURCES, gpus_of

DEFAULT_GPU_GB = 80.0


@dataclass(frozen=True)
class DryRun:
    """What was asked beside the settings; None: as the preset's name or the machine has it."""

    preset: str
    gpus: int | None = None
    gpu_memory_gb: float | None = None


def take_options(arguments: list[str]) -> tuple[list[str], DryRun | None]:
    """The arguments without --dry-run, --gpus N and --gpu-memory-gb GB, and what these say.

    Raises:
        ValueError: a number that is none, or these two without --dry-run.
    """
    dry, given, rest = "--dry-run" in arguments, {}, []
    words = iter([word.replace("_", "-") if word.startswith("--gpu") else word for word in arguments])
    for word in words:
        name, equals, value = word.partition("=")
        if name in ("--gpus", "--gpu-memory-gb"):
            value = value if equals else next(words, "")
            try:
                given[name] = int(value) if name == "--gpus" else float(value)
            except ValueError:
                raise ValueError(f"{name} takes a number, not {value!r}") from None
            if not given[name] > 0:
                raise ValueError(f"{name} is {value}; it must be greater than 0")
        elif word != "--dry-run":
            rest.append(word)
    if given and not dry:
        raise ValueError(f"{next(iter(given))} says for which GPUs --dry-run adds up the memory; give --dry-run too")
    if not dry:
        return rest, None
    preset = rest[0] if rest else ""
    gpus = given.get("--gpus")
    return rest, DryRun(preset, None if gpus is None else int(gpus), given.get("--gpu-memory-gb"))


def hardware_of(asked: DryRun) -> Hardware:
    """What was asked for, what the preset is made for, or what this machine has: GPUs, else its main memory."""
    import torch

    found = torch.cuda.device_count()
    gpus = asked.gpus or gpus_of(asked.preset) or int(os.environ.get("WORLD_SIZE", 0)) or found
    if not gpus and asked.gpu_memory_gb is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Hardware(1, memory, processor=True)
    detected = torch.cuda.get_device_properties(0).total_memory / GB if found else DEFAULT_GPU_GB
    return Hardware(gpus or 1, (asked.gpu_memory_gb or detected) * GB)


def index_sizes(path: Path | None, *, on_gpu: bool) -> tuple[float, float, str]:
    """Bytes of the index in main memory (mapped, one copy for all ranks) and on a GPU, and what it is.

    Of an index that is there the manifest says it, else the estimate of its recipe.
    """
    if path is None or not ((path / "manifest.json").is_file() or str(path) in RECIPE_OF):
        return 0.0, 0.0, "bundled passages" if path is None else f"{path}, not there"
    from retrieval_index.dense_plan import DenseParameters, settle, vector_bytes
    from retrieval_index.manifest import read_manifest
    from retrieval_index.recipes import ENCODER_SIZES, RECIPES, estimate_recipe

    faiss_gpu = on_gpu and any(found.name.lower().startswith("faiss-gpu") for found in distributions())
    if (path / "manifest.json").is_file():
        manifest = read_manifest(path)
        size, kind, passages = sum(file.bytes for file in manifest.files), manifest.kind, manifest.passages
        settings = DenseParameters(**manifest.parameters["index"]) if kind == "dense" else None
        encoder = manifest.parameters["encoder"] if kind == "dense" else {}
        name, dimension = "", int(encoder.get("dimension", 768))
        text = f"{path}: {kind}, {passages:,} passages"
    else:
        recipe = RECIPES[RECIPE_OF[str(path)]]
        size, kind, passages, name = estimate_recipe(recipe).index_bytes, recipe.kind, recipe.passages, recipe.encoder
        dimension = ENCODER_SIZES[name][1] if kind == "dense" else 0
        settings = settle(DenseParameters(), passages, dimension) if kind == "dense" else None
        text = f"{path} (recipe {RECIPE_OF[str(path)]}): {kind}, {passages:,} passages"
    if settings is None or not on_gpu:
        return size, 0.0, text
    # The encoder in bfloat16 or float32 with its table of words, and a batch of queries.
    encoder_bytes = 4e6 * (ENCODER_SIZES.get(name, (110, 768))[0] + 0.031 * dimension) + 0.5 * GB
    vectors = passages * vector_bytes(settings, dimension) if faiss_gpu and settings.index_type != "hnsw" else 0
    return size, encoder_bytes + vectors, text


def missing(config: TrainConfig, shape: Architecture | None) -> list[str]:
    """A line for everything that is not on this machine and can be fetched or made."""
    lines = []
    if shape is not None and "/" in config.model and not Path(config.model).is_dir():
        lines.append(f"model {config.model}: {shape.parameters * 2 / GB:.1f} GB from the hub, unless in its cache")
    for name in dict.fromkeys((config.questions, config.eval_questions)):
        if (source := SOURCES.get(name)) is not None and not Path(name).exists():
            lines.append(f"{name}: {source.what}, about {source.bytes / 1e6:.0f} MB: python {source.command}")
    if config.index is not None and not config.index.exists() and str(config.index) in RECIPE_OF:
        from retrieval_index.recipes import RECIPES, estimate_recipe

        name = RECIPE_OF[str(config.index)]
        recipe, made = RECIPES[name], estimate_recipe(RECIPES[name])
        text = recipe.passages * recipe.text_bytes / GB
        lines.append(
            f"{config.index}: corpus {recipe.source} ({text:.1f} GB of text), index {made.index_bytes / GB:.1f} GB"
            f"{f', encoder {recipe.encoder}' if recipe.encoder else ''}: "
            f"python scripts/build_index.py {name} --output {config.index}"
        )
    return lines


def check_inputs(config: TrainConfig) -> int:
    """Opens what is there as a run would, and returns the number of questions (0: still to be fetched).

    Raises what a run would raise, except for things that `missing` lists.
    """
    from sorl_algos.run import make_environment

    there = [name not in SOURCES or Path(name).exists() for name in (config.questions, config.eval_questions)]
    questions = load_questions(config.questions, config.env) if there[0] else None
    if there[1]:
        load_questions(config.eval_questions, config.env)
    absent = config.index is not None and str(config.index) in RECIPE_OF and not config.index.exists()
    retriever = None if absent else load_retriever(config.index)
    if questions is not None and not absent:
        make_environment(config, questions, retriever, 1)
    return 0 if questions is None else len(questions)
