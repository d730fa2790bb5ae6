"""All settings of a training run: one frozen dataclass, units in the names, checked when it is made."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sorl_algos.alarm import OnAlarm
from sorl_algos.algorithms import AdvantageName, Algorithm, LossName, algorithm
from sorl_algos.schedules import Schedule

ENVIRONMENTS = ("SearchQA-v0", "MedicalQA-v0", "MathQA-v0")
DIALECTS = ("search_r1", "tool_call", "boxed")
_RULES = (
    "max_searches", "top_k", "max_observation_words", "max_query_chars", "max_turn_words", "max_total_words",
    "tell_budget", "invalid_penalty", "search_cost",
)  # fmt: skip
_OWN = ("dialect", "options_in_query", "last_turn_answers")  # None: as the environment has it


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run; the defaults train the bundled search agent on two CPU cores in minutes."""

    run_dir: Path = Path("runs/quickstart")
    """Where the run writes; a run found there is resumed."""
    seed: int = 0
    model: str = "base"
    """"base" (bundled), "smollm2", a directory, or a hub name."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the matrix products. Weights that learn, their gradients and the optimiser are in float32 either way."""
    gradient_checkpointing: bool = False
    """Make activations again in the backward pass instead of keeping them: less memory, about a third more time."""
    sharding: Literal["auto", "ddp", "fsdp2"] = "auto"
    """Several ranks: "ddp" (each holds all weights), "fsdp2" (each its share); "auto" asks the launcher, else ddp."""
    lora_rank: int = 0
    """Rank of low-rank adapters on a frozen base that policy, reference and critic share; 0: all weights learn."""
    lora_alpha: float = 32.0
    """What adapters add is scaled by lora_alpha / lora_rank."""
    lora_targets: str = "all-linear"
    """Modules with adapters: "all-linear", or names with commas in between, such as q_proj,v_proj."""
    lora_publish: Literal["merged", "adapter"] = "merged"
    """What the engine gets: all weights with the adapter "merged", or (engine vllm) the "adapter" alone."""
    critic: Literal["shared", "own", "none"] = "shared"
    """"shared": a value head on the policy's trunk; "own": a copy of the trunk; "none": for group advantages."""

    # Environment
    env: str = "SearchQA-v0"
    """SearchQA-v0, MedicalQA-v0, MathQA-v0, or "module:Id" of one's own."""
    index: Path | None = None
    """A built index; None: the environment's bundled passages."""
    questions: str = "world:train"
    """"world:SPLIT", "medical:SPLIT", "math:SPLIT", or a question file (JSONL, gz)."""
    eval_questions: str = "world:dev"
    reward: str = "exact_match"
    """A name of the table of rewards, or a weighted sum: "exact_match + 0.1*format"."""
    prompt: str = "short"
    """search_r1, medical, tools, medical_tools, closed_book, math, short, or a template with {question} in it."""
    prompt_file: Path | None = None
    """A UTF-8 file with {question} in it, in place of the named prompt."""
    dialect: Literal["search_r1", "tool_call", "boxed"] | None = None
    """How actions are written; "tool_call": JSON, the tool shown by the chat template; None: the environment's own."""
    chat_style: Literal["continuation", "chat"] = "continuation"
    """"continuation": one growing assistant text; "chat": turns close, observations are user or tool messages."""
    system_prompt: str | None = None
    """A system message before the question."""
    max_searches: int = 3
    """Searches allowed; one turn more is left for the answer."""
    top_k: int = 1
    """Passages of a search."""
    max_observation_words: int | None = 60
    """Longest observation; None: no limit."""
    max_query_chars: int = 512
    """Longer queries are cut."""
    max_turn_words: int | None = None
    """A longer turn counts as cut (max_turn_tokens is what is sampled at most)."""
    max_total_words: int | None = None
    """Words of all turns and observations; an episode that has used them up ends."""
    tell_budget: bool = False
    """Tell the policy how many searches (and words, with max_total_words) are left."""
    invalid_penalty: float = 0.0
    """Taken off the reward of a turn without a valid action."""
    search_cost: float = 0.0
    """Taken off the reward of a turn that searched."""
    options_in_query: bool | None = None
    """Whether queries may hold the options of a multiple-choice question; None: the environment's own."""
    last_turn_answers: bool | None = None
    """Whether the last turn counts as the answer whatever is in it; None: the environment's own."""

    # Rollout
    questions_per_update: int = 64
    group_size: int = 1
    """Episodes of each question; group advantages need at least 2."""
    max_turn_tokens: int = 24
    max_total_tokens: int = 512
    temperature: float = 1.0
    engine: Literal["hf", "vllm"] = "hf"
    """What samples: transformers, or vLLM in the same process (the extra sorl[vllm])."""
    engine_memory_share: float = 0.4
    """Share of the GPU's memory for vLLM, given back while the policy learns. On processors it caches in 1 GiB."""
    engine_gpus: Literal["shared", "own"] = "shared"
    """"own": of 2 N GPUs N train (one rank each) and N sample, so that vLLM never sleeps; for source async."""
    kv_cache_mb: float = 0.0
    """Memory in which engine hf keeps keys and values from turn to turn; 0: each turn is read from its beginning."""
    source: Literal["sync", "stream", "async"] = "sync"
    """"sync": the episodes of an update in lockstep; "stream": each at its own pace, with the same result; "async":
    also while the policy learns, so that part of them comes from older weights (see correction)."""
    max_staleness: int = 1
    """Updates that the oldest episode of a group may lie behind, with source async; older groups are dropped."""
    queue_groups: int | None = None
    """Groups begun ahead with source async; None: as many as cannot grow too old."""
    retrieval_window_ms: float = 3.0
    """How long a search waits for others to share a call with, with source stream or async."""

    # Algorithm: a row of the table, and overrides of its columns (None: the row's own)
    algorithm: str = "so_ppo"
    advantages: AdvantageName | None = None
    level: Literal["token", "turn", "sequence"] | None = None
    normalisation: (
        Literal["none", "coefficient_ratio", "gradient_norm", "gradient_ratio", "effective_sample_size"] | None
    ) = None
    threshold: float | None = None
    scope: Literal["minibatch", "microbatch", "sequence"] | None = None
    trigger_level: Literal["token", "turn", "sequence"] | None = None
    factor_on: Literal["gradient", "step"] = "gradient"
    """What the normalisation's factor multiplies: the policy's gradient, as published, or the optimiser's step (its
    rate), which neither Adam nor max_grad_norm can take back."""
    pooling: Literal["mean", "sum"] | None = None
    reduction: str | None = None
    loss: LossName | None = None
    dual_clip: float | None = None
    norm_length: float | None = None
    """Tokens by which `sequence_mean_token_sum_norm` divides."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    gamma: float = 1.0
    lam: float = 1.0
    whiten_advantages: bool = True
    kl_reward_coef: float = 0.0
    """Coefficient of the KL to the reference in the reward, per action token."""
    kl_reward_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_loss_coef: float = 0.0
    """Coefficient of the KL to the reference in the loss."""
    kl_loss_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_target: float | None = None
    """Steer both coefficients so that the KL to the reference (k1, mean per action token) comes to this."""
    kl_horizon_episodes: int = 10_000
    """Episodes over which the steering acts: at most 20 % of the coefficient in so many."""
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """What the ratio is taken to: the trainer's own scores before the first step, or what the engine reported when it
    sampled (for rollouts of older weights)."""
    correction: Literal["none", "truncated_is", "icepop", "rejection", "decoupled"] = "none"
    """For engine and trainer that disagree on log-probabilities: weights in the policy loss (docs/algorithms.md)."""
    correction_level: Literal["token", "turn", "sequence"] = "token"
    correction_pooling: Literal["mean", "sum"] = "mean"
    correction_low: float = 0.5
    """Least ratio that icepop and rejection keep."""
    correction_high: float = 2.0
    """Largest ratio that they keep; the largest weight of truncated_is and decoupled (inf: any)."""
    rejected_leave_denominator: bool | None = None
    """Whether tokens that icepop or rejection drop leave the loss's denominators too; these two need it said."""

    # Optimisation
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """"sgd": plain, without momentum, to see what Adam's own normalisation does to a scaled gradient."""
    lr: float = 2e-4
    critic_lr: float = 5e-4
    lr_warmup_updates: int = 2
    lr_schedule: Schedule = "constant"
    """Course of the policy's rate after the warm-up, down to `lr_final_share` of it at `updates`."""
    lr_final_share: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    minibatch_sequences: int = 32
    passes: int = 1
    """Times the rollout batch is gone through; minibatches x passes optimiser steps an update."""
    max_pass_kl: float | None = None
    """Leave out the remaining passes of an update when the approx_kl of one is above this."""
    microbatch_sequences: int = 32
    """Most sequences of a micro-batch, on each rank; the result does not depend on it."""
    microbatch_tokens: int | None = None
    """Most tokens of a micro-batch, padding included; sequences of like length go together."""
    value_clip: float | None = 0.2
    critic_warmup_updates: int = 2
    """First updates in which only the critic learns."""

    # Loop
    updates: int = 80
    eval_every: int = 10
    eval_limit: int = 128
    """Dev questions scored during training; 0 switches that off."""
    test_limit: int = 300
    """Questions of each set scored before and after training; 0 switches that off."""
    save_every: int = 10
    keep_checkpoints: int = 2
    max_skipped_minibatches: int = 10
    """Minibatches with a gradient that is not finite are skipped and recorded; more than this many end the run."""
    excess_norm_every: int = 0
    """Updates between measurements of the norm of the clipping-bias term C where the normalisation does not take it
    anyway; 0: never."""
    on_alarm: OnAlarm = "log"
    """When the collapse alarm begins to stand: "log" it, "stop" (saved and resumable), or "off"."""
    stop_after_minutes: float | None = None
    """End the run early (saved and resumable) when it has taken this long."""

    def __post_init__(self) -> None:
        row = self.algorithm_row()
        positive = (
            "questions_per_update", "group_size", "max_turn_tokens", "max_total_tokens", "minibatch_sequences",
            "passes", "microbatch_sequences", "updates", "eval_every", "save_every", "keep_checkpoints", "top_k",
            "max_observation_words", "max_query_chars", "max_turn_words", "max_total_words",
            "lr", "critic_lr", "max_grad_norm", "temperature", "value_clip",
            "stop_after_minutes", "kl_target", "kl_horizon_episodes", "max_pass_kl", "microbatch_tokens",
            "correction_high", "lora_alpha",
        )  # fmt: skip
        for name in positive:
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be greater than 0")
        not_negative = (
            "max_searches", "lr_warmup_updates", "critic_warmup_updates", "kl_reward_coef", "kl_loss_coef",
            "weight_decay", "eval_limit", "test_limit", "clip_low", "clip_high", "max_skipped_minibatches",
            "excess_norm_every",
            "correction_low", "lora_rank", "invalid_penalty", "search_cost", "max_staleness", "kv_cache_mb",
            "retrieval_window_ms",
        )  # fmt: skip
        for name in not_negative:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        if not 0 < self.gamma <= 1 or not 0 <= self.lam <= 1:
            raise ValueError(f"gamma is {self.gamma} and lam {self.lam}; both must lie between 0 and 1")
        if self.clip_low >= 1:
            raise ValueError(f"clip_low is {self.clip_low}; a ratio is kept above 1 - clip_low, so it must be below 1")
        self._check_environment()
        self._check_choices()
        if self.max_turn_tokens >= self.max_total_tokens:
            raise ValueError(
                f"max_turn_tokens ({self.max_turn_tokens}) must be below max_total_tokens ({self.max_total_tokens}), "
                "or no prompt fits"
            )
        if self.minibatch_sequences > self.episodes_per_update:
            raise ValueError(
                f"minibatch_sequences ({self.minibatch_sequences}) is more than the {self.episodes_per_update} "
                f"episodes of an update (questions_per_update {self.questions_per_update} x group_size "
                f"{self.group_size})"
            )
        if self.episodes_per_update % self.minibatch_sequences:
            raise ValueError(
                f"the {self.episodes_per_update} episodes of an update cannot be cut into minibatches of "
                f"{self.minibatch_sequences}; choose a divisor"
            )
        if row.group_based:
            if self.group_size < 2:
                raise ValueError(
                    f"algorithm {self.algorithm!r} compares the episodes of a group, but group_size is "
                    f"{self.group_size}; use at least 2"
                )
            if self.minibatch_sequences % self.group_size:
                raise ValueError(
                    f"minibatch_sequences ({self.minibatch_sequences}) is no multiple of group_size "
                    f"({self.group_size}); a group would be split over two optimiser steps"
                )
        elif row.needs_critic and self.critic == "none":
            raise ValueError(
                f"algorithm {self.algorithm!r} needs a critic, but critic is 'none'; use 'shared' or 'own'"
            )

    def _check_environment(self) -> None:
        """What is known of an environment before it is made; its own rules are checked when it is."""
        if ":" not in self.env and self.env not in ENVIRONMENTS:
            raise ValueError(f"unknown env {self.env!r}; known: {', '.join(ENVIRONMENTS)}, or module:Id of your own")
        for name, known in (("dialect", DIALECTS), ("chat_style", ("continuation", "chat"))):
            if getattr(self, name) not in (*known, getattr(type(self), name)):
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}")
        boxed = self.dialect == "boxed" or (self.dialect is None and self.env == "MathQA-v0")
        if boxed and self.max_searches:
            raise ValueError(
                f"the dialect 'boxed' (that of MathQA-v0) has no search, but max_searches is {self.max_searches}; "
                "set it to 0, or take another dialect"
            )

    def _check_choices(self) -> None:
        """Settings that only make sense together."""
        for name, known in (
            ("engine", ("hf", "vllm")),
            ("engine_gpus", ("shared", "own")),
            ("source", ("sync", "stream", "async")),
            ("lora_publish", ("merged", "adapter")),
            ("correction", ("none", "truncated_is", "icepop", "rejection", "decoupled")),
            ("correction_level", ("token", "turn", "sequence")),
            ("correction_pooling", ("mean", "sum")),
            ("factor_on", ("gradient", "step")),
            ("kl_reward_estimator", ("k1", "k2", "k3")),
            ("kl_loss_estimator", ("k1", "k2", "k3")),
            ("lr_schedule", ("constant", "linear", "cosine")),
            ("dtype", ("float32", "bfloat16")),
            ("sharding", ("auto", "ddp", "fsdp2")),
            ("on_alarm", ("log", "stop", "off")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}")
        if self.factor_on == "step" and self.algorithm_row().scope != "minibatch":
            raise ValueError(
                f"factor_on 'step' needs one factor for each optimiser step, but algorithm {self.algorithm!r} "
                f"normalises at scope {self.algorithm_row().scope}; use --scope minibatch with a normalisation"
            )
        if self.queue_groups is not None and (self.source != "async" or self.queue_groups < 1):
            raise ValueError(
                f"queue_groups is {self.queue_groups} and source {self.source!r}; it is for source 'async', at least 1"
            )
        if self.kv_cache_mb and self.engine != "hf":
            raise ValueError(f"kv_cache_mb is for engine 'hf'; engine {self.engine!r} keeps a cache of its own")
        if self.engine_gpus == "own" and self.engine != "vllm":
            raise ValueError(f"engine_gpus 'own' is for engine 'vllm', not {self.engine!r}")
        if self.lora_publish == "adapter" and not (self.lora_rank and self.engine == "vllm"):
            raise ValueError(
                f"lora_publish 'adapter' is for adapters that engine 'vllm' samples with, but lora_rank is "
                f"{self.lora_rank} and engine {self.engine!r}; set both, or take 'merged'"
            )
        if not 0 < self.engine_memory_share < 1:
            raise ValueError(f"engine_memory_share is {self.engine_memory_share}; it must lie between 0 and 1")
        if not 0 <= self.lr_final_share <= 1:
            raise ValueError(f"lr_final_share is {self.lr_final_share}; it is a share of lr, between 0 and 1")
        if self.kl_target is not None and not (self.kl_reward_coef or self.kl_loss_coef):
            raise ValueError("kl_target steers the KL's coefficients, and both are 0; give --kl-reward-coef a start")
        if self.kl_target is not None and self.kl_horizon_episodes < self.episodes_per_update:
            raise ValueError(
                f"kl_horizon_episodes ({self.kl_horizon_episodes}) must be at least the {self.episodes_per_update} "
                "episodes of an update: within one the coefficient may change by 20 % at most"
            )
        if self.correction != "none" and self.old_logprobs == "engine":
            raise ValueError(
                f"correction {self.correction!r} weighs the trainer's log-probabilities against the engine's, and "
                "old_logprobs 'engine' puts the engine's in their place; use one of the two"
            )
        if self.correction in ("icepop", "rejection"):
            if self.rejected_leave_denominator is None:
                raise ValueError(
                    f"correction {self.correction!r} drops tokens; say with rejected_leave_denominator whether they "
                    "leave the denominators too (it changes the objective)"
                )
            if self.correction_low >= self.correction_high:
                raise ValueError(
                    f"correction_low ({self.correction_low}) must be below correction_high ({self.correction_high})"
                )
        if self.microbatch_tokens is not None and self.microbatch_tokens < self.max_total_tokens:
            raise ValueError(
                f"microbatch_tokens ({self.microbatch_tokens}) is less than one sequence may have "
                f"(max_total_tokens {self.max_total_tokens}); raise it"
            )

    def environment_options(self) -> dict[str, Any]:
        """Keyword arguments of the environment, but for retriever and questions; None leaves one to it."""
        rules = {name: getattr(self, name) for name in _RULES}
        own = {name: value for name in _OWN if (value := getattr(self, name)) is not None}
        return {"reward": self.reward, "prompt": self.prompt_file or self.prompt, **rules, **own}

    @property
    def episodes_per_update(self) -> int:
        return self.questions_per_update * self.group_size

    @property
    def optimiser_steps_per_update(self) -> int:
        return self.episodes_per_update // self.minibatch_sequences * self.passes

    @property
    def needs_reference(self) -> bool:
        return bool(self.kl_reward_coef or self.kl_loss_coef)

    def algorithm_row(self) -> Algorithm:
        """The row of the table with this run's overrides."""
        columns = (
            "advantages", "level", "normalisation", "threshold", "scope", "trigger_level", "pooling", "reduction",
            "loss", "dual_clip", "norm_length",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in columns if getattr(self, name) is not None}
        return algorithm(self.algorithm, **given)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, default=str, sort_keys=True)
