"""Ops on trajectories: ids, masks, log-probabilities, files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from retrieval_index.types import Hit, Passage
from sorl_algos.batch import collate
from sorl_algos.losses.segments import level_ratio
from sorl_algos.models import Policy
from sorl_algos.rollout.collect import collect
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.renderer import Renderer
from sorl_env.observations import render_observation
from sorl_env.trajectory import Trajectory, Turn, read_jsonl, write_jsonl
from tests.cases.toys import ExactEngine, FixedEnv, GivenLogits, byte_tokenizer, vocabulary_tokenizer

Given = Mapping[str, Any]


def build_trajectory(given: Given) -> Any:
    observed: list[int] = []
    turns = []
    for part in given["segments"]:
        if part["role"] == "assistant":
            turns.append(_turn(observed, part["ids"]))
            observed = []
        else:
            observed = observed + list(part["ids"])
    trajectory = _trajectory(turns)
    prompt = len(trajectory.prompt_ids)
    return {
        "prompt_ids": list(trajectory.prompt_ids),
        "response_ids": trajectory.token_ids()[prompt:],
        "loss_mask": [int(trained) for trained in trajectory.loss_mask()[prompt:]],
        "turn_of_each_trained_token": [number for number in trajectory.turn_ids() if number >= 0],
    }


def next_prompt(given: Given) -> Any:
    """What the engine is given for its second turn, by the real collector over a tokenizer of this vocabulary."""
    vocabulary = {int(index): text for index, text in given["vocab"].items()}
    tokenizer = vocabulary_tokenizer(vocabulary)
    engine = ExactEngine([given["sampled_ids"], given["sampled_ids"]])
    env = FixedEnv(tokenizer.decode(given["prompt_ids"]), [tokenizer.decode(given["observation_ids"])])
    collect(env, engine, Renderer(tokenizer), ["q"])
    return {"next_prompt_ids": engine.prompts[1]}


def mask_from_template(given: Given) -> Any:
    sampled = given["sampled_ids"]
    before = given["full_ids"][: len(given["full_ids"]) - len(sampled)]
    trajectory = _trajectory([_turn(before, sampled)])
    assert trajectory.token_ids() == given["full_ids"]
    return {"loss_mask": [int(trained) for trained in trajectory.loss_mask()]}


def shift(given: Given) -> Any:
    """Log-probabilities read off the logits of the position before, by the real policy."""
    ids, mask = torch.tensor([given["ids"]]), torch.tensor([given["token_mask"]]).bool()
    size = max(given["ids"]) + 1
    rows = torch.zeros(1, len(given["ids"]), size, dtype=torch.float64)
    for place, logp in enumerate(given["logp_of_next_token"]):
        chance = torch.tensor(logp, dtype=torch.float64).exp()
        rows[0, place] = ((1 - chance) / (size - 1)).log()
        rows[0, place, given["ids"][place + 1]] = logp
    policy = Policy(GivenLogits(rows).double())
    logp = policy(ids, torch.ones_like(mask), mask).logp.detach()
    return {
        "mask_for_logp": [int(trained) for trained in mask[0, 1:]],
        "sum_logp": float(logp[mask].sum()),
    }


def sequence_ratio(given: Given) -> Any:
    """The appended token is the environment's: it opens the observation of the next turn."""
    sampled, trained = given["rollout_logp"], given["train_logp"]
    appended = len(trained) - len(sampled)
    turns = [
        _turn([1], range(2, 2 + len(sampled)), sampled),
        _turn([9] * max(appended, 1), [8], [0.0]),
    ]
    batch = collate([_trajectory(turns)], pad_id=0)
    row = slice(1, 1 + len(trained))
    mask, old = batch.loss_mask[:, row], batch.rollout_logp[:, row]
    ratio = level_ratio(torch.tensor([trained]), old, mask, batch.turn_ids[:, row], "sequence")
    return {"loss_mask": mask[0].int().tolist(), "ratio": float(ratio[0, 0])}


def pad_batch(given: Given) -> Any:
    batch = collate([_trajectory([_turn(row[:1], row[1:])]) for row in given["rows"]], pad_id=given["pad_id"])
    return {"ids": batch.token_ids.tolist(), "mask": batch.attention_mask.int().tolist()}


