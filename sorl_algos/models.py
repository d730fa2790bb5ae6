"""Policy, critic and reference: loading them, and the log-probability of each action token.

The one shift of the code base happens here: column t of what `Policy` and `Critic` return is read off the hidden
state at t - 1, so it speaks of ``token_ids[:, t]`` like every other (B, T) tensor.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sorl_algos.batch import Batch
from sorl_algos.distributed import agreed_maximum
from sorl_algos.lora import CRITIC, POLICY, Adapters, merged_weights
from sorl_algos.losses.segments import at_least_float32
from sorl_algos.sharding import layer_class_names
from sorl_algos.token_scores import token_scores

BASE_MODEL_DIR = Path(__file__).parent / "base_model"


@dataclass(frozen=True, slots=True)
class TokenScores:
    """``(B, T)`` tensors, zero where the loss mask is False; ``values`` only from a policy with a shared critic."""

    logp: Tensor
    entropy: Tensor
    values: Tensor | None = None


class ValueHead(nn.Module):
    """Hidden states ``(..., H)`` to values ``(...)``. The last layer starts at zero, so the first values are zero."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden_size, hidden_size)
        self.outer = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden.to(self.inner.weight.dtype)  # a trunk in half precision, a head in full
        return at_least_float32(self.outer(nn.functional.silu(self.inner(hidden))).squeeze(-1))


class Trunk:
    """A language model without its head, run in the chosen precision, keeping few activations where that is wanted.

    Args:
        compute_dtype: of matrix products (autocast); the weights stay as they are. None: the weights' own.
        checkpointing: keep only what enters each layer, and run the layer again in the backward pass.
        adapters: those in the model; a layer that is run again sees the adapter it saw the first time.
    """

    def __init__(
        self, *, compute_dtype: torch.dtype | None = None, checkpointing: bool = False, adapters: Adapters | None = None
    ) -> None:
        self.compute_dtype, self.checkpointing, self.adapters = compute_dtype, checkpointing, adapters

    def attach(self, base_model: Any) -> None:
        """Makes the layers ready to be run again in backward."""
        if self.checkpointing:
            again = {"use_reentrant": False, "context_fn": self._contexts}
            base_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=again)

    def action_hidden(self, base_model: Any, token_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor) -> Tensor:
        """Hidden states ``(N, H)`` from which the N action tokens are predicted, row by row."""
        with self.precision(token_ids.device), self._checkpointed(base_model):
            hidden = base_model(
                input_ids=token_ids, attention_mask=attention_mask.long(), use_cache=False
            ).last_hidden_state
        return hidden[:, :-1][loss_mask[:, 1:]]

    def precision(self, device: torch.device) -> AbstractContextManager[Any]:
        # Each weight is used once in a forward: keeping its cast copy until the end would only cost memory.
        on = self.compute_dtype is not None
        return torch.autocast(device.type, dtype=self.compute_dtype, enabled=on, cache_enabled=False)

    @contextmanager
    def _checkpointed(self, base_model: Any) -> Iterator[None]:
        """transformers makes activations again only in layers in training mode, which here is never on: no module
        inside a layer (dropout) is switched, only the layer itself, and only while it runs."""
        layers = []
        if self.checkpointing and torch.is_grad_enabled():
            names = layer_class_names(base_model)
            # a layer that is split over ranks has a class of its own, derived from the first
            layers = [m for m in base_model.modules() if names & {kind.__name__ for kind in type(m).__mro__}]
        for layer in layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in layers:
                layer.training = False

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if self.adapters is None:
            return nullcontext(), nullcontext()
        return nullcontext(), self.adapters.use(self.adapters.acting)


def _scatter(values: Tensor, loss_mask: Tensor) -> Tensor:
    """``(N,)`` values of the action tokens into a ``(B, T)`` tensor of zeros, differentiably."""
    out = values.new_zeros(loss_mask.shape)
    return out.masked_scatter(loss_mask, values)


