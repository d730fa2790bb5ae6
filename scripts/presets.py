"""Named experiments as Python values: `train.py NAME --lr 2e-4` starts from one and changes what is given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sorl_algos.config import TrainConfig
from sorl_algos.hardware_presets import DESCRIPTION, hardware_presets

_QUICKSTART = TrainConfig(index=Path("indexes/world"))
_SMOKE = replace(
    _QUICKSTART,
    run_dir=Path("runs/smoke"),
    updates=3,
    questions_per_update=16,
    minibatch_sequences=8,
    critic_warmup_updates=1,
    eval_every=3,
    eval_limit=16,
    test_limit=32,
)


def _in_groups(config: TrainConfig) -> TrainConfig:
    """As many episodes, four of each question, and no critic: for algorithms that compare within groups."""
    return replace(
        config,
        algorithm="so_grpo",
        run_dir=config.run_dir.with_name(f"{config.run_dir.name}_group"),
        group_size=4,
        questions_per_update=config.questions_per_update // 4,
        critic="none",
    )

# The bundled model knows nothing of medicine or mathematics: these two show that everything runs. For a model that
# does, give --model, --prompt medical or math, --max-turn-tokens, --max-total-tokens and --max-observation-words.
_MEDICAL = replace(
    _SMOKE,
    env="MedicalQA-v0",
    run_dir=Path("runs/medical"),
    index=None,
    questions="medical:train",
    eval_questions="medical:dev",
    reward="choice_accuracy",
    max_searches=2,
    max_observation_words=40,
)
_MATH = replace(
    _SMOKE,
    env="MathQA-v0",
    run_dir=Path("runs/math"),
    index=None,
    questions="math:train",
    eval_questions="math:dev",
    reward="math_equal",
    max_searches=0,
)


# For two processor cores: a critic head on the policy's trunk, one search, one short passage, half precision.
_SMOLLM2 = TrainConfig(
    run_dir=Path("runs/smollm2_wiki"),
    model="runs/smollm2_warm/model",
    dtype="bfloat16",
    index=Path("indexes/wiki"),
    questions="runs/smollm2_warm/train.jsonl",
    eval_questions="runs/smollm2_warm/dev.jsonl",
    reward="token_f1",  # exact matches are too rare here to learn from in a few hundred episodes
    prompt="short",
    max_searches=1,
    top_k=1,
    max_observation_words=90,
    questions_per_update=16,
    minibatch_sequences=8,
    microbatch_sequences=8,
    max_turn_tokens=48,
    max_total_tokens=448,
    lr=5e-5,
    critic_lr=1e-3,
    updates=80,
    eval_every=20,
    eval_limit=64,
    test_limit=0,
    save_every=5,
)

SMALL: dict[str, tuple[str, TrainConfig]] = {
    "quickstart": ("SO-PPO on the bundled world with the bundled 2.6 M model: two CPU cores, minutes.", _QUICKSTART),
    "quickstart_ppo": (
        "The same with token-level PPO, to compare.",
        replace(_QUICKSTART, algorithm="ppo", run_dir=Path("runs/quickstart_ppo")),
    ),
    "quickstart_group": ("The same with SO-GRPO: four episodes a question, no critic.", _in_groups(_QUICKSTART)),
    "smoke": ("Three tiny updates of the quickstart: does everything run?", _SMOKE),
    "smoke_group": ("The same for group advantages.", _in_groups(_SMOKE)),
    "medical": ("MedicalQA-v0 on the bundled book: multiple choice with a search engine.", _MEDICAL),
    "math": ("MathQA-v0 on generated problems: one turn, no search.", _MATH),
    "smollm2_wiki": (
        "SO-PPO with SmolLM2-135M-Instruct on real questions over a Wikipedia index, after scripts/warm_start.py.",
        _SMOLLM2,
    ),
    "smollm2_pubmed": (
        "The same on PubMedQA over an index of abstracts: yes, no or maybe.",
        replace(
            _SMOLLM2,
            env="MedicalQA-v0",
            run_dir=Path("runs/smollm2_pubmed"),
            model="runs/smollm2_pubmed_warm/model",
            index=Path("indexes/pubmed"),
            questions="runs/smollm2_pubmed_warm/train.jsonl",
            eval_questions="runs/smollm2_pubmed_warm/dev.jsonl",
            reward="choice_accuracy",
            max_observation_words=200,
            max_total_tokens=640,
            max_turn_tokens=64,
            updates=24,
            eval_every=12,
        ),
    ),
}
PRESETS = SMALL | hardware_presets()


def known_presets() -> str:
    """All names in a line, those for real hardware by their grammar."""
    return f"{', '.join(SMALL)}, or {DESCRIPTION}"
