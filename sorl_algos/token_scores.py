"""Log-probability and entropy of chosen tokens, straight from hidden states: the logits of all never exist together.

Logits of 4,096 tokens over a vocabulary of 150k are 2.5 GB in float32, and plain log-softmax with its backward pass
needs several of that size. Here they are made some hundred tokens at a time, forward and again in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sorl_algos.losses.segments import at_least_float32

# Logits that exist at one time (134 MB in float32): 220 tokens at a vocabulary of 150k, 8,192 at one of 4k.
LOGITS_AT_ONCE = 2**25


def token_scores(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    compute_dtype: torch.dtype | None = None,
    tokens_at_once: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability (differentiable) and entropy (not) of softmax(hidden weight^T + bias) / temperature.

    Args:
        hidden, targets: ``(N, H)`` and ``(N,)`` long.
        weight, bias: ``(V, H)`` and ``(V,)``.
        compute_dtype: of the matrix products (None: the weight's); all else, and the weight's gradient, is summed up
            in float32 at least.
        tokens_at_once: tokens whose logits exist together (None: by the vocabulary).

    Returns:
        Two ``(N,)`` tensors, at least float32.
    """
    chunk = tokens_at_once or max(1, LOGITS_AT_ONCE // weight.shape[0])
    return _TokenScores.apply(hidden, targets, weight, bias, temperature, compute_dtype or weight.dtype, chunk)


class _TokenScores(torch.autograd.Function):
    """Forward keeps one number a token; backward makes each chunk's softmax again (a single chunk's is kept)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None,
        temperature: float, dtype: torch.dtype, chunk: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.temperature, ctx.dtype, ctx.chunk = temperature, dtype, chunk
        with torch.autocast(hidden.device.type, enabled=False):
            cast = weight.to(dtype)
            precise = at_least_float32(weight.new_empty(0)).dtype
            logp, entropy, normaliser = (hidden.new_empty(len(targets), dtype=precise) for _ in range(3))
            kept = None
            for start in range(0, len(targets), chunk):
                piece = slice(start, start + chunk)
                logits = _logits(hidden[piece], cast, bias, temperature)
                chosen = logits.gather(-1, targets[piece, None]).squeeze(-1)
                top = logits.amax(-1)
                logits.sub_(top[:, None])
                weights = logits.exp()
                total = weights.sum(-1)
                normaliser[piece] = top + total.log()
                logp[piece] = chosen - normaliser[piece]
                # H = log Z - sum p x, with x and Z taken relative to the largest logit
                entropy[piece] = total.log() - logits.mul_(weights).sum(-1) / total
                if len(targets) <= chunk and (ctx.needs_input_grad[0] or ctx.needs_input_grad[2]):
                    kept = weights.div_(total[:, None])
        ctx.save_for_backward(hidden, targets, weight, bias, normaliser, kept)
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, logp_gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, targets, weight, bias, normaliser, kept = ctx.saved_tensors
        wants_hidden, _, wants_weight, wants_bias = ctx.needs_input_grad[:4]
        with torch.autocast(hidden.device.type, enabled=False):
            cast = weight.to(ctx.dtype)
            to_hidden = torch.empty_like(hidden) if wants_hidden else None
            to_weight = torch.zeros_like(weight, dtype=normaliser.dtype) if wants_weight else None
            to_bias = torch.zeros_like(bias, dtype=normaliser.dtype) if wants_bias else None
            for start in range(0, len(targets), ctx.chunk):
                piece = slice(start, start + ctx.chunk)
                if kept is None:
                    logits = _logits(hidden[piece], cast, bias, ctx.temperature)
                    probabilities = logits.sub_(normaliser[piece, None]).exp_()
                else:
                    probabilities = kept
                # d logp / d logits = onehot - p
                outer = logp_gradient[piece, None] / ctx.temperature
                to_logits = probabilities * -outer if kept is not None else probabilities.mul_(-outer)
                to_logits.scatter_add_(-1, targets[piece, None], outer)
                if to_bias is not None:
                    to_bias += to_logits.sum(0)
                to_logits = to_logits.to(ctx.dtype)
                if to_hidden is not None:
                    to_hidden[piece] = (to_logits @ cast).to(hidden.dtype)
                if to_weight is not None:
                    _add_product(to_weight, to_logits, hidden[piece].to(ctx.dtype))
        gradients = [to_hidden, None, to_weight, to_bias]
        of = (hidden, None, weight, bias)
        typed = [g if g is None or x is None else g.to(x.dtype) for g, x in zip(gradients, of, strict=True)]
        return (*typed, None, None, None)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """A fresh ``(n, V)`` tensor, at least float32."""
    logits = at_least_float32(functional.linear(hidden.to(weight.dtype), weight))
    if bias is not None:
        logits.add_(bias)
    return logits if temperature == 1 else logits.div_(temperature)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left^T right, in place where the types allow it."""
    if left.dtype == total.dtype:
        total.addmm_(left.T, right)
    else:
        total += left.T @ right
