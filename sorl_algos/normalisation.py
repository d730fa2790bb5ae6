"""The clipping-triggered normalisation as one named step of training, between backward and optimiser.

`losses/clip_norm.py` and `algorithms.py` hold the definitions. This file applies those of scope "minibatch" to an
optimiser step: sums (or gradients of the excess) are added over micro-batches and ranks, and the accumulated policy
gradient is scaled once. The narrower scopes act inside `Algorithm.policy_loss` already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sorl_algos.algorithms import Algorithm, BySums, GradientNorm, GradientRatio, gradient_factor
from sorl_algos.batch import Batch
from sorl_algos.distributed import all_sum, any_rank, world_size
from sorl_algos.losses.policy import LossOutput
from sorl_algos.sharding import gradient_norm, is_split


class ClipNormaliser:
    """Gathers, over the micro-batches of one optimiser step, how much of the update rests on clipped tokens.

    Call `gather` on each micro-batch before its backward and `scale_gradients` once after the last one. At scope
    "microbatch" of a gradient estimator `gather` returns the factor of the micro-batch, for its policy loss.

    Where the weights are split over ranks (FSDP2), gradients exist only after they were summed over all ranks: then
    every rank takes part in each second backward, and a "microbatch" is what all ranks run at one time.

    measure: report the norm of the clipping-bias term C (``excess_norm``) whatever the algorithm.
    of_step: leave the gradient as it is; the caller scales the optimiser's step by the factor.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        parameters: Sequence[nn.Parameter],
        *,
        clip_low: float,
        clip_high: float,
        measure: bool = False,
        of_step: bool = False,
    ) -> None:
        self.algorithm, self.measure, self.of_step = algorithm, measure, of_step
        self.parameters = parameters
        self.split = is_split(parameters)
        self.clip_low, self.clip_high = clip_low, clip_high
        self._sums: Tensor | None = None
        self._excess: list[Tensor] | None = None

    def gather(
        self,
        out: LossOutput,
        logp: Tensor,
        micro: Batch,
        reduced_loss: Tensor,
        reduced_excess: Tensor,
        again: Callable[[Batch], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Adds one micro-batch; ``reduced_loss`` and ``reduced_excess`` are 0-d and still on the graph.

        again: the reduced excess of some rows of the micro-batch, from a forward of their own. Where few rows hold a
        clipped token, that and its backward cost less than a second backward through all of them.
        Returns (factor, rho) of the micro-batch where the scope is "microbatch", None otherwise.
        """
        setting = self.algorithm.normalisation
        by_gradient = setting if isinstance(setting, GradientNorm | GradientRatio) else None
        alone = by_gradient is not None and by_gradient.scope == "microbatch"
        excess = self._excess_gradients(out, micro, reduced_excess, again) if by_gradient or self.measure else []
        if excess and (self.measure or not alone):
            if self._excess is None:
                self._excess = [gradient.clone() for gradient in excess]  # two of them may be one tensor
            else:
                for total, gradient in zip(self._excess, excess, strict=True):
                    total += gradient
        if isinstance(setting, BySums) and not self.algorithm.scales_loss:
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
        if by_gradient is None or not alone:
            return None
        if not excess:
            return logp.new_ones(()), logp.new_zeros(())
        return gradient_factor(by_gradient, gradient_norm(excess), gradient_norm(self._gradients(reduced_loss)))

    def _excess_gradients(
        self, out: LossOutput, micro: Batch, reduced_excess: Tensor, again: Callable[[Batch], Tensor] | None
    ) -> list[Tensor]:
        """Gradient of the micro-batch's excess for each parameter; [] where nothing is clipped, which costs nothing."""
        clipped = (out.clip_excess != 0).any(dim=1)
        if self.split:
            return self._gradients(reduced_excess) if any_rank(bool(clipped.any()), clipped.device) else []
        rows = clipped.nonzero().squeeze(1)
        if not len(rows):
            return []
        # Forward and backward of some rows against a backward of all of them: 3 to 2, by the work of each.
        if again is not None and 3 * len(rows) < 2 * len(micro):
            return self._gradients(again(micro.rows(rows)))
        return self._gradients(reduced_excess)

    def _gradients(self, loss: Tensor) -> list[Tensor]:
        """The loss's gradient of each parameter; where weights are split, this rank's share of the sum over ranks."""
        found: list[Tensor | None]
        if not self.split:
            found = [*torch.autograd.grad(loss, self.parameters, retain_graph=True, allow_unused=True)]
        else:
            # The weights' own hooks do the summing, so it must be a whole backward; .grad is left as it was.
            before = [parameter.grad for parameter in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
            (loss * world_size()).backward(retain_graph=True)  # the hooks average
            found = [parameter.grad for parameter in self.parameters]
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient
        return [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self.parameters, found, strict=True)
        ]

    @torch.no_grad()
    def scale_gradients(self) -> dict[str, Tensor]:
        """Multiplies the accumulated policy gradient by the factor, unless ``of_step``; returns ``factor`` and ``rho``.

        Where it was taken, the norm of C too, as ``excess_norm``.
        """
        setting = self.algorithm.normalisation
        report: dict[str, Tensor] = {}
        by_gradient = isinstance(setting, GradientNorm | GradientRatio) and setting.scope == "minibatch"
        if self.measure or by_gradient:
            excess = self._excess or [torch.zeros_like(parameter) for parameter in self.parameters]
            report["excess_norm"] = gradient_norm(excess if self.split else [all_sum(part) for part in excess])
        if setting is None or setting.scope != "minibatch":
            return report
        if isinstance(setting, BySums):
            if self._sums is None:
                return report
            factor, rho = setting.factor(all_sum(self._sums))
        else:
            clipped_norm = gradient_norm([p.grad for p in self.parameters if p.grad is not None])
            factor, rho = gradient_factor(setting, report["excess_norm"], clipped_norm)
        report |= {"factor": factor, "rho": rho}
        for parameter in () if self.of_step else self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return report
