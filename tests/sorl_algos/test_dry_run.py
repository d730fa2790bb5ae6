"""`train.py PRESET --dry-run`: what it prints, and what it refuses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """scripts/train.py as a module, with its neighbours in reach."""
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("train")
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture
def report(script: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a command line prints, its error and its exit status, in a folder without data or indexes."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[str, str, int]:
        code = 0
        try:
            config, dry = script.checked(lambda: script.parse([*arguments, "--dry-run"]))
            script.checked(lambda: script.dry_run(config, dry, list(arguments)))
        except SystemExit as end:
            code = int(end.code or 0)
        written = capsys.readouterr()
        assert list(tmp_path.iterdir()) == []
        return written.out, written.err, code

    return run


def row(text: str, name: str) -> list[str]:
    [found] = [line for line in text.splitlines() if line.startswith(name)]
    return found.removeprefix(name).split()


def test_a_preset_of_eight_gpus_is_shown_whole(report: Any) -> None:
    out, err, code = report("qwen2.5-7b-nq-so_ppo-8gpu", "--gpu-memory-gb", "80")
    assert (err, code) == ("", 0)
    assert "memory of each of 8 GPUs, GB of 80.0" in out
    # 7.616 G parameters x 8 bytes over 8 ranks
    assert row(out, "policy: optimiser") == ["7.62", "7.62", "7.62"]
    for name in ("policy: gradients", "critic: weights", "reference", "vLLM: KV cache", "logits and head", "total"):
        assert row(out, name)
    assert "without checkpointing" in out and "in chunks; all at once" in out
    assert "index: indexes/wiki18-e5 (recipe wiki18-e5): dense, 21,015,324 passages" in out
    assert "tokens per update: at most 2,353,152" in out  # 512 x 4,596
    for fetched in (
        "model Qwen/Qwen2.5-7B: 15.2 GB", "data/nq_hotpotqa_train.jsonl: 169,615 questions", "PeterJinGo/wiki-18-corpus"
    ):  # fmt: skip
        assert f"to fetch: {fetched}" in out or fetched in out
    assert "start: torchrun --nproc-per-node 8 scripts/train.py qwen2.5-7b-nq-so_ppo-8gpu" in out
    assert "500 updates of 512 episodes, 1000 optimiser steps; nothing was trained or written" in out


def test_half_as_many_processes_where_vllm_has_gpus_of_its_own(report: Any) -> None:
    out, _, code = report("qwen2.5-3b-med-grpo-4gpu-split", "--gpu-memory-gb", "80")
    assert code == 0 and "torchrun --nproc-per-node 2 scripts/train.py" in out and "engine" in out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["qwen2.5-7b-nq-so_ppo-8gpu", "--gpu-memory-gb", "60"], ["does not fit: 6", "(backward), there are 60.0 GB"]),
        (["qwen2.5-7b-nq-ppo-1gpu", "--lora-rank", "0"], ["policy: optimiser with 60.9", "--lora-rank"]),
        (["qwen2.5-7b-nq-ppo-8gpu", "--engine-memory-share", "0.1"], ["keys and values of one sequence", "above 0.22"]),
        (["qwen2.5-7b-nq-ppo-8gpu", "--gpus", "3"], ["questions_per_update (512) cannot be shared by 3 ranks"]),
        (["qwen2.5-7b-nq-ppo-8gpu", "--gpus", "many"], ["--gpus takes a number, not 'many'"]),
        (["qwen2.5-7b-nq-ppo-8gpu", "--gpu-memory-gb=0"], ["--gpu-memory-gb is 0; it must be greater than 0"]),
        (["qwen2.5-7b-nq-ppo-8gpu", "--questions", "x.jsonl"], ["question file x.jsonl does not exist"]),
        (["qwen2.5-7b-nq-ppo-2gpu"], ["unknown preset", "MODEL-TASK-ALGORITHM-Ngpu[-split]"]),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_status_2(arguments: list[str], parts: list[str], report: Any) -> None:
    if not any(argument.startswith("--gpu-memory") for argument in arguments):
        arguments = [*arguments, "--gpu-memory-gb", "80"]
    _, err, code = report(*arguments)
    [line] = err.splitlines()
    assert code == 2 and line.startswith("error: ")
    assert all(part in line for part in parts), line


def test_a_small_preset_is_reckoned_for_this_machine(report: Any) -> None:
    out, err, code = report("quickstart", "--index", "None")
    assert (err, code) == ("", 0)
    assert "memory of " in out and row(out, "policy: weights")[0] == "0.01"  # 2.6 M x 4 bytes
    assert "python scripts/train.py quickstart --index None" in out


def test_a_model_of_unknown_shape_is_said_to_be_unknown(report: Any) -> None:
    out, err, code = report("quickstart", "--index", "None", "--model", "owner/name")
    assert (err, code) == ("", 0) and "memory: not estimated: the shape of model 'owner/name' is not known" in out


def test_gpus_are_asked_about_in_a_dry_run_only(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.checked(lambda: script.parse(["quickstart", "--gpus", "2"]))
    assert "give --dry-run too" in capsys.readouterr().err


def test_every_name_is_a_preset_with_help(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("qwen2.5-1.5b-med-so_grpo-4gpu", "qwen2.5-7b-nq-ppo-8gpu-split"):
        assert script.parse([name, "--lr", "3e-6"])[0].lr == 3e-6
        with pytest.raises(SystemExit) as end:
            script.checked(lambda name=name: script.parse([name, "--help"]))
        assert end.value.code == 0 and "--engine-gpus" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        script.checked(lambda: script.parse(["--help"]))
    assert end.value.code == 0 and "MODEL-TASK-ALGORITHM-Ngpu" in capsys.readouterr().out


def test_the_size_of_an_index_that_is_there_comes_from_its_manifest(script: Any, tmp_path: Path) -> None:
    from retrieval_index.manifest import FileRecord, Manifest

    sizes = importlib.import_module("dry_run").index_sizes
    files = (FileRecord("index.faiss", 3_000_000_000, ""), FileRecord("passages.bin", 2_000_000_000, ""))
    dense = {"index": {"index_type": "flat"}, "encoder": {"dimension": 768}}
    for kind, parameters in (("bm25", {}), ("dense", dense)):
        manifest = Manifest(kind, 1_000_000, parameters, corpus=(), files=files)
        (tmp_path / "manifest.json").write_text(manifest.as_json())
        main_bytes, gpu_bytes, text = sizes(tmp_path, on_gpu=True)
        assert main_bytes == 5e9 and f"{kind}, 1,000,000 passages" in text
        # an encoder of queries (110 M parameters and its table of words, float32) and half a GB to work in
        assert gpu_bytes == (0 if kind == "bm25" else pytest.approx(4 * (110e6 + 0.031e6 * 768) + 0.5e9))
        assert sizes(tmp_path, on_gpu=False)[1] == 0
