"""Slow references in plain Python floats, written from the definitions: loops over rows, turns and tokens.

Nothing here calls the library. A batch is lists of lists; `None` stands for "not an action token" in results.
Gradients of the losses are worked out by the chain rule, token by token (`surrogate_gradient`).
"""

import math
from collections.abc import Callable, Sequence

Row = Sequence[float]
Rows = Sequence[Row]
Mask = Sequence[Sequence[bool]]

BOUND = 20.0


def action_columns(mask_row: Sequence[bool]) -> list[int]:
    return [t for t, on in enumerate(mask_row) if on]


def turns_of(mask_row: Sequence[bool]) -> list[list[int]]:
    """Maximal runs of action tokens, as lists of columns."""
    turns: list[list[int]] = []
    for t, on in enumerate(mask_row):
        if not on:
            continue
        if t > 0 and mask_row[t - 1]:
            turns[-1].append(t)
        else:
            turns.append([t])
    return turns


def turn_ids(mask: Mask) -> list[list[int]]:
    ids = [[-1] * len(row) for row in mask]
    for b, row in enumerate(mask):
        for k, columns in enumerate(turns_of(row)):
            for t in columns:
                ids[b][t] = k
    return ids


def segments_of(mask_row: Sequence[bool], level: str) -> list[list[int]]:
    columns = action_columns(mask_row)
    if level == "token":
        return [[t] for t in columns]
    if level == "turn":
        return turns_of(mask_row)
    return [columns] if columns else []


def log_ratio(logp: float, old_logp: float) -> float:
    return max(-BOUND, min(BOUND, logp - old_logp))


def ratios(logp: Rows, old_logp: Rows, mask: Mask, level: str, pooling: str = "mean") -> list[list[float | None]]:
    out: list[list[float | None]] = [[None] * len(row) for row in mask]
    for b, row in enumerate(mask):
        for segment in segments_of(row, level):
            pooled = sum(log_ratio(logp[b][t], old_logp[b][t]) for t in segment)
            if pooling == "mean":
                pooled /= len(segment)
            w = math.exp(max(-BOUND, min(BOUND, pooled)))
            for t in segment:
                out[b][t] = w
    return out


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def clipped_token(w: float, a: float, clip_low: float, clip_high: float, dual_clip: float | None) -> float:
    """Surrogate kept by the clip for one token (to be maximised)."""
    kept = min(w * a, clip(w, 1 - clip_low, 1 + clip_high) * a)
    if dual_clip is not None and a < 0:
        kept = max(kept, dual_clip * a)
    return kept


def free_token(w: float, a: float, clip_low: float, clip_high: float, dual_clip: float | None) -> float:
    return w * a


def clipped_slope(w: float, a: float, clip_low: float, clip_high: float, dual_clip: float | None) -> float:
    """Derivative of `clipped_token` by w: A where the clip is idle, 0 where it is active."""
    if a > 0 and w > 1 + clip_high:
        return 0.0
    if a < 0 and w < 1 - clip_low:
        return 0.0
    if dual_clip is not None and a < 0 and w > dual_clip:
        return 0.0
    return a


def free_slope(w: float, a: float, clip_low: float, clip_high: float, dual_clip: float | None) -> float:
    return a


def surrogate(
    token: Callable[..., float],
    logp: Rows,
    old_logp: Rows,
    advantages: Rows,
    mask: Mask,
    *,
    level: str,
    clip_low: float,
    clip_high: float,
    pooling: str = "mean",
    dual_clip: float | None = None,
) -> list[list[float]]:
    """Per-token surrogate (free or clipped, by `token`), 0 off the mask."""
    w = ratios(logp, old_logp, mask, level, pooling)
    out = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        for t in action_columns(row):
            ratio = w[b][t]
            assert ratio is not None
            out[b][t] = token(ratio, advantages[b][t], clip_low, clip_high, dual_clip)
    return out


def surrogate_gradient(
    slope: Callable[..., float],
    weights: Rows,
    logp: Rows,
    old_logp: Rows,
    advantages: Rows,
    mask: Mask,
    *,
    level: str,
    clip_low: float,
    clip_high: float,
    pooling: str = "mean",
    dual_clip: float | None = None,
) -> list[list[float]]:
    """Gradient by logp of sum_t weights_t surrogate_t.

    dw_s / dlogp_j is w_s / |s| (mean) or w_s (sum) for each j in s, so token j receives
    (w_s / |s|) sum_{t in s} weights_t slope_t: with nothing clipped and equal weights this is Lemma 4.1.
    """
    w = ratios(logp, old_logp, mask, level, pooling)
    out = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        for segment in segments_of(row, level):
            ratio = w[b][segment[0]]
            assert ratio is not None
            total = sum(weights[b][t] * slope(ratio, advantages[b][t], clip_low, clip_high, dual_clip) for t in segment)
            share = len(segment) if pooling == "mean" else 1
            for t in segment:
                out[b][t] = ratio * total / share
    return out


