"""The clipping-triggered normalisation as one named step of training, between backward and optimiser.

`losses/clip_norm.py` and `algorithms.py` hold the definitions. This file applies those of scope "minibatch" to an
optimiser step: sums (or gradients of the excess) are added over micro-batches and ranks, and the accumulated policy
gradient is scaled once. The narrower scopes act inside `Algorithm.policy_loss` already.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sorl_algos.algorithms import Algorithm, CoefficientRatio, gradient_factor
from sorl_algos.batch import Batch
from sorl_algos.distributed import all_sum
from sorl_algos.losses.clip_norm import normalisation_factor
from sorl_algos.losses.policy import LossOutput


class ClipNormaliser:
    """Gathers, over the micro-batches of one optimiser step, how much of the update rests on clipped tokens.

    Call `gather` on each micro-batch before its backward and `scale_gradients` once after the last one. At scope
    "microbatch" of a gradient estimator `gather` returns the factor of the micro-batch, for its policy loss.
    """

    def __init__(
        self, algorithm: Algorithm, parameters: Sequence[nn.Parameter], *, clip_low: float, clip_high: float
    ) -> None:
        self.algorithm = algorithm
        self.parameters = parameters
        self.clip_low, self.clip_high = clip_low, clip_high
        self._sums: Tensor | None = None
        self._excess: list[Tensor] | None = None

    def gather(
        self, out: LossOutput, logp: Tensor, micro: Batch, reduced_loss: Tensor, reduced_excess: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Adds one micro-batch; ``reduced_loss`` and ``reduced_excess`` are 0-d and still on the graph.

        Returns (factor, rho) of the micro-batch where the scope is "microbatch", None otherwise.
        """
        setting = self.algorithm.normalisation
        if setting is None or self.algorithm.scales_loss:
            return None
        if isinstance(setting, CoefficientRatio):
            assert micro.old_logp is not None and micro.advantages is not None
            sums = self.algorithm.trigger_sums(
                logp,
                micro.old_logp,
                micro.advantages,
                micro.loss_mask,
                micro.turn_ids,
                clip_low=self.clip_low,
                clip_high=self.clip_high,
                weights=micro.weights,
            )
            self._sums = sums if self._sums is None else self._sums + sums
            return None
        alone = setting.scope == "microbatch"
        if not bool((out.clip_excess != 0).any()):  # only micro-batches with clipped tokens pay the second backward
            return (logp.new_ones(()), logp.new_zeros(())) if alone else None
        gradients = torch.autograd.grad(reduced_excess, self.parameters, retain_graph=True, allow_unused=True)
        if alone:
            clipped = torch.autograd.grad(reduced_loss, self.parameters, retain_graph=True, allow_unused=True)
            norms = [_norm([x for x in found if x is not None]) for found in (gradients, clipped)]
            return gradient_factor(setting, *norms)
        if self._excess is None:
            self._excess = [torch.zeros_like(parameter) for parameter in self.parameters]
        for total, gradient in zip(self._excess, gradients, strict=True):
            if gradient is not None:
                total += gradient
        return None

    @torch.no_grad()
    def scale_gradients(self) -> dict[str, Tensor]:
        """Multiplies the accumulated policy gradient by the factor; returns ``factor`` and ``rho`` (0-d)."""
        setting = self.algorithm.normalisation
        if setting is None or setting.scope != "minibatch":
            return {}
        if isinstance(setting, CoefficientRatio):
            if self._sums is None:
                return {}
            factor, rho = normalisation_factor(all_sum(self._sums), setting.threshold)
            report = {"factor": factor, "rho": rho}
        else:
            excess = self._excess or [torch.zeros_like(parameter) for parameter in self.parameters]
            excess_norm = _norm([all_sum(gradient) for gradient in excess])
            clipped_norm = _norm([parameter.grad for parameter in self.parameters if parameter.grad is not None])
            factor, rho = gradient_factor(setting, excess_norm, clipped_norm)
            report = {"factor": factor, "rho": rho, "excess_norm": excess_norm}
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return report


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        return torch.zeros(())
    return torch.stack([tensor.float().square().sum() for tensor in tensors]).sum().sqrt()
