"""How many environment steps a second, beside GEM (package gem-llm), on the same episodes in the same run.

python scripts/bench_env.py                     ours alone where GEM is not installed
python scripts/bench_env.py --seconds 5 --rounds 5

Each episode is one turn without retrieval: a question is asked, the policy's answer is parsed and scored by exact
match. GEM plays it in its QaEnv. A step is one turn with the reset that goes before it. Rounds alternate between the
two, so that a busy machine slows both; the median of the rounds is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import cycle
from typing import Any

import gymnasium

import sorl_env  # noqa: F401  (registers the environments)
from retrieval_index.types import Hit
from sorl_env.questions import Question, QuestionSet
from sorl_env.search_qa import SearchQAEnv

QUESTIONS = QuestionSet(Question(str(n), f"What is the capital of land number {n}?", (f"City {n}",)) for n in range(64))
# many different turns, so that no memory of ours or theirs answers for the work
TURNS = [f"<think>I recall that it is the city of that number.</think> <answer>City {n}</answer>" for n in range(5000)]
SLOTS = (1, 64, 1024)


class Nothing:
    """A retriever that is never asked."""

    def search(self, queries: Any, top_k: int) -> list[list[Hit]]:
        raise AssertionError("no episode of this benchmark searches")


def ours(slots: int) -> Callable[[], int]:
    """A function that plays one episode in each slot and says how many that were."""
    options: dict[str, Any] = {"retriever": Nothing(), "questions": QUESTIONS, "max_searches": 0}
    turns = cycle(TURNS)
    if slots == 1:
        env = SearchQAEnv(**options)  # without gymnasium's wrappers: GEM's is bare too

        def play_one() -> int:
            env.reset()
            *_, terminated, _, _ = env.step(next(turns))
            assert terminated
            return 1

        return play_one
    envs = gymnasium.make_vec("SearchQA-v0", num_envs=slots, **options)

    def play_all() -> int:
        envs.reset()
        *_, terminated, _, _ = envs.step([next(turns) for _ in range(slots)])
        assert terminated.all()
        return slots

    return play_all


def gems(slots: int) -> Callable[[], int]:
    """The same with GEM's QaEnv and its synchronous vector environment."""
    import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from gem.envs.qa_env import QaEnv  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from gem.vector.sync_vector_env import SyncVectorEnv  # type: ignore[import-not-found, import-untyped, unused-ignore]

    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list([{"question": q.text, "answer": list(q.answers)} for q in QUESTIONS])
    turns = cycle(TURNS)
    if slots == 1:
        env = QaEnv(dataset=rows)

        def play_one() -> int:
            env.reset()
            *_, terminated, _, _ = env.step(next(turns))
            assert terminated
            return 1

        return play_one
    with contextlib.redirect_stdout(io.StringIO()):
        envs = SyncVectorEnv(env_ids=["qa"] * slots, env_fns=[lambda: QaEnv(dataset=rows)] * slots)

    def play_all() -> int:
        envs.reset()
        *_, terminated, _, _ = envs.step([next(turns) for _ in range(slots)])
        assert terminated.all()
        return slots

    return play_all


def rate(play: Callable[[], int], seconds: float) -> float:
    """Steps a second of processor time of this process, so that other programs on the machine do not count."""
    steps, start = 0, time.process_time()
    while (spent := time.process_time() - start) < seconds:
        steps += play()
    return steps / spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="processor time of one measurement")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each, of which the median counts")
    arguments = parser.parse_args()
    peer = find_spec("gem") is not None and find_spec("datasets") is not None
    print(f"{'slots':>6} {'ours, steps/s':>15} {'GEM, steps/s':>15} {'ratio':>7}" if peer else "GEM is not installed")
    for slots in SLOTS:
        players = [ours(slots), gems(slots)] if peer else [ours(slots)]
        measured: list[list[float]] = [[] for _ in players]
        for play in players:
            play()  # warm
        for _ in range(arguments.rounds):
            for play, rates in zip(players, measured, strict=True):
                rates.append(rate(play, arguments.seconds))
        medians = [statistics.median(rates) for rates in measured]
        if peer:
            print(f"{slots:>6} {medians[0]:>15,.0f} {medians[1]:>15,.0f} {medians[0] / medians[1]:>7.1f}", flush=True)
        else:
            print(f"{slots:>6} {medians[0]:>15,.0f} steps/s", flush=True)


if __name__ == "__main__":
    main()