def reduction_weights(mask: Mask, how: str, norm_length: float | None = None) -> list[list[float]]:
    """The weight of each token's loss in the scalar: every reduction is a weighted sum."""
    tokens = sum(len(action_columns(row)) for row in mask)
    turns = sum(len(turns_of(row)) for row in mask)
    sequences = sum(1 for row in mask if action_columns(row))
    out = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        length = len(action_columns(row))
        for turn in turns_of(row):
            for t in turn:
                if how == "token_mean":
                    out[b][t] = 1 / tokens
                elif how == "turn_mean":
                    out[b][t] = 1 / (turns * len(turn))
                elif how == "sequence_mean_token_mean":
                    out[b][t] = 1 / (sequences * length)
                elif how == "sequence_mean_token_sum":
                    out[b][t] = 1 / sequences
                else:
                    assert how == "sequence_mean_token_sum_norm" and norm_length is not None
                    out[b][t] = 1 / (sequences * norm_length)
    return out


def clip_sums(w: Sequence[Sequence[float | None]], advantages: Rows, clip_low: float, clip_high: float) -> list[float]:
    """Sum of (w A)^2 and count over tokens outside the interval, then over the others."""
    sums = [0.0, 0.0, 0.0, 0.0]
    for row, adv_row in zip(w, advantages, strict=True):
        for ratio, a in zip(row, adv_row, strict=True):
            if ratio is None:
                continue
            place = 0 if ratio < 1 - clip_low or ratio > 1 + clip_high else 2
            sums[place] += (ratio * a) ** 2
            sums[place + 1] += 1
    return sums


def normalisation(sums: Sequence[float], threshold: float) -> tuple[float, float]:
    """(factor, rho)."""
    clipped_squares, clipped, other_squares, others = sums
    if clipped == 0:
        return 1.0, 0.0
    against = math.sqrt(other_squares / others) + 1e-8 if others else 1.0
    rho = math.sqrt(clipped_squares / clipped) / against
    return (1.0, rho) if rho <= threshold else (min(1.0, 1 / rho), rho)


def gae(
    rewards: Rows, values: Rows, mask: Mask, gamma: float, lam: float, bootstrap: Row | None = None
) -> tuple[list[list[float]], list[list[float]]]:
    """Delete observation tokens, run plain GAE backwards, put them back."""
    advantages = [[0.0] * len(row) for row in mask]
    returns = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        following = 0.0 if bootstrap is None else bootstrap[b]
        running = 0.0
        for t in reversed(action_columns(row)):
            running = rewards[b][t] + gamma * following - values[b][t] + gamma * lam * running
            following = values[b][t]
            advantages[b][t] = running
            returns[b][t] = running + values[b][t]
    return advantages, returns


def turn_gae(
    rewards: Rows, values: Rows, mask: Mask, gamma: float, lam: float, bootstrap: Row | None = None
) -> tuple[list[list[float]], list[list[float]]]:
    """One step per turn: reward = sum over the turn, value = at the turn's first token."""
    advantages = [[0.0] * len(row) for row in mask]
    returns = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        following = 0.0 if bootstrap is None else bootstrap[b]
        running = 0.0
        for turn in reversed(turns_of(row)):
            value = values[b][turn[0]]
            running = sum(rewards[b][t] for t in turn) + gamma * following - value + gamma * lam * running
            following = value
            for t in turn:
                advantages[b][t] = running
                returns[b][t] = running + value
    return advantages, returns


def legacy_gae(
    rewards: Rows, values: Rows, mask: Mask, gamma: float, lam: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Every token from the first to the last action is a step; rewards are the action tokens' only."""
    span = [[False] * len(row) for row in mask]
    held = [[r if on else 0.0 for r, on in zip(rs, ms, strict=True)] for rs, ms in zip(rewards, mask, strict=True)]
    for b, row in enumerate(mask):
        columns = action_columns(row)
        if columns:
            for t in range(columns[0], columns[-1] + 1):
                span[b][t] = True
    return gae(held, values, span, gamma, lam)


def group_advantages(returns: Row, group_ids: Sequence[int], scale: str) -> list[float]:
    out = []
    for r, g in zip(returns, group_ids, strict=True):
        members = [x for x, h in zip(returns, group_ids, strict=True) if h == g]
        if min(members) == max(members):
            out.append(0.0)
            continue
        mean = sum(members) / len(members)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in members) / (len(members) - 1))
        out.append((r - mean) / (deviation + 1e-6) if scale == "std" else r - mean)
    return out


def leave_one_out(returns: Row, group_ids: Sequence[int]) -> list[float]:
    out = []
    for i, (r, g) in enumerate(zip(returns, group_ids, strict=True)):
        others = [x for j, (x, h) in enumerate(zip(returns, group_ids, strict=True)) if h == g and j != i]
        out.append(r - sum(others) / len(others) if others else 0.0)
    return out


def whiten(x: Rows, mask: Mask) -> list[list[float]]:
    tokens = [x[b][t] for b, row in enumerate(mask) for t in action_columns(row)]
    out = [[0.0] * len(row) for row in mask]
    if len(tokens) < 2:
        return out
    mean = sum(tokens) / len(tokens)
    variance = sum((v - mean) ** 2 for v in tokens) / (len(tokens) - 1)
    for b, row in enumerate(mask):
        for t in action_columns(row):
            out[b][t] = (x[b][t] - mean) / math.sqrt(variance + 1e-8)
    return out


def kl(logp: float, ref_logp: float, estimator: str) -> float:
    d = logp - ref_logp
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]


def value_loss(value: float, old_value: float, target: float, clip_range: float | None) -> float:
    error = (value - target) ** 2
    if clip_range is None:
        return error / 2
    held = clip(value, old_value - clip_range, old_value + clip_range)
    return max(error, (held - target) ** 2) / 2
