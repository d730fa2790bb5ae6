"""Losses for agents that act over several turns: plain functions of tensors that need torch and nothing else.

All tensors are `(B, T)` and aligned: column `t` speaks of `token_ids[:, t]`. The modules:

- `segments`: turn ids, segments of the three ratio levels, means over segments
- `policy`: clipped surrogate, CISPO and REINFORCE, each returning a per-token `LossOutput`
- `clip_norm`: the clipping-triggered normalisation
- `corrections`: weights for the gap between sampler and trainer
- `value`, `kl`: critic loss; KL estimators
- `reduce`: from per-token losses to a scalar over given global counts
"""
