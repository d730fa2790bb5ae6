"""Parameters counted from shapes alone are those of the models themselves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from sorl_algos.architectures import ARCHITECTURES, Architecture, find_architecture, read_architecture
from sorl_algos.models import BASE_MODEL_DIR, Critic, ValueHead, make_policy_and_critic


def count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# total_size of each model's safetensors index, which counts 2 bytes a parameter, halved.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen2.5-7B", 15_231_233_024 // 2),
        ("Qwen/Qwen2.5-3B", 6_171_877_376 // 2),
        ("Qwen/Qwen2.5-1.5B", 3_087_428_608 // 2),
        ("Qwen/Qwen2.5-7B-Instruct", 15_231_233_024 // 2),
        ("smollm2", 134_515_008),  # as transformers counts SmolLM2-135M-Instruct
    ],
)
def test_published_models_have_as_many_parameters_as_published(name: str, parameters: int) -> None:
    assert find_architecture(name).parameters == parameters


def test_the_bundled_model_has_as_many_as_its_file() -> None:
    with safe_open(str(BASE_MODEL_DIR / "model.safetensors"), "pt") as file:
        stored = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    assert find_architecture("base").parameters == stored
    assert find_architecture(str(BASE_MODEL_DIR)) == find_architecture("base")


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_part_is_counted_as_transformers_makes_it(kind: str, tied: bool) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "vocab_size": 90}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    config = AutoConfig.for_model(kind, **sizes, **heads, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = read_architecture(config.to_dict())
    assert shape.parameters == count(model)
    assert shape.trunk_parameters == count(model.base_model)
    assert shape.layer_parameters == count(model.model.layers[0])
    assert shape.linear_shapes == {
        name.rpartition(".")[2]: (module.in_features, module.out_features)
        for name, module in model.model.layers[0].named_modules()
        if isinstance(module, torch.nn.Linear)
    }


@pytest.mark.parametrize("targets", ["all-linear", "q_proj, v_proj"])
def test_critics_and_adapters_are_counted(targets: str, make_model: Any) -> None:
    model = make_model()
    shape = read_architecture(model.config.to_dict())
    assert shape.value_head_parameters == count(ValueHead(shape.hidden_size))
    assert shape.trunk_parameters + shape.value_head_parameters == count(Critic(model))
    policy, _ = make_policy_and_critic(model, critic="own", lora_rank=4, lora_targets=targets)
    adapter = shape.adapter_parameters(4, targets)
    assert adapter == sum(parameter.numel() for parameter in policy.policy_parameters())
    assert adapter + shape.value_head_parameters == sum(p.numel() for p in policy.value_parameters())


def test_the_cache_is_keys_and_values_of_every_layer() -> None:
    # 2 (K, V) x 28 layers x 4 heads of 128 x 2 bytes
    assert ARCHITECTURES["Qwen/Qwen2.5-7B"].cache_bytes_per_token(2) == 2 * 28 * 4 * 128 * 2


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"shape of model 'owner/name' is not known .*; known: Qwen/Qwen2.5-7B"):
        find_architecture("owner/name")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ValueError, match=r"config.json is of model type 'mamba'; sizes are known of qwen2, llama only"):
        find_architecture(str(tmp_path))
    with pytest.raises(ValueError, match=r"no linear module is called 'w_q'; known: q_proj"):
        Architecture(8, 1, 1, 1, 8, 8, True).adapter_parameters(1, "w_q")
