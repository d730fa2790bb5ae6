"""SyncSource: what it plays is a function of (seed, version); groups stay apart; weights are published."""

from __future__ import annotations

from typing import Any

import pytest

from sorl_algos.models import Policy
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.hf import HFEngine
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.rollout.source import SyncSource
from sorl_env.questions import Question, QuestionSet
from tests.fakes import ScriptedEngine
from tests.sorl_algos.small_game import QUESTIONS, make_env

TEN = QuestionSet(Question(f"t{number}", f"What is {number}?", ("x",)) for number in range(10))


def source_of(tokenizer: Any, engine: Any, questions: QuestionSet = QUESTIONS, **changes: Any) -> SyncSource:
    settings: dict[str, Any] = {"questions_per_update": 2, "group_size": 2, "seed": 0}
    return SyncSource(
        make_env(4, questions=questions),
        engine,
        Renderer(tokenizer),
        questions,
        sampling=Sampling(max_tokens=6),
        **settings | changes,
    )


def played(tokenizer: Any, version: int, **changes: Any) -> list[str]:
    engine = ScriptedEngine(tokenizer, lambda prompt: "<answer> x</answer>")
    source = source_of(tokenizer, engine, TEN, **changes)
    source.version = version
    return [item.question_id for item in next(source)]


def test_the_position_in_the_data_follows_the_version(tokenizer: Any) -> None:
    # 10 questions, 2 an update: versions 0 to 4 are one pass over all of them, version 5 begins the next.
    passes = [played(tokenizer, version)[::2] for version in range(5)]
    assert sorted(name for pair in passes for name in pair) == sorted(TEN.ids)
    assert played(tokenizer, 3)[::2] == passes[3]  # a resumed run needs no state
    assert played(tokenizer, 5)[::2] == [question.id for question in TEN.batch(0, 10, 2)]
    assert [played(tokenizer, version, seed=1)[::2] for version in range(5)] != passes


def test_groups_repeat_a_question_and_stay_apart(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, lambda prompt: "<answer> x</answer>")
    one = QuestionSet([Question("only", "What?", ("x",))])
    source = source_of(tokenizer, engine, one, questions_per_update=3, group_size=4)
    trajectories = next(source)
    assert [item.question_id for item in trajectories] == ["only"] * 12
    assert [item.group_id for item in trajectories] == [0] * 4 + [1] * 4 + [2] * 4


def test_equal_weights_and_version_give_equal_trajectories(tokenizer: Any, make_model: Any) -> None:
    def run(version: int, seed: int = 0) -> Any:
        policy = Policy(make_model())
        source = source_of(tokenizer, HFEngine(policy.lm, tokenizer), seed=seed)
        source.publish(policy, version)
        return next(iter(source))

    first = run(2)
    assert run(2) == first and {item.policy_version for item in first} == {2}
    assert run(3) != first and run(2, seed=1) != first
    # the episodes of a group are different samples
    by_group = {item.group_id: [] for item in first}
    for item in first:
        by_group[item.group_id].append(item.turns[0].action_ids)
    assert all(len(set(samples)) > 1 for samples in by_group.values())


def test_publishing_hands_the_weights_to_an_engine_of_its_own(tokenizer: Any, make_model: Any) -> None:
    policy, engine = Policy(make_model(4)), HFEngine(make_model(0), tokenizer)
    source_of(tokenizer, engine).publish(policy, 1)
    theirs = dict(engine.model.state_dict())
    assert all((theirs[name] == tensor).all() for name, tensor in policy.lm.state_dict().items())
    assert engine.policy_version == 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_together_play_what_one_rank_plays(ranks: int, tokenizer: Any, make_model: Any) -> None:
    """Different questions on each rank, whole groups, in order; and the same tokens, places and groups."""

    def batch(**changes: Any) -> list[Any]:
        policy = Policy(make_model())
        source = source_of(
            tokenizer, HFEngine(policy.lm, tokenizer), TEN, questions_per_update=4, group_size=2, seed=3, **changes
        )
        source.publish(policy, 2)
        return next(source)

    alone = batch()
    shares = [batch(rank=rank, ranks=ranks) for rank in range(ranks)]
    assert [len(share) for share in shares] == [8 // ranks] * ranks
    together = [item for share in shares for item in share]
    assert [item.question_id for item in together] == [q.id for q in TEN.batch(3, 8, 4) for _ in range(2)]
    assert [item.group_id for item in together] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [[turn.action_ids for turn in item.turns] for item in together] == [
        [turn.action_ids for turn in item.turns] for item in alone
    ]


def test_questions_that_cannot_be_shared_out_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"questions_per_update \(2\) cannot be shared by 3 ranks; choose a multiple"):
        source_of(tokenizer, ScriptedEngine(tokenizer, []), ranks=3)
