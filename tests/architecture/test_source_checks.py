"""The checks of this folder can fail: each is shown a bad snippet that it must find, and a good one."""

from __future__ import annotations

import pytest

from tests.architecture.source_checks import Import, Table, bad_habits, find_cycles, find_imports

KNOWN = {"sorl_env", "sorl_env.actions", "sorl_env.vector", "sorl_algos", "sorl_algos.batch"}
TABLE = Table(
    own={
        "sorl_env/": ("retrieval_index.types",),
        "sorl_algos/": ("sorl_env.actions",),
        "sorl_algos/losses/": (),
        "sorl_algos/advantages.py": ("sorl_algos.losses",),
    },
    light={"sorl_env/": ("numpy",), "sorl_algos/": ("torch", "numpy"), "sorl_algos/losses/": ("torch",),
           "sorl_algos/advantages.py": ("torch",)},
    named={"vllm": ("sorl_algos/rollout/vllm.py",), "rich": ("sorl_env/", "sorl_algos/")},
    sealed=("sorl_algos/losses/",),
)  # fmt: skip


def modules(source: str, path: str = "sorl_algos/batch.py") -> set[str]:
    return {found.module for found in find_imports(source, path, KNOWN)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.nn as nn", {"torch.nn"}),
        ("from sorl_env import vector", {"sorl_env.vector"}),
        ("from sorl_env import vector, Thing", {"sorl_env.vector", "sorl_env"}),
        ("def f():\n    import vllm", {"vllm"}),
        ("class A:\n    def f(self):\n        from ray import put", {"ray"}),
        ("try:\n    import faiss\nexcept ImportError:\n    faiss = None", {"faiss"}),
        ("import importlib\nimportlib.import_module('sorl_env.vector')", {"importlib", "sorl_env.vector"}),
        ("__import__('vllm')", {"vllm"}),
        ("HOME = {'a': 'sorl_env.vector'}", {"sorl_env.vector"}),
        ("register(entry_point='sorl_env.vector:SearchQAVectorEnv')", {"sorl_env.vector"}),
        ("gym.make('sorl_env:SearchQA-v0')", set()),  # the environments' public door
        ("'''Text about sorl_env.vector.'''", set()),
    ],
)
def test_imports_are_found_wherever_they_hide(source: str, expected: set[str]) -> None:
    assert modules(source) == expected


def test_relative_imports_are_resolved() -> None:
    assert modules("from . import batch", "sorl_algos/trainer.py") == {"sorl_algos.batch"}
    assert modules("from ..batch import Batch", "sorl_algos/rollout/hf.py") == {"sorl_algos.batch"}
    assert modules("from .kl import k1", "sorl_algos/losses/__init__.py") == {"sorl_algos.losses.kl"}


def test_imports_for_the_type_checker_alone_are_marked() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vllm\nelse:\n    import ray"
    marked = {found.module: found.typing_only for found in find_imports(source, "sorl_algos/batch.py")}
    assert marked == {"typing": False, "vllm": True, "ray": False}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("sorl_env/episode.py", "import torch"),
        ("sorl_env/episode.py", "from retrieval_index.bm25 import BM25Index"),
        ("sorl_env/episode.py", "from retrieval_index import Passage"),
        ("sorl_env/episode.py", "import sorl_algos.batch"),
        ("sorl_algos/batch.py", "import retrieval_index.types"),
        ("sorl_algos/batch.py", "import_module('sorl_env.rewards')"),
        ("sorl_algos/batch.py", "TABLE = ['sorl_env.rewards:exact_match']"),
        ("sorl_algos/batch.py", "from scripts import presets"),
        ("sorl_algos/batch.py", "def late():\n    import vllm"),
        ("sorl_algos/batch.py", "import never_heard_of"),
        ("sorl_algos/losses/kl.py", "from sorl_algos.batch import Batch"),
        ("sorl_algos/losses/kl.py", "import numpy"),
        ("sorl_algos/losses/kl.py", "import rich"),
        ("sorl_algos/advantages.py", "from sorl_algos.batch import Batch"),
    ],
)
def test_table_refuses(path: str, source: str) -> None:
    assert len(list(TABLE.violations(path, find_imports(source, path, KNOWN)))) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("sorl_env/episode.py", "import json, numpy\nfrom retrieval_index.types import Hit"),
        ("sorl_env/episode.py", "def show():\n    import rich"),
        ("sorl_algos/batch.py", "import torch.nn\nfrom sorl_env.actions import parse"),
        ("sorl_algos/rollout/vllm.py", "import vllm"),
        ("sorl_algos/losses/kl.py", "from sorl_algos.losses.segments import segment_mean\nimport torch"),
        ("sorl_algos/advantages.py", "from sorl_algos.losses.segments import segment_mean"),
    ],
)
def test_table_allows(path: str, source: str) -> None:
    assert list(TABLE.violations(path, find_imports(source, path, KNOWN))) == []


def test_a_file_outside_the_table_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no rule covers somewhere/else\.py"):
        list(TABLE.violations("somewhere/else.py", [Import("torch", 1)]))


def test_cycles_are_found() -> None:
    assert find_cycles({"a": ["b"], "b": ["c"], "c": ["b"]}) == [["b", "c", "b"]]
    assert find_cycles({"a": ["b", "c"], "b": ["c"], "c": []}) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from dill import loads",
        "torch.load('a.pt')",
        "torch.load('a.pt', weights_only=False)",
        "numpy.load('a.npy', allow_pickle=True)",
        "eval('1')",
        "exec(text)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "try:\n    f()\nexcept:\n    g()",
        "# TO" + "DO later",
        "raise NotImplemented" + "Error",
    ],
)
def test_bad_habits_are_found(source: str) -> None:
    assert len(list(bad_habits(source, "sorl_env/episode.py"))) == 1


@pytest.mark.parametrize(
    "source",
    ["model.eval()", "torch.load('a.pt', weights_only=True)", "numpy.load('a.npy')", "connection.exec_sql()"],
)
def test_good_habits_pass(source: str) -> None:
    assert list(bad_habits(source, "sorl_env/episode.py")) == []
