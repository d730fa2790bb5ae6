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
from sorl_algos.distributed import all_sum, any_rank, world_size
from sorl_algos.losses.clip_norm import normalisation_factor
from sorl_algos.losses.policy import LossOutput
from sorl_algos.sharding import gradient_norm, is_split


class ClipNormaliser:
    """Gathers, over the micro-batches of one optimiser step, how much of the update rests on clipped tokens.

    Call `gather` on each micro-batch before its backward and `scale_gradients` once after the last one. At scope
    "microbatch" of a gradient estimator `gather` returns the factor of the micro-batch, for its policy loss.

    Where the weights are split over ranks (FSDP2), gradients exist only after they were summed over all ranks: then
    every rank takes part in each second backward, and a "microbatch" is what all ranks run at one time.
    """

    def __init__(
        self, algorithm: Algorithm, parameters: Sequence[nn.Parameter], *, clip_low: float, clip_high: float
    ) -> None:
        self.algorithm = algorithm
        self.parameters = parameters
        self.split = is_split(parameters)
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
        clipped = bool((out.clip_excess != 0).any())
        if self.split:
            clipped = any_rank(clipped, logp.device)
        if not clipped:  # only micro-batches with clipped tokens pay the second backward
            return (logp.new_ones(()), logp.new_zeros(())) if alone else None
        gradients = self._gradients(reduced_excess)
        if alone:
            norms = [gradient_norm(found) for found in (gradients, self._gradients(reduced_loss))]
            return gradient_factor(setting, *norms)
        if self._excess is None:
            self._excess = [gradient.clone() for gradient in gradients]  # two of them may be one tensor
        else:
            for total, gradient in zip(self._excess, gradients, strict=True):
                total += gradient
        return None

    def _gradients(self, loss: Tensor) -> list[Tensor]:
        """The loss's gradient of each parameter; where weights are split, this rank's share of the sum over ranks."""
        if not self.split:
            found = torch.autograd.grad(loss, self.parameters, retain_graph=True, allow_unused=True)
        else:
            # The weights' own hooks do the summing, so it must be a whole backward; .grad is left as it was.
            before = [parameter.grad for parameter in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
            (loss * world_size()).backward(retain_graph=True)  # the hooks average
            found = tuple(parameter.grad for parameter in self.parameters)
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient
        return [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self.parameters, found, strict=True)
        ]

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
            excess_norm = gradient_norm(excess if self.split else [all_sum(gradient) for gradient in excess])
            clipped_norm = gradient_norm([p.grad for p in self.parameters if p.grad is not None])
            factor, rho = gradient_factor(setting, excess_norm, clipped_norm)
            report = {"factor": factor, "rho": rho, "excess_norm": excess_norm}
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return report
