"""The table of algorithms: each is a row that names an advantage estimator, a ratio level and so on.

`algorithm("so_ppo", level="sequence")` gives a row with columns overridden. The methods of a row take tensors
and numbers only; what the names stand for is in the tables `ADVANTAGES`, `losses.policy` and `losses.reduce`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict, cast

import torch
from torch import Tensor

from sorl_algos.advantages import gae, group_advantages, leave_one_out, reward_to_go, spread, turn_gae
from sorl_algos.losses.clip_norm import (
    clip_sums_per_sequence,
    ess_factor,
    ess_sums_per_sequence,
    factor_of,
    normalisation_factor,
)
from sorl_algos.losses.policy import LossOutput, cispo, clipped_surrogate, reinforce
from sorl_algos.losses.reduce import REDUCTIONS, Counts
from sorl_algos.losses.segments import RATIO_LEVELS, Pooling, RatioLevel, level_ratio, masked

Scope = Literal["minibatch", "microbatch", "sequence"]
AdvantageName = Literal[
    "gae", "turn_gae", "group", "group_unscaled", "leave_one_out", "reward_to_go", "search_r1_legacy"
]
LossName = Literal["clipped", "cispo", "reinforce"]


def _check(what: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}; known: {', '.join(known)}")


def _check_threshold(threshold: float) -> None:
    if not threshold > 0:
        raise ValueError(f"the threshold of a normalisation must be positive, got {threshold}")


def _check_gradient_scope(scope: str) -> None:
    _check("scope", scope, ("minibatch", "microbatch", "sequence"))
    if scope == "sequence":
        raise ValueError(
            "a gradient norm per sequence needs one backward pass per sequence: "
            "use scope 'microbatch' with micro-batches of one sequence"
        )


@dataclass(frozen=True, slots=True)
class CoefficientRatio:
    """rho from the coefficients w A of clipped and other tokens (the public development code's estimator).

    level: ratio level of the trigger. scope: over which tokens one rho and factor are taken; "minibatch" is
    applied by the trainer to the accumulated gradient, the other two to the per-token loss.
    """

    threshold: float = 3.0
    level: RatioLevel = "token"
    scope: Scope = "minibatch"

    def __post_init__(self) -> None:
        _check_threshold(self.threshold)
        _check("trigger level", self.level, RATIO_LEVELS)
        _check("scope", self.scope, ("minibatch", "microbatch", "sequence"))

    def sums(self, ratio: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
        """(B, 4), additive over rows, micro-batches and ranks; inputs (B, T)."""
        return clip_sums_per_sequence(ratio, advantages, mask, clip_low=clip_low, clip_high=clip_high)

    def factor(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """(factor, rho), each (...), from sums (..., 4)."""
        return normalisation_factor(sums, self.threshold)


@dataclass(frozen=True, slots=True)
class EffectiveSampleSize:
    """rho = N sum w^2 / (sum w)^2: by how much the ratios' spread cuts the number of samples. Ours, not the paper's.

    It needs no clip range, sees a few huge ratios that lie among many clipped ones, and leaves the advantages out.
    """

    threshold: float = 1.1
    level: RatioLevel = "token"
    scope: Scope = "minibatch"

    def __post_init__(self) -> None:
        _check_threshold(self.threshold)
        _check("trigger level", self.level, RATIO_LEVELS)
        _check("scope", self.scope, ("minibatch", "microbatch", "sequence"))

    def sums(self, ratio: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
        """(B, 3), additive over rows, micro-batches and ranks; inputs (B, T), of which the advantages count not."""
        return ess_sums_per_sequence(ratio, mask)

    def factor(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """(factor, rho), each (...), from sums (..., 3)."""
        return ess_factor(sums, self.threshold)


@dataclass(frozen=True, slots=True)
class GradientNorm:
    """rho = L2 norm of the clipping-bias term C over the policy's parameters: the paper, read literally."""

    threshold: float = 1.0
    scope: Scope = "minibatch"

    def __post_init__(self) -> None:
        _check_threshold(self.threshold)
        _check_gradient_scope(self.scope)

    def rho(self, excess_norm: Tensor, clipped_norm: Tensor) -> Tensor:
        """From the norms of C and of the clipped gradient, 0-d."""
        return excess_norm


@dataclass(frozen=True, slots=True)
class GradientRatio:
    """rho = L2 norm of C / L2 norm of the clipped gradient: the same idea without a unit."""

    threshold: float = 1.0
    scope: Scope = "minibatch"

    def __post_init__(self) -> None:
        _check_threshold(self.threshold)
        _check_gradient_scope(self.scope)

    def rho(self, excess_norm: Tensor, clipped_norm: Tensor) -> Tensor:
        """From the norms of C and of the clipped gradient, 0-d; 0 where C is 0."""
        tiny = torch.finfo(excess_norm.dtype).tiny
        return torch.where(excess_norm > 0, excess_norm / clipped_norm.clamp(min=tiny), 0.0)


BySums = CoefficientRatio | EffectiveSampleSize
"""Those that are triggered by sums over tokens, not by gradients."""
Normalisation = BySums | GradientNorm | GradientRatio
NORMALISATIONS: dict[str, type[Normalisation]] = {
    "coefficient_ratio": CoefficientRatio,
    "effective_sample_size": EffectiveSampleSize,
    "gradient_norm": GradientNorm,
    "gradient_ratio": GradientRatio,
}


class _RatioOptions(TypedDict):
    level: RatioLevel
    pooling: Pooling


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row. Every field is checked at construction (ValueError that names the field and the known values).

    advantages, level, normalisation, reduction: the columns of the table; None = no normalisation.
    loss: "clipped", "cispo" or "reinforce". pooling: how a segment's log-ratios combine. dual_clip: bound c
    of the dual clip, None = off. norm_length: tokens, the constant of `sequence_mean_token_sum_norm`.
    """

    advantages: AdvantageName
    level: RatioLevel
    normalisation: Normalisation | None
    reduction: str
    loss: LossName = "clipped"
    pooling: Pooling = "mean"
    dual_clip: float | None = None
    norm_length: float = 1024.0

    def __post_init__(self) -> None:
        _check("advantages", self.advantages, tuple(ADVANTAGES))
        _check("level", self.level, RATIO_LEVELS)
        _check("reduction", self.reduction, tuple(REDUCTIONS))
        _check("loss", self.loss, ("clipped", "cispo", "reinforce"))
        _check("pooling", self.pooling, ("mean", "sum"))
        if self.dual_clip is not None and self.loss != "clipped":
            raise ValueError(f"dual_clip bounds the clipped surrogate; loss {self.loss!r} has no use for it")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip must be above 1, got {self.dual_clip}")
        if not self.norm_length > 0:
            raise ValueError(f"norm_length must be a positive number of tokens, got {self.norm_length}")

    @property
    def needs_critic(self) -> bool:
        """Whether the advantages read the critic's values."""
        return self.advantages in ("gae", "turn_gae", "search_r1_legacy")

    @property
    def group_based(self) -> bool:
        """Whether the advantages compare the episodes of one question, so that groups need at least 2."""
        return self.advantages in ("group", "group_unscaled", "leave_one_out")

    @property
    def scope(self) -> Scope | None:
        """Scope of the normalisation, None without one."""
        return None if self.normalisation is None else self.normalisation.scope

    @property
    def scales_loss(self) -> bool:
        """Whether `policy_loss` itself applies the factor; otherwise the trainer scales the gradient."""
        return isinstance(self.normalisation, BySums) and self.normalisation.scope != "minibatch"

    def estimate_advantages(
        self,
        *,
        rewards: Tensor,
        values: Tensor | None,
        mask: Tensor,
        turn_ids: Tensor,
        group_ids: Tensor | None,
        gamma: float,
        lam: float,
    ) -> tuple[Tensor, Tensor | None]:
        """Advantages (B, T), and the critic's targets (B, T) where there is a critic; not whitened.

        rewards, values, mask, turn_ids: (B, T); group_ids: (B,). Raises ValueError where an input that the
        estimator reads is None.
        """
        if self.needs_critic and values is None:
            raise ValueError(f"advantages {self.advantages!r} need the critic's values, and there are none")
        if self.group_based and group_ids is None:
            raise ValueError(f"advantages {self.advantages!r} compare the episodes of a group, and group_ids is None")
        estimator = ADVANTAGES[self.advantages]
        return estimator(
            rewards=rewards,
            values=values,
            mask=mask,
            turn_ids=turn_ids,
            group_ids=group_ids,
            gamma=gamma,
            lam=lam,
        )

    def policy_loss(
        self,
        logp: Tensor,
        old_logp: Tensor,
        advantages: Tensor,
        mask: Tensor,
        turn_ids: Tensor,
        *,
        clip_low: float,
        clip_high: float,
        weights: Tensor | None = None,
    ) -> LossOutput:
        """The row's per-token loss, all tensors (B, T).

        weights: not negative, without gradient, those of a correction: they multiply loss and excess of each
        token, and a token of weight 0 does not enter the normalisation.
        With a normalisation by sums at scope "sequence" or "microbatch" the loss and its excess are already
        scaled by the factor, and the metrics gain `sum_factor` and `factors` (divide one by the other) and
        `max_rho`.
        """
        # min(w A, clip(w) A) and the other losses are homogeneous in A: a weight may multiply the advantage
        advantages = advantages if weights is None else masked(advantages, mask) * weights
        tensors = (logp, old_logp, advantages, mask, turn_ids)
        common: _RatioOptions = {"level": self.level, "pooling": self.pooling}
        if self.loss == "clipped":
            out = clipped_surrogate(
                *tensors, clip_low=clip_low, clip_high=clip_high, dual_clip=self.dual_clip, **common
            )
        elif self.loss == "cispo":
            out = cispo(*tensors, clip_low=clip_low, clip_high=clip_high, **common)
        else:
            out = reinforce(*tensors, **common)
        if not self.scales_loss:
            return out
        counted = mask if weights is None else weights > 0
        sums = self._trigger(*tensors, counted, clip_low, clip_high)
        return _scaled(out, sums, mask, cast(BySums, self.normalisation))

    def trigger_sums(
        self,
        logp: Tensor,
        old_logp: Tensor,
        advantages: Tensor,
        mask: Tensor,
        turn_ids: Tensor,
        *,
        clip_low: float,
        clip_high: float,
        weights: Tensor | None = None,
    ) -> Tensor:
        """The normalisation's sums (K,) at the trigger's ratio level: add them over micro-batches and ranks, then
        take `normalisation.factor(sums)`. For a normalisation by sums only (ValueError otherwise).
        """
        counted = mask
        if weights is not None:
            advantages, counted = masked(advantages, mask) * weights, weights > 0
        return self._trigger(logp, old_logp, advantages, mask, turn_ids, counted, clip_low, clip_high).sum(dim=0)

    def reduce(self, per_token: Tensor, mask: Tensor, turn_ids: Tensor, counts: Counts) -> Tensor:
        """The row's reduction over global counts, a scalar."""
        return REDUCTIONS[self.reduction](per_token, mask, turn_ids, counts, norm_length=self.norm_length)

    @torch.no_grad()
    def _trigger(
        self,
        logp: Tensor,
        old_logp: Tensor,
        advantages: Tensor,
        mask: Tensor,
        turn_ids: Tensor,
        counted: Tensor,
        clip_low: float,
        clip_high: float,
    ) -> Tensor:
        """Ratios over the segments of ``mask``, sums (B, K) over the tokens that ``counted`` holds."""
        if not isinstance(self.normalisation, BySums):
            raise ValueError("only coefficient_ratio and effective_sample_size are triggered by sums over tokens")
        ratio = level_ratio(logp, old_logp, mask, turn_ids, self.normalisation.level, self.pooling)
        return self.normalisation.sums(ratio, advantages, counted, clip_low=clip_low, clip_high=clip_high)


# the same two steps as functions of a row
advantages_of = Algorithm.estimate_advantages
policy_loss = Algorithm.policy_loss


def _gae(*, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, **_: Any) -> tuple[Tensor, Tensor]:
    return gae(rewards, values, mask, gamma=gamma, lam=lam)


def _search_r1_legacy(
    *, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, **_: Any
) -> tuple[Tensor, Tensor]:
    return gae(rewards, values, mask, gamma=gamma, lam=lam, cross_observations=True)


def _turn_gae(
    *, rewards: Tensor, values: Tensor, mask: Tensor, turn_ids: Tensor, gamma: float, lam: float, **_: Any
) -> tuple[Tensor, Tensor]:
    return turn_gae(rewards, values, mask, turn_ids, gamma=gamma, lam=lam)


def _per_episode(baseline: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """An estimator that compares whole episodes: return = sum of the episode's rewards, undiscounted."""

    def estimate(*, rewards: Tensor, mask: Tensor, group_ids: Tensor, **_: Any) -> tuple[Tensor, None]:
        played = mask.to(torch.bool).any(dim=1)  # an episode without action tokens is no member of its group
        returns = masked(rewards, mask).sum(dim=1)
        advantages = torch.zeros_like(returns)
        advantages[played] = baseline(returns[played], group_ids[played])
        return spread(advantages, mask), None

    return estimate


def _reward_to_go(*, rewards: Tensor, mask: Tensor, gamma: float, **_: Any) -> tuple[Tensor, None]:
    return reward_to_go(rewards, mask, gamma=gamma), None


ADVANTAGES: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "gae": _gae,
    "turn_gae": _turn_gae,
    "group": _per_episode(lambda returns, ids: group_advantages(returns, ids, scale="std")),
    "group_unscaled": _per_episode(lambda returns, ids: group_advantages(returns, ids, scale="none")),
    "leave_one_out": _per_episode(leave_one_out),
    "reward_to_go": _reward_to_go,
    "search_r1_legacy": _search_r1_legacy,
}


def _scaled(out: LossOutput, sums: Tensor, mask: Tensor, normalisation: BySums) -> LossOutput:
    """Multiply a loss by the factor of each sequence, or by the one factor of the micro-batch."""
    if normalisation.scope == "microbatch":
        sums = sums.sum(dim=0, keepdim=True)
    factor, rho = normalisation.factor(sums)  # (B,) or (1,)
    counted = (sums != 0).any(dim=1)  # rows without action tokens have no factor to speak of
    metrics = {
        "sum_factor": torch.where(counted, factor, 0.0).sum(),
        "factors": counted.sum(),
        "max_rho": rho.amax() if rho.numel() else rho.sum(),
    }
    scale = factor.unsqueeze(1)
    on = mask.to(torch.bool)
    return LossOutput(
        per_token=torch.where(on, out.per_token * scale, 0.0),
        clip_excess=torch.where(on, out.clip_excess * scale, 0.0),
        ratio=out.ratio,
        metrics=out.metrics | metrics,
    )


def gradient_factor(
    normalisation: GradientNorm | GradientRatio, excess_norm: Tensor, clipped_norm: Tensor
) -> tuple[Tensor, Tensor]:
    """(factor, rho) of a gradient estimator from the L2 norms of C and of the clipped gradient, all 0-d."""
    rho = normalisation.rho(excess_norm, clipped_norm)
    return factor_of(rho, normalisation.threshold), rho


_PER_SEQUENCE = CoefficientRatio(scope="sequence")

ALGORITHMS: dict[str, Algorithm] = {
    # name                  advantages        level       normalisation       reduction
    "ppo": Algorithm("gae", "token", None, "token_mean"),
    "turn_ppo": Algorithm("gae", "turn", None, "token_mean"),
    "s_ppo": Algorithm("gae", "token", CoefficientRatio(), "token_mean"),
    "so_ppo": Algorithm("gae", "turn", CoefficientRatio(), "token_mean"),
    "grpo": Algorithm("group", "token", None, "sequence_mean_token_mean"),
    "s_grpo": Algorithm("group", "token", _PER_SEQUENCE, "sequence_mean_token_mean"),
    "so_grpo": Algorithm("group", "turn", _PER_SEQUENCE, "token_mean"),
    "gspo": Algorithm("group", "sequence", None, "sequence_mean_token_mean"),
    "rloo": Algorithm("leave_one_out", "token", None, "sequence_mean_token_sum"),
    "dr_grpo": Algorithm("group_unscaled", "token", None, "sequence_mean_token_sum_norm"),
    "cispo": Algorithm("group", "token", None, "token_mean", loss="cispo"),
    "reinforce": Algorithm("reward_to_go", "token", None, "sequence_mean_token_sum", loss="reinforce"),
}
ALIASES = {"st_ppo": "so_ppo"}

_NORMALISATION_OVERRIDES = {"threshold": "threshold", "scope": "scope", "trigger_level": "level"}


def algorithm(name: str, **overrides: Any) -> Algorithm:
    """Row `name` of the table with columns overridden.

    overrides: any field of `Algorithm`; `normalisation` also by name ("none", "coefficient_ratio",
    "gradient_norm", "gradient_ratio"); and `threshold`, `scope`, `trigger_level` of the normalisation. Raises
    ValueError that lists what is known for an unknown name, column or value, or for a setting of a
    normalisation that is not there.
    """
    try:
        row = ALGORITHMS[ALIASES.get(name, name)]
    except KeyError:
        known = ", ".join(sorted([*ALGORITHMS, *ALIASES]))
        raise ValueError(f"unknown algorithm {name!r}; known: {known}") from None
    columns = [field.name for field in fields(Algorithm)]
    unknown = [key for key in overrides if key not in columns and key not in _NORMALISATION_OVERRIDES]
    if unknown:
        known = ", ".join([*columns, *_NORMALISATION_OVERRIDES])
        raise ValueError(f"algorithm {name!r} has no column {unknown[0]!r}; known: {known}")
    settings = {_NORMALISATION_OVERRIDES[key]: overrides.pop(key) for key in [*overrides] if key not in columns}
    normalisation = overrides.pop("normalisation", row.normalisation)
    if isinstance(normalisation, str):
        normalisation = _normalisation_named(normalisation)
    if settings:
        normalisation = _with_settings(normalisation, settings)
    return replace(row, normalisation=normalisation, **overrides)


def _normalisation_named(name: str) -> Normalisation | None:
    if name == "none":
        return None
    if name not in NORMALISATIONS:
        raise ValueError(f"unknown normalisation {name!r}; known: none, {', '.join(NORMALISATIONS)}")
    return NORMALISATIONS[name]()


def _with_settings(normalisation: Normalisation | None, settings: dict[str, Any]) -> Normalisation:
    if normalisation is None:
        raise ValueError(
            f"{', '.join(settings)} of the normalisation given, but there is no normalisation; "
            f"choose one of {', '.join(NORMALISATIONS)}"
        )
    if "level" in settings and not isinstance(normalisation, BySums):
        raise ValueError(
            "trigger_level belongs to coefficient_ratio and effective_sample_size; a gradient norm is taken at the "
            "loss's level"
        )
    return replace(normalisation, **settings)
