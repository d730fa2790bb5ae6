"""Policy, critic and reference: loading them, and the log-probability of each action token.

The one shift of the code base happens here: column t of what `Policy` and `Critic` return is read off the hidden
state at t - 1, so it speaks of ``token_ids[:, t]`` like every other (B, T) tensor.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sorl_algos.batch import Batch
from sorl_algos.distributed import agreed_maximum
from sorl_algos.losses.segments import at_least_float32

# Action tokens whose logits exist at one time: 2,048 x a vocabulary of 150k in fp32 is 1.2 GB, of 4k 34 MB.
LOGIT_CHUNK = 2048
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


def _action_hidden(language_model: Any, token_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor) -> Tensor:
    """Hidden states ``(N, H)`` from which the N action tokens are predicted, row by row."""
    hidden = language_model.base_model(
        input_ids=token_ids, attention_mask=attention_mask.long(), use_cache=False
    ).last_hidden_state
    return hidden[:, :-1][loss_mask[:, 1:]]


def _scatter(values: Tensor, loss_mask: Tensor) -> Tensor:
    """``(N,)`` values of the action tokens into a ``(B, T)`` tensor of zeros, differentiably."""
    out = values.new_zeros(loss_mask.shape)
    return out.masked_scatter(loss_mask, values)


def _chunk_logp(
    hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = at_least_float32(nn.functional.linear(hidden, weight, bias)) / temperature
    log_normaliser = logits.logsumexp(-1)
    logp = logits.gather(-1, targets[:, None]).squeeze(-1) - log_normaliser
    with torch.no_grad():
        entropy = log_normaliser - ((logits - log_normaliser[:, None]).exp() * logits).sum(-1)
    return logp, entropy


class Policy(nn.Module):
    """A causal language model seen as a policy over tokens, with an optional value head on its trunk.

    The value head reads the trunk's hidden states without sending gradient into them: a critic that costs one small
    matrix product. Dropout is never on (`train` leaves the module in evaluation mode): old, reference and new
    log-probabilities come from one function. ``logit_chunk``: action tokens whose logits exist at one time.
    """

    def __init__(
        self, language_model: Any, *, shared_critic: bool = False, logit_chunk: int = LOGIT_CHUNK
    ) -> None:
        super().__init__()
        if getattr(language_model.config, "final_logit_softcapping", None):
            raise ValueError(
                f"model {language_model.config.name_or_path!r} caps its logits (final_logit_softcapping), which "
                "the log-probabilities here would miss; use a model without it"
            )
        self.lm = language_model
        self.logit_chunk = logit_chunk
        self.value_head = ValueHead(language_model.config.hidden_size) if shared_critic else None
        self.eval()

    def train(self, mode: bool = True) -> Policy:
        return super().train(False)

    def forward(
        self, token_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, temperature: float = 1.0
    ) -> TokenScores:
        """Scores of the action tokens. All inputs ``(B, T)``; column 0 is never an action token."""
        hidden = _action_hidden(self.lm, token_ids, attention_mask, loss_mask)
        targets = token_ids[loss_mask]
        head = self.lm.get_output_embeddings()
        logps, entropies = [], []
        for start in range(0, max(len(targets), 1), self.logit_chunk):
            piece = slice(start, start + self.logit_chunk)
            arguments = (hidden[piece], targets[piece], head.weight, head.bias, temperature)
            if torch.is_grad_enabled() and len(targets) > self.logit_chunk:
                # The logits of a chunk are made again in backward: never more than one chunk of them at a time.
                logp, entropy = checkpoint(_chunk_logp, *arguments, use_reentrant=False)
            else:
                logp, entropy = _chunk_logp(*arguments)
            logps.append(logp)
            entropies.append(entropy)
        values = None
        if self.value_head is not None:
            values = _scatter(self.value_head(hidden.detach()), loss_mask)
        return TokenScores(
            logp=_scatter(torch.cat(logps), loss_mask),
            entropy=_scatter(torch.cat(entropies), loss_mask),
            values=values,
        )


class Critic(nn.Module):
    """A value model of its own: the policy's trunk, copied, with a scalar head."""

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(language_model.base_model)
        self.head = ValueHead(language_model.config.hidden_size)
        self.eval()

    def train(self, mode: bool = True) -> Critic:
        return super().train(False)

    def forward(self, token_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor) -> Tensor:
        """Values ``(B, T)``: column t is the value before token t is sampled; zero off the action tokens."""
        hidden = self.trunk(
            input_ids=token_ids, attention_mask=attention_mask.long(), use_cache=False
        ).last_hidden_state
        return _scatter(self.head(hidden[:, :-1][loss_mask[:, 1:]]), loss_mask)


def token_logprobs(policy: nn.Module, batch: Batch, *, temperature: float = 1.0) -> TokenScores:
    """Log-probability, entropy (and shared values) of each action token of the batch, ``(B, T)``."""
    return policy(batch.token_ids, batch.attention_mask, batch.loss_mask, temperature)


@torch.no_grad()
def score(
    batch: Batch,
    policy: nn.Module,
    *,
    microbatch_sequences: int,
    microbatch_tokens: int | None = None,
    reference: nn.Module | None = None,
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


def save_language_model(model: Any, tokenizer: Any, directory: Path) -> None:
    """Writes model and tokenizer as safetensors and JSON; the directory appears only when whole."""
    partial = directory.with_name(f"{directory.name}.partial-{os.getpid()}")
    model.save_pretrained(partial)
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
