"""What each curve of the report shows: its title, its metrics, what it means and what is healthy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plot:
    """One chart. `metrics`: (name, variant label); in a name `*` stands for any question set or turn."""

    title: str
    metrics: tuple[tuple[str, str], ...]
    meaning: str
    floor: float | None = None
    ceiling: float | None = None
    guide: tuple[float, str] | None = None


GROUPS: tuple[tuple[str, str, tuple[Plot, ...]], ...] = (
    (
        "Does it learn?",
        "Reward on the training questions, and the same skill on questions that it never trained on.",
        (
            Plot(
                "Reward",
                (("reward_mean", ""),),
                "Mean reward of the episodes of each update. It should rise and then level off; a sudden "
                "fall that stays is a collapse.",
                floor=0.0,
            ),
            Plot(
                "Held-out exact match",
                (("eval/*/exact_match", ""),),
                "Share of questions outside the training set answered exactly, as played at each "
                "evaluation. It should follow the reward; a gap that widens means learning by heart.",
                floor=0.0,
            ),
            Plot(
                "Exact match in training",
                (("em_train", ""),),
                "Share of the update's own episodes answered exactly. Above the held-out curve by a "
                "little is normal.",
                floor=0.0,
            ),
        ),
    ),
    (
        "Can the updates be trusted?",
        "How far the policy moves within an update, and how much of the gradient the clip throws away, at"
        " all three ratio levels, whichever of them is trained with.",
        (
            Plot(
                "Clip fraction per level",
                (
                    ("clip_fraction_token", "token"),
                    ("clip_fraction_turn", "turn"),
                    ("clip_fraction_sequence", "sequence"),
                ),
                "Share of action tokens whose ratio lies outside the clip range, with the ratio taken per"
                " token, per turn and per sequence. Longer segments average more, so their ratios stray "
                "less. A few per cent is healthy; a steady climb says that the updates are too large.",
                floor=0.0,
            ),
            Plot(
                "rho of the normalisation",
                (("rho", ""),),
                "Size of ratio × advantage on clipped tokens, relative to the others. Above the threshold"
                " the few clipped tokens outweigh the rest, and the update is scaled down. Spikes are "
                "what it is there for; always high is not healthy.",
                floor=0.0,
            ),
            Plot(
                "Factor of the normalisation",
                (("factor", ""),),
                "What the policy gradient is multiplied by: 1 leaves it alone, 1 / rho damps it. Mostly 1"
                " with rare dips is healthy.",
                floor=0.0,
                ceiling=1.0,
            ),
            Plot(
                "Norm of the clipping bias",
                (("excess_norm", ""),),
                "Norm of C, the part of the gradient that the clip threw away, over the policy's parameters. Where it "
                "outgrows the gradient norm, more is thrown away than kept.",
                floor=0.0,
            ),
            Plot(
                "Clip fraction by turn",
                (("clip_fraction_turn/*", ""),),
                "Share of each turn's action tokens from which the algorithm's own clip took something. Late turns "
                "lead when credit is worst there.",
                floor=0.0,
            ),
            Plot(
                "Effective sample size",
                (("ess", ""),),
                "How many equal tokens the ratios are worth, as a share: 1 when all are equal, next to 0 when a few "
                "outweigh all others.",
                floor=0.0,
                ceiling=1.0,
            ),
            Plot(
                "KL by turn",
                (("approx_kl_turn/*", ""),),
                "Distance from the policy before the update's first minibatch, on each turn. The turns should move "
                "alike.",
                floor=0.0,
            ),
            Plot(
                "approx_kl",
                (("approx_kl", ""),),
                "Distance of the policy from where it stood before the update's first minibatch (logp "
                "against old_logp). Small and steady is healthy.",
                floor=0.0,
            ),
            Plot(
                "mismatch_kl",
                (("mismatch_kl", ""),),
                "Distance between the engine's log-probabilities and the trainer's for the same tokens "
                "(old_logp against rollout_logp). It should be next to nothing; if not, the ratios lie.",
            ),
            Plot(
                "Gradient norm",
                (("grad_norm", ""),),
                "Norm of the policy's gradient before it is cut to the allowed norm. Steady is healthy; "
                "growth comes before collapse.",
                floor=0.0,
            ),
        ),
    ),
    (
        "How does the policy behave?",
        "What changes in the way it plays.",
        (
            Plot(
                "Searches per episode",
                (("searches_mean", ""),),
                "Mean number of searches before the answer. It should settle at what the questions need; "
                "zero means that the policy has given up on searching.",
                floor=0.0,
            ),
            Plot(
                "Response length",
                (("response_tokens_mean", ""),),
                "Mean number of action tokens of an episode (retrieved text does not count). Growth "
                "without more reward is padding.",
                floor=0.0,
            ),
            Plot(
                "Entropy",
                (("entropy", ""),),
                "How undecided the policy is at each action token, in nats. A slow decline is learning; a"
                " fall to zero ends exploration, a climb is a policy that comes apart.",
                floor=0.0,
            ),
            Plot(
                "Entropy by turn",
                (("entropy_turn/*", ""),),
                "The same on each turn: queries may stay open while answers settle.",
                floor=0.0,
            ),
            Plot(
                "Length by turn",
                (("response_tokens_turn/*", ""),),
                "Mean number of action tokens of each turn.",
                floor=0.0,
            ),
            Plot(
                "Tags, loops and cuts",
                (("tag_fault_rate", "tags"), ("loop_rate", "loops"), ("cut_rate", "cut")),
                "Share of turns with wrong tags (unbalanced, repeated, forged, or no valid action), that loop (more "
                "than half of the 4-grams repeated), and that were cut at the length limit. Near 0 is healthy.",
                floor=0.0,
            ),
            Plot(
                "KL to the reference",
                (("ref_kl", ""),),
                "Distance from the frozen reference. It grows as the policy learns; it should bend, not "
                "run away.",
                floor=0.0,
            ),
            Plot(
                "Valid actions",
                (("valid_action_rate", ""),),
                "Share of turns that hold a well-formed search or answer. Near 1 is healthy.",
                floor=0.0,
                ceiling=1.0,
            ),
        ),
    ),
    (
        "Does the critic help?",
        "The critic's estimates are the baseline of the advantages (algorithms with GAE only).",
        (
            Plot(
                "Explained variance",
                (("explained_variance", ""),),
                "How much of the returns' variation the critic foresees: 1 is all of it, 0 no more than "
                "their mean would, below 0 it misleads. It should rise above 0 early on.",
                guide=(0.0, "no better than the mean"),
                floor=0.0,
                ceiling=1.0,
            ),
            Plot(
                "Variance of the advantages",
                (("advantage_variance", ""),),
                "Variance over action tokens before whitening. A good critic lowers it; a jump says that its values "
                "are off.",
                floor=0.0,
            ),
            Plot(
                "Advantage by turn",
                (("advantage_turn/*", ""),),
                "Mean advantage, as trained with, on each turn. A turn that is always on one side of 0 gets credit "
                "for where it stands.",
            ),
            Plot(
                "Value loss",
                (("value_loss", ""),),
                "Squared error of the critic, clipped. It should fall, and jump when the policy finds "
                "something new.",
                floor=0.0,
            ),
        ),
    ),
)

OTHERS: dict[str, str] = {
    "advantage_abs_mean": "Mean size of the advantages. Near 0 there is nothing to learn from.",
    "critic_grad_norm": "Norm of the critic's gradient before it is cut.",
    "alarm": "1 while a reason of the collapse alarm stands.",
    "dropped_episodes": "Episodes left out of training because the index failed.",
    "dropped_stale_episodes": "Episodes thrown away because they had grown older than max_staleness.",
    "lr": "Learning rate of the policy.",
    "policy_loss": "The surrogate that is minimised. Its level means little; a blow-up means much.",
    "ratio_max": "Largest ratio in the update. Far above 1 + clip_high: something moved very far.",
    "repetition_mean": "Share of a turn's 4-grams that it has held before, mean over turns.",
    "retried_episodes": "Episodes that failed and were played once more.",
    "staleness_max": "Updates between the oldest weights in the batch and those that were trained.",
    "staleness_mean": "The same, mean over groups. Above 0 only with source async.",
    "tag_forged_rate": "Share of turns with a tag that only the environment may write.",
    "tag_repeated_rate": "Share of turns with more than one complete action.",
    "tag_unbalanced_rate": "Share of turns with a tag that is not closed, or closes nothing.",
    "ess_turn/*": "Effective sample size of the ratios, as a share, on each turn.",
    "mismatch_ess_turn/*": "Effective sample size of the ratios between engine and trainer, on each turn.",
    "mismatch_kl_turn/*": "Distance between the engine's log-probabilities and the trainer's, on each turn.",
    "mismatch_ratio_max_turn/*": "Largest ratio between trainer and engine on each turn.",
    "ratio_max_turn/*": "Largest ratio in the update on each turn.",
    "ratio_mean_turn/*": "Mean ratio on each turn.",
    "tag_fault_rate_turn/*": "Share of wrong tags on each turn.",
    "valid_action_rate_turn/*": "Share of well-formed searches or answers on each turn.",
    "ratio_mean": "Mean ratio over the action tokens. Near 1 is healthy.",
    "skipped_minibatches": "Minibatches whose gradient was not finite and that changed nothing.",
    "time_rollout_s": "Seconds spent playing episodes.",
    "time_update_s": "Seconds spent on gradients.",
    "tokens": "Tokens of the update, read and written.",
    "truncated_rate": "Share of episodes that ended without an answer, at the turn or the length limit.",
    "turns_mean": "Mean number of turns of an episode.",
}

SETS: dict[str, tuple[str, str]] = {
    "test": ("test", "Held-out questions; none of them was trained on."),
    "test_unseen": ("test, unseen entities", "Questions about entities that no training question speaks of."),
    "test_empty_index": (
        "test, empty index",
        "Control: the test questions with an index that finds nothing. What is answered here is known by "
        "heart.",
    ),
    "test_unseen_empty_index": (
        "unseen entities, empty index",
        "Control: the questions about unseen entities with an index that finds nothing.",
    ),
    "dev": ("dev", "Questions set aside for choosing settings."),
}

SCORES: dict[str, str] = {"exact_match": "exact match", "f1": "token F1", "searches": "searches"}

STOPS: dict[str, str] = {
    "answered": "The policy gave an answer.",
    "turn_limit": "No answer within the allowed turns.",
    "length_limit": "The text reached its length limit.",
    "retrieval_error": "The index failed; such episodes are not trained on.",
}
