"""KL estimators per token (Schulman 2020, "Approximating KL divergence"), and the adaptive coefficient.

Tokens are samples of the policy and d = logp - ref_logp, so each estimates KL(policy || reference).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sorl_algos.losses.segments import LOG_RATIO_BOUND, masked


def _difference(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    return masked(logp, mask) - masked(ref_logp, mask).detach()


def k1(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """d per token (B, T): unbiased, of either sign; the form for KL in the reward. 0 off the mask."""
    return _difference(logp, ref_logp, mask)


def k2(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """d^2 / 2 per token (B, T): biased, not negative; as a loss its gradient is the KL's. 0 off the mask."""
    return 0.5 * _difference(logp, ref_logp, mask).square()


def k3(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """exp(-d) - 1 + d per token (B, T): unbiased, not negative; GRPO's loss term. 0 off the mask.

    d is kept within +-20 (as in the ratios), so that one far token cannot overflow.
    """
    d = _difference(logp, ref_logp, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(-d) + d


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_per_token(logp: Tensor, ref_logp: Tensor, mask: Tensor, *, estimator: str) -> Tensor:
    """KL estimate by name ("k1", "k2" or "k3"): (B, T). Raises ValueError for another name."""
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"unknown KL estimator {estimator!r}; known: {', '.join(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[estimator](logp, ref_logp, mask)


def adapted_coefficient(coefficient: float, observed_kl: float, *, target: float, horizon: float, seen: float) -> float:
    """Next KL coefficient by proportional control (Ziegler et al., arXiv 1909.08593, section 2.2).

    coefficient * (1 + clip(observed / target - 1, -0.2, 0.2) * seen / horizon), where `seen` counts the
    episodes since the last change and `horizon` is in episodes too. Raises ValueError when target or horizon
    is not positive.
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"adaptive KL needs a positive target and horizon, got {target} and {horizon}")
    error = min(max(observed_kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * seen / horizon)
