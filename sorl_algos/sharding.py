"""Weights that are split over ranks (FSDP2): splitting a module, whole tensors out of it and back, norms over it.

accelerate makes the process group and, under data parallelism, places the modules. It knows FSDP2 on accelerators
only, so the splitting is done here with the function that it calls itself, `torch.distributed.fsdp.fully_shard`: one
path for CPU and GPU. Every function here takes ordinary tensors too and then does nothing special.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from sorl_algos.distributed import all_sum, rank, world_size


def shard(module: nn.Module, *, device: torch.device, compute_dtype: torch.dtype | None = None) -> nn.Module:
    """Splits the module's weights over all ranks, in place, and returns it.

    Each layer of the language model inside it is gathered when it runs and dropped again; what is left (embeddings,
    heads) is gathered while the module's own ``forward`` runs, so nothing in it may be called from outside. Its
    weights must be the same on every rank.

    Args:
        compute_dtype: layers are gathered and run in it; gradients are summed over ranks in float32.
    """
    mesh = init_device_mesh(device.type, (world_size(),))
    precision = MixedPrecisionPolicy()
    if compute_dtype is not None:
        precision = MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False)
    module.to(device)
    names = layer_class_names(module)
    for layer in [item for item in module.modules() if type(item).__name__ in names]:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    # Split again after the forward as every layer is: outside of it all weights are then this rank's share.
    fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    return module


def layer_class_names(module: nn.Module) -> set[str]:
    """Class names of the repeated layers of the transformers models inside a module."""
    return {name for item in module.modules() for name in getattr(item, "_no_split_modules", None) or ()}


def is_split(tensors: Sequence[Tensor]) -> bool:
    """Whether each rank holds a share of them only."""
    return bool(tensors) and isinstance(tensors[0], DTensor)


def whole(tensor: Tensor) -> Tensor:
    """The tensor gathered from all ranks. Every rank must ask, for the same tensors in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def split_like(full: Tensor, like: Tensor) -> Tensor:
    """This rank's share of a whole tensor that every rank has, laid out as ``like``; no communication."""
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norm over all gradients, and over all ranks where they are split (0-d, at least float32)."""
    own = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    if not own:
        return torch.zeros(())
    squares = [(g if g.dtype == torch.float64 else g.float()).square().sum() for g in own]
    total = torch.stack(squares).sum()
    return (all_sum(total) if is_split(gradients) else total).sqrt()


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scales the gradients down to ``max_norm`` together and returns their norm before (0-d)."""
    return whole(nn.utils.clip_grad_norm_(parameters, max_norm))


def stored(tensor: Tensor) -> Tensor:
    """The whole tensor on the CPU of rank 0, for a file; empty elsewhere. Every rank must ask, as for `whole`."""
    full = whole(tensor.detach())
    return full.contiguous().cpu() if rank() == 0 else full.new_empty(0, device="cpu")


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's ``state_dict`` with its tensors `stored`: one after the other, never all on the device."""
    state = optimizer.state_dict()
    entries = {
        number: {name: stored(value) if isinstance(value, Tensor) else value for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {"state": entries, "param_groups": state["param_groups"]}


def split_optimizer_state(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A ``state_dict`` of whole tensors, split as the optimizer's parameters are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    entries = {
        number: {
            name: split_like(value, parameters[number])
            if isinstance(value, Tensor) and value.shape == parameters[number].shape
            else value
            for name, value in values.items()
        }
        for number, values in state["state"].items()
    }
    return {"state": entries, "param_groups": state["param_groups"]}
