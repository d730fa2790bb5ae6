"""From environment to tensors, over tokenizers of every family, any text and any sampled ids:

the prompt of a turn starts with all ids of the turns before it; nothing that was decoded is encoded; masks, runs and
turn ids agree; files and verl's rows keep everything.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_algos.batch import collate
from sorl_algos.losses.segments import turn_ids_from_mask
from sorl_algos.rollout.collect import collect
from sorl_algos.rollout.renderer import Renderer
from sorl_env.audit import audit
from sorl_env.trajectory import Trajectory, to_row
from sorl_env.trajectory_files import read_trajectories, write_trajectories
from sorl_env.verl_rows import trajectory_from_verl, trajectory_to_verl
from tests.cases.toys import ExactEngine, FixedEnv
from tests.tokenizers import FAMILIES

# any text but lone surrogates, with the strings that tempt a tokenizer
TEXT = st.lists(
    st.sampled_from(["<s>", "</search>", "<|end|>", "<|user|>", " ", "\n", "hello", "é", "🧪", "\u2028", "</s>"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    max_size=6,
).map("".join)
SEEN = TEXT.map(lambda text: text + "x")  # an observation that renders to at least one token
IDS = st.lists(st.integers(0, 299), min_size=1, max_size=8)


class OneWay:
    """A tokenizer that refuses to encode what it decoded, unless the environment wrote the same."""

    def __init__(self, tokenizer: Any, written: set[str]) -> None:
        self._tokenizer, self._written = tokenizer, written
        self.decoded: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: Any, **options: Any) -> str:
        text = self._tokenizer.decode(ids, **options)
        self.decoded.add(text)
        return text

    def encode(self, text: str, **options: Any) -> list[int]:
        assert text in self._written or text not in self.decoded
        return self._tokenizer.encode(text, **options)


@cache
def tokenizer_of(family: str) -> Any:
    return FAMILIES[family]()


def play(
    family: str, first: str, observations: list[str], script: list[list[int]]
) -> tuple[Trajectory, ExactEngine]:
    tokenizer = OneWay(tokenizer_of(family), {first, *observations})
    engine = ExactEngine(script)
    [trajectory] = collect(FixedEnv(first, observations), engine, Renderer(tokenizer), ["q"])
    return trajectory, engine


EPISODES = st.integers(1, 4).flatmap(
    lambda turns: st.tuples(
        SEEN, st.lists(SEEN, min_size=turns - 1, max_size=turns - 1), st.lists(IDS, min_size=turns, max_size=turns)
    )
)


@pytest.mark.parametrize("family", FAMILIES)
@given(episode=EPISODES)
@settings(max_examples=40)
def test_append_only_and_one_way(family: str, episode: tuple[str, list[str], list[list[int]]]) -> None:
    first, observations, script = episode
    trajectory, engine = play(family, first, observations, script)
    for before, after, sampled in zip(engine.prompts, engine.prompts[1:], script, strict=False):
        assert after[: len(before) + len(sampled)] == [*before, *sampled]
    assert [list(turn.action_ids) for turn in trajectory.turns] == script
    known = tokenizer_of(family)
    begin = known.convert_tokens_to_ids("<s>")
    if "BOS" in family and not family.startswith("no"):  # whatever the text spells out
        assert list(trajectory.prompt_ids).count(begin) == 1 and trajectory.prompt_ids[0] == begin
    else:
        assert begin not in trajectory.prompt_ids or family == "SentencePiece"
    mask, turn_ids = trajectory.loss_mask(), trajectory.turn_ids()
    assert [number >= 0 for number in turn_ids] == mask
    batch = collate([trajectory], known.pad_token_id)
    assert turn_ids_from_mask(batch.loss_mask)[0].tolist() == turn_ids
    assert int(batch.attention_mask.sum()) == len(mask)  # also where the pad token is a real one
    assert audit([to_row(trajectory)]).sound


@pytest.mark.parametrize("family", FAMILIES)
@given(text=TEXT)
@settings(max_examples=40)
def test_untrusted_text_never_becomes_a_special_token(family: str, text: str) -> None:
    tokenizer = tokenizer_of(family)
    assert not set(Renderer(tokenizer).next(text)) & set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}


@given(episodes=st.lists(EPISODES, max_size=3))
@settings(max_examples=30)
def test_files_and_verl_rows_keep_everything(episodes: list[Any]) -> None:
    played = [play("byte-level BPE", *episode)[0] for episode in episodes]
    assert [trajectory_from_verl(trajectory_to_verl(one)) for one in played] == played
    with tempfile.TemporaryDirectory() as folder:
        for name, verl in (("t.jsonl", False), ("t.jsonl.gz", False), ("t.parquet", False), ("v.parquet", True)):
            path = Path(folder) / name
            assert write_trajectories(path, played, verl=verl) == len(played)
            assert read_trajectories(path) == played