class Policy(nn.Module):
    """A causal language model seen as a policy over tokens, with an optional critic on the same weights.

    ``shared_critic``: a value head reads the trunk's hidden states without sending gradient into them, a critic that
    costs one small matrix product. With ``adapters`` that hold one for the critic, the head reads a second pass
    through the trunk with that adapter, and both learn. Dropout is never on (`train` leaves the module in evaluation
    mode): old, reference and new log-probabilities come from one function. ``logit_chunk``: action tokens whose
    logits exist at one time (None: by the vocabulary). ``compute_dtype`` and ``checkpointing``: see `Trunk`.
    """

    def __init__(
        self,
        language_model: Any,
        *,
        shared_critic: bool = False,
        logit_chunk: int | None = None,
        adapters: Adapters | None = None,
        compute_dtype: torch.dtype | None = None,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if getattr(language_model.config, "final_logit_softcapping", None):
            raise ValueError(
                f"model {language_model.config.name_or_path!r} caps its logits (final_logit_softcapping), which "
                "the log-probabilities here would miss; use a model without it"
            )
        self.lm = language_model
        self.logit_chunk, self.adapters = logit_chunk, adapters
        self.critic_adapter = adapters is not None and bool(adapters.parameters(CRITIC))
        with_head = shared_critic or self.critic_adapter
        self.value_head = ValueHead(language_model.config.hidden_size) if with_head else None
        self.trunk = Trunk(compute_dtype=compute_dtype, checkpointing=checkpointing, adapters=adapters)
        self.trunk.attach(language_model.base_model)
        self.eval()

    def train(self, mode: bool = True) -> Policy:
        return super().train(False)

    def value_parameters(self) -> list[nn.Parameter]:
        """What the value loss moves: the head, and the critic's adapter."""
        head = [] if self.value_head is None else list(self.value_head.parameters())
        return head + ([] if self.adapters is None else self.adapters.parameters(CRITIC))

    def policy_parameters(self) -> list[nn.Parameter]:
        """What the policy loss moves."""
        values = {id(parameter) for parameter in self.value_parameters()}
        return [p for p in self.lm.parameters() if p.requires_grad and id(p) not in values]

    def forward(
        self,
        token_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        temperature: float = 1.0,
        base_only: bool = False,
    ) -> TokenScores:
        """Scores of the action tokens. Tensors ``(B, T)``; column 0 is never an action token.

        ``base_only``: of the model without its adapters, and no values.
        """
        inputs = (self.lm.base_model, token_ids, attention_mask, loss_mask)
        with self._acting(None if base_only else POLICY):
            hidden = self.trunk.action_hidden(*inputs)
        head = self.lm.get_output_embeddings()
        logp, entropy = token_scores(
            hidden,
            token_ids[loss_mask],
            head.weight,
            head.bias,
            temperature=temperature,
            compute_dtype=self.trunk.compute_dtype,
            tokens_at_once=self.logit_chunk,
        )
        values = None
        if self.value_head is not None and not base_only:
            seen = hidden.detach()
            if self.critic_adapter:
                with self._acting(CRITIC):
                    seen = self.trunk.action_hidden(*inputs)
            values = _scatter(self.value_head(seen), loss_mask)
        return TokenScores(logp=_scatter(logp, loss_mask), entropy=_scatter(entropy, loss_mask), values=values)

    def _acting(self, name: str | None) -> AbstractContextManager[None]:
        return nullcontext() if self.adapters is None else self.adapters.use(name)


@dataclass(frozen=True, slots=True)
class BaseReference:
    """The reference of a policy with adapters: the policy's own model, as `Learner.policy` runs it, without them."""

    policy: Callable[..., TokenScores]

    def __call__(
        self, token_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, temperature: float = 1.0
    ) -> TokenScores:
        with torch.no_grad():
            return self.policy(token_ids, attention_mask, loss_mask, temperature, base_only=True)


class Critic(nn.Module):
    """A value model of its own: the policy's trunk, copied, with a scalar head. Settings as for `Policy`."""

    def __init__(
        self, language_model: Any, *, compute_dtype: torch.dtype | None = None, checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(language_model.base_model)
        self.head = ValueHead(language_model.config.hidden_size)
        self._runner = Trunk(compute_dtype=compute_dtype, checkpointing=checkpointing)
        self._runner.attach(self.trunk)
        self.eval()

    def train(self, mode: bool = True) -> Critic:
        return super().train(False)

    def forward(self, token_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor) -> Tensor:
        """Values ``(B, T)``: column t is the value before token t is sampled; zero off the action tokens."""
        return _scatter(
            self.head(self._runner.action_hidden(self.trunk, token_ids, attention_mask, loss_mask)), loss_mask
        )


def make_policy_and_critic(
    language_model: Any,
    *,
    critic: Literal["shared", "own", "none"],
    compute_dtype: torch.dtype | None = None,
    checkpointing: bool = False,
    lora_rank: int = 0,
    lora_alpha: float = 32.0,
    lora_targets: str = "all-linear",
) -> tuple[Policy, Critic | None]:
    """The policy, and the critic where it is a model of its own; numbers as in `TrainConfig`.

    With adapters (``lora_rank`` above 0) every critic is part of the policy: "own" is a second adapter.
    """
    adapters, own = None, None
    if lora_rank:
        adapters = Adapters(
            language_model, rank=lora_rank, alpha=lora_alpha, targets=lora_targets, critic=critic == "own"
        )
    elif critic == "own":
        own = Critic(language_model, compute_dtype=compute_dtype, checkpointing=checkpointing)
    policy = Policy(
        language_model,
        shared_critic=critic == "shared",
        adapters=adapters,
        compute_dtype=compute_dtype,
        checkpointing=checkpointing,
    )
    return policy, own


def full_weights(policy: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of the policy's language model as an engine wants them: whole, adapters merged, tied ones once.

    Where weights are split over ranks every rank must go through all of them.
    """
    return merged_weights(policy.lm)


def token_logprobs(policy: Callable[..., TokenScores], batch: Batch, *, temperature: float = 1.0) -> TokenScores:
    """Log-probability, entropy (and shared values) of each action token of the batch, ``(B, T)``."""
    return policy(batch.token_ids, batch.attention_mask, batch.loss_mask, temperature)


@torch.no_grad()
def score(
    batch: Batch,
    policy: nn.Module,
    *,
    microbatch_sequences: int,
    microbatch_tokens: int | None = None,
    reference: Callable[..., TokenScores] | None = None,
    critic: nn.Module | None = None,
    temperature: float = 1.0,
) -> tuple[Batch, Tensor]:
    """Fills old_logp, ref_logp and values before the first minibatch; also returns the entropies ``(B, T)``."""
    old_logp, entropy, values, ref_logp = (torch.zeros_like(batch.rollout_logp) for _ in range(4))
    has_values = critic is not None
    pieces = batch.pieces(microbatch_sequences, microbatch_tokens)
    wanting = agreed_maximum(len(pieces), batch.token_ids.device) - len(pieces)
    # Ranks meet in every forward: one with fewer micro-batches goes through its first again.
    for index, micro in [pieces[0]] * wanting + pieces:
        width = micro.token_ids.shape[1]
        scores = token_logprobs(policy, micro, temperature=temperature)
        old_logp[index, :width], entropy[index, :width] = scores.logp, scores.entropy
        if critic is not None:
            values[index, :width] = critic(micro.token_ids, micro.attention_mask, micro.loss_mask)
        elif scores.values is not None:
            has_values = True
            values[index, :width] = scores.values
        if reference is not None:
            ref_logp[index, :width] = token_logprobs(reference, micro, temperature=temperature).logp
    return (
        batch.replace(
            old_logp=old_logp,
            values=values if has_values else None,
            ref_logp=ref_logp if reference is not None else None,
        ),
        entropy,
    )


def load_language_model(name: str, *, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A causal language model and its tokenizer: ``"base"``, ``"smollm2"``, a directory, or a hub name.

    Raises:
        ValueError: nothing of that name; the message says what was tried and what to do.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # the scripts draw their own
    source = resolve_model(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ValueError(f"model {name!r} could not be loaded from {source}: {first_line}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def resolve_model(name: str) -> str:
    """Where a model of that name lies, checked without loading it."""
    if name == "base":
        if not (BASE_MODEL_DIR / "model.safetensors").exists():
            raise ValueError(
                f"the bundled base model is missing from {BASE_MODEL_DIR}; run `python scripts/make_base.py`"
            )
        return str(BASE_MODEL_DIR)
    if name == "smollm2":
        from sorl_algos.smollm2 import smollm2_directory

        return str(smollm2_directory())
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ValueError(f"directory {path} holds no model (no config.json); give a saved model's directory")
        return str(path)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(
            f"unknown model {name!r}; known: base, smollm2, a directory with config.json, or a hub name owner/name"
        )
    return name


def save_language_model(
    model: Any, tokenizer: Any, directory: Path, *, weights: dict[str, Tensor] | None = None
) -> None:
    """Writes model and tokenizer as safetensors and JSON; the directory appears only when whole.

    ``weights``: in place of the model's own (those of `full_weights`, where adapters or ranks hold them).
    """
    partial = directory.with_name(f"{directory.name}.partial-{os.getpid()}")
    model.save_pretrained(partial, state_dict=weights)
    tokenizer.save_pretrained(partial)
    if directory.exists():
        old = directory.with_name(f"{directory.name}.old-{os.getpid()}")
        os.replace(directory, old)
        os.replace(partial, directory)
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    else:
        os.replace(partial, directory)