def merge_turns(given: Given) -> Any:
    lengths: Mapping[str, int] = given["lengths"]
    tokenizer = vocabulary_tokenizer({0: "p"})
    letter = tokenizer.encode("a", add_special_tokens=False)[0]
    said = [(letter,) * length for name, length in lengths.items() if name.startswith("assistant")]
    seen = ["o" * length for name, length in lengths.items() if name.startswith("environment")]
    [trajectory] = collect(
        FixedEnv("p", seen),
        ExactEngine(said),
        Renderer(tokenizer),
        ["q"],
        sampling=Sampling(max_tokens=given["per_turn_max_new_tokens"]),
        max_total_tokens=1 + given["max_total_response"],
    )
    batch = collate([trajectory], pad_id=0)
    return {
        "response_len": batch.token_ids.shape[1] - len(trajectory.prompt_ids),
        "trained_tokens": int(batch.loss_mask.sum()),
    }


def decode_partial(given: Given) -> Any:
    tokenizer = byte_tokenizer({int(index): bytes.fromhex(value) for index, value in given["token_bytes_hex"].items()})
    sampled = tuple(given["sampled_ids"])
    sampling = Sampling(max_tokens=len(sampled) if given["finish_reason"] == "length" else 64)
    [trajectory] = collect(FixedEnv("p"), ExactEngine([sampled]), Renderer(tokenizer), ["q"], sampling=sampling)
    turn = trajectory.turns[0]
    return {
        "stored_ids": list(turn.action_ids),
        "text": turn.action_text,
        "no_exception": True,
        "ids_reencoded_from_text": turn.action_ids != sampled,
    }


def encode_rendered_chat(given: Given) -> Any:
    """The rendered chat is taken as a template around its last piece of text."""
    vocabulary = {int(index): text for index, text in given["vocab"].items()}
    pieces = sorted(vocabulary.values(), key=len, reverse=True)
    text = next(piece for piece in pieces if given["rendered"].endswith(piece))
    template = given["rendered"].removesuffix(text).replace("{", "{{'{'}}")
    tokenizer = vocabulary_tokenizer(
        vocabulary, bos=given["bos_text"], chat_template=template + "{{ messages[0]['content'] }}"
    )
    assert tokenizer.encode(text)[0] == given["bos_id"]  # this tokenizer would add another one
    return {"ids": Renderer(tokenizer).first(text)}


def encode_observation(given: Given) -> Any:
    specials = {int(index): text for index, text in given["special_ids"].items()}
    renderer = Renderer(vocabulary_tokenizer({}, specials=specials))
    as_it_is = renderer.next(given["passage"]) + renderer.first(given["passage"])
    shown = renderer.next(render_observation([Hit(Passage("p", "", given["passage"]), 1.0)]))
    return {"count_of_special_ids_from_passage": sum(token in specials for token in [*as_it_is, *shown])}


def dump_jsonl(given: Given) -> Any:
    written = [_trajectory([Turn((1,), (2,), (-0.5,), 0.0, text, text)]) for text in given["texts"]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trajectories.jsonl"
        write_jsonl(path, written)
        lines = path.read_bytes().decode("utf-8").split("\n")
        return {
            "lines_when_split_on_LF": sum(bool(line) for line in lines),
            "round_trip_equal": read_jsonl(path) == written,
        }


TRAJECTORY_OPS: dict[str, Callable[[Given], Any]] = {
    "build_trajectory": build_trajectory,
    "next_prompt": next_prompt,
    "mask_from_template": mask_from_template,
    "shift": shift,
    "sequence_ratio": sequence_ratio,
    "pad_batch": pad_batch,
    "merge_turns": merge_turns,
    "decode_partial": decode_partial,
    "encode_rendered_chat": encode_rendered_chat,
    "encode_observation": encode_observation,
    "dump_jsonl": dump_jsonl,
}


def _turn(observed: Sequence[int], sampled: Sequence[int], logprobs: Sequence[float] | None = None) -> Turn:
    logprobs = [-0.5] * len(sampled) if logprobs is None else logprobs
    return Turn(tuple(observed), tuple(sampled), tuple(logprobs), 0.0, "", "")


def _trajectory(turns: Sequence[Turn]) -> Trajectory:
    return Trajectory(tuple(turns), "q", "q", 0, "answered")
