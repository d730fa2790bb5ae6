"""Low-rank adapters (peft) on a frozen base: policy, critic and reference share one set of large weights.

The adapters live inside the language model, in float32. Which one acts is chosen for each forward; with none, the
model is the base itself, which is the reference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sorl_algos.checkpoint import write_directory
from sorl_algos.distributed import agreed_maximum, rank
from sorl_algos.sharding import stored, whole

POLICY, CRITIC = "policy", "critic"


class Adapters:
    """Puts adapters into a language model and says which of them acts. The base is frozen.

    Args:
        rank, alpha: the weight of a module becomes W + alpha / rank B A, with A ``(rank, in)`` and B ``(out, rank)``;
            B starts at zero.
        targets: "all-linear" (every linear module but the output head), or names of modules with commas in between.
        critic: a second adapter, for values.

    Raises:
        ValueError: peft is not installed, or no module has one of the names.
    """

    def __init__(self, language_model: Any, *, rank: int, alpha: float, targets: str, critic: bool = False) -> None:
        try:
            from peft import LoraConfig, inject_adapter_in_model
            from peft.tuners.lora import LoraLayer
        except ImportError as error:
            raise ValueError("low-rank adapters need peft; pip install -c constraints.txt 'sorl[lora]'") from error
        language_model.requires_grad_(False)
        chosen = targets if targets == "all-linear" else [name.strip() for name in targets.split(",")]
        for name in (POLICY, CRITIC) if critic else (POLICY,):
            setting = LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen, lora_dropout=0.0, bias="none")
            inject_adapter_in_model(setting, language_model, name)
            del language_model.peft_config  # which would say that the model is not its own any more
        self._layers: list[Any] = [module for module in language_model.modules() if isinstance(module, LoraLayer)]
        head = language_model.get_output_embeddings()
        if head in self._layers or any(POLICY not in layer.lora_A for layer in self._layers):
            raise ValueError(
                f"lora_targets {targets!r} names the output head or an embedding, whose weights are read directly; "
                "adapters go into linear modules inside the layers"
            )
        self.acting: str | None = POLICY
        for name, parameter in language_model.named_parameters():
            if ".lora_" in name:
                parameter.requires_grad_(True)
                parameter.data = parameter.data.float()
        self.choose(POLICY)

    def parameters(self, name: str) -> list[nn.Parameter]:
        """The weights of one adapter."""
        return [
            parameter
            for layer in self._layers
            for part in (layer.lora_A, layer.lora_B)
            if name in part
            for parameter in part[name].parameters()
        ]

    def use(self, name: str | None) -> Use:
        """Within, the named adapter acts; None: the base alone."""
        return Use(self, name)

    def choose(self, name: str | None) -> None:
        """From now on the named adapter acts; None: the base alone."""
        # peft's own switches also turn requires_grad on and off, in the midst of a graph that is being built.
        self.acting = name
        for layer in self._layers:
            layer._disable_adapters = name is None
            layer._active_adapter = [name or POLICY]


class Use:
    """A context in which one adapter acts. It may be entered again and again (layers run anew in each backward)."""

    def __init__(self, adapters: Adapters, name: str | None) -> None:
        self.adapters, self.name = adapters, name
        self._before: list[str | None] = []

    def __enter__(self) -> None:
        self._before.append(self.adapters.acting)
        self.adapters.choose(self.name)

    def __exit__(self, *_: object) -> None:
        self.adapters.choose(self._before.pop())


def merged_weights(language_model: Any) -> Iterator[tuple[str, Tensor]]:
    """Names of the base model and whole weights, the policy's adapter added to those that have one."""
    modules = dict(language_model.named_modules())
    for name, parameter in language_model.named_parameters():
        if ".lora_" in name:
            continue
        weight = whole(parameter.detach())
        if name.endswith(".base_layer.weight"):
            layer = modules[name.removesuffix(".base_layer.weight")]
            down, up = (whole(part[POLICY].weight.detach()) for part in (layer.lora_A, layer.lora_B))
            change = layer.scaling[POLICY] * (up @ down)
            weight = (weight + (change.T if layer.fan_in_fan_out else change)).to(weight.dtype)
        yield name.replace(".base_layer.", "."), weight


def save_adapter(language_model: Any, directory: Path, *, name: str = POLICY) -> Path:
    """Writes one adapter as PEFT saves it, for `PeftModel.from_pretrained`, vLLM or any other program that reads these.

    The directory appears by a rename when it is whole, in place of an older one. Every rank must call it (weights may
    be split); rank 0 writes, and all return when it is there.

    Returns:
        The directory.

    Raises:
        ValueError: the model has no adapter of that name.
    """
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

    layers: dict[str, Any] = {
        path: layer
        for path, layer in language_model.named_modules()
        if isinstance(layer, LoraLayer) and name in layer.lora_A
    }
    if not layers:
        raise ValueError(f"the model has no adapter {name!r} to write to {directory}")
    tensors = {
        f"base_model.model.{path}.{part}.weight": stored(getattr(layer, part)[name].weight)
        for path, layer in layers.items()
        for part in ("lora_A", "lora_B")
    }
    first = next(iter(layers.values()))
    if rank() == 0:
        setting = LoraConfig(
            r=first.r[name],
            lora_alpha=first.lora_alpha[name],
            target_modules=list(layers),  # whole paths: no module but these can be meant
            fan_in_fan_out=first.fan_in_fan_out,
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=language_model.config.name_or_path,
            inference_mode=True,
        )
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in setting.to_dict().items()}
        texts = {"adapter_config": json.dumps(plain, indent=1, sort_keys=True)}
        write_directory(directory, {"adapter_model": tensors}, texts)
    agreed_maximum(0, first.lora_A[name].weight.device)  # wait until it is there
    return directory
