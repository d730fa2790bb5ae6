"""Ops on what happens over time: staleness, whole groups, weights that change, caches that must not outlive them."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sorl_algos.rollout.async_source import AsyncSource, staleness
from sorl_algos.rollout.engine import Sampling
from sorl_algos.rollout.hf import HFEngine
from sorl_algos.rollout.renderer import Renderer
from sorl_algos.tiny import tiny_language_model
from sorl_env.questions import Question, QuestionSet
from tests.cases.toys import vocabulary_tokenizer
from tests.sorl_algos.rollout.async_fakes import AsyncScripted, Weights
from tests.sorl_algos.small_game import make_env

Given = Mapping[str, Any]
QUESTIONS = QuestionSet(Question(f"t{number}", f"What is {number}?", ("x",)) for number in range(40))
PATIENCE_S = 20.0


class _Theatre:
    """A real AsyncSource whose episodes, of one turn each, end when they are told to."""

    def __init__(self, **options: Any) -> None:
        self.events: list[tuple[str, int, int]] = []
        self._told: set[int] = set()
        self._seeds: dict[int, int] = {}  # the number, in order of asking, of the episode that draws from a seed
        self.crashes: set[int] = set()
        self.free = False
        tokenizer = vocabulary_tokenizer({0: "\ue100pad"})
        self.engine = AsyncScripted(tokenizer, lambda prompt: "<answer>x</answer>", self._before)
        self.source = AsyncSource(
            make_env(64, questions=QUESTIONS), self.engine, Renderer(self.engine.tokenizer), QUESTIONS,
            sampling=Sampling(max_tokens=40), seed=0, on_event=self.events.append, **options,
        )  # fmt: skip

    async def _before(self, prompt: str, seed: int) -> None:
        number = self._seeds.setdefault(seed, len(self._seeds))
        while not self.free and number not in self._told:
            await asyncio.sleep(0.0005)
        if number in self.crashes:
            self.crashes.remove(number)
            raise ConnectionError(f"episode {number} crashed")

    def finish(self, number: int) -> None:
        before = self.count("finish")
        self._told.add(number)
        self.wait(lambda: self.count("finish") > before)

    def count(self, what: str) -> int:
        return sum(event[0] == what for event in self.events)

    def request(self, version: int) -> threading.Thread:
        """Publishes in a thread of its own: it waits for what is under way."""
        before = self.count("request")
        thread = threading.Thread(target=self.source.publish, args=(Weights, version), daemon=True)
        thread.start()
        self.wait(lambda: self.count("request") > before)
        return thread

    def wait(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end, f"what should happen did not; seen: {self.events}"
            time.sleep(0.0005)


def _admitted(given: Given, versions: Sequence[int], group_size: int) -> tuple[list[int], int]:
    """Plays one episode after another, each begun under its version; which of them (by number) are trained on when
    the trainer is at its own version, and how many groups were dropped.
    """
    groups = len(versions) // group_size
    theatre = _Theatre(
        questions_per_update=groups, group_size=group_size, max_staleness=given["max_off_policy_steps"],
        queue_groups=groups, live_episodes=1,
    )  # fmt: skip
    try:
        order = sorted(range(len(versions)), key=versions.__getitem__)  # they must begin in the order of versions
        pending = None
        for number, place in enumerate(order):
            if number == 0 or versions[place] != versions[order[number - 1]]:
                pending = theatre.request(versions[place])
            if number:
                theatre.finish(number - 1)
            if pending is not None:
                pending.join()
            theatre.wait(lambda number=number: theatre.count("start") > number)  # type: ignore[misc]
        last = theatre.request(given["trainer_version"]) if given["trainer_version"] != max(versions) else None
        theatre.free = True
        if last is not None:
            last.join()
        first = min(event[1] for event in theatre.events if event[0] == "start")
        begun = [event[1] - first for event in theatre.events if event[0] == "start"]
        ids = {question.id: n for n, question in enumerate(_asked(theatre, first, len(versions)))}
        trained = {ids[item.question_id] for item in next(theatre.source) if item.question_id in ids}
        assert begun[: len(versions)] == list(range(len(versions)))
        return [order[n] for n in range(len(versions)) if n // group_size in trained], theatre.source.dropped_groups
    finally:
        theatre.free = True
        theatre.source.close()


def _asked(theatre: _Theatre, first: int, episodes: int) -> Sequence[Question]:
    size = theatre.source.group_size
    return QUESTIONS.batch(0, first // size, episodes // size)


def admit(given: Given) -> Any:
    versions = given["rollout_versions"]
    trained, dropped = _admitted(given, versions, 1)
    return {
        "staleness": [staleness([version], given["trainer_version"]) for version in versions],
        "trained": [place in trained for place in range(len(versions))],
        "counted_as_dropped": dropped,
    }


def admit_rollout(given: Given) -> Any:
    rows = given["rollout_R_rows"]
    trained, _ = _admitted(given, [row["version"] for row in rows], len(rows))
    return {"trained_rows": sorted(rows[place]["row"] for place in trained)}


def event_log(given: Given) -> Any:
    if any(event.startswith("generate") for event in given["events"]):
        return _cache_log(given["events"])
    if given.get("partial_rollout") is not False or not given["events"]:
        return None  # no episode goes on under other weights here
    names = [found[1] for event in given["events"] if (found := re.match(r"start (\w+)", event))]
    theatre = _Theatre(questions_per_update=len(names), group_size=1, max_staleness=1, queue_groups=len(names))
    try:
        theatre.source.publish(Weights, 0)
        theatre.wait(lambda: len(theatre._seeds) == len(names))
        update = None
        for event in given["events"]:
            if found := re.match(r"finish (\w+)", event):
                theatre.finish(names.index(found[1]))
            elif "update" in event:
                update = theatre.request(1)
                time.sleep(0.01)  # time to do the wrong thing
        theatre.free = True
        if update is not None:
            update.join(PATIENCE_S)
        log = [event[:2] for event in theatre.events]
        applied = log.index(("apply", 1))
        last = max(place for place, event in enumerate(log[:applied]) if event[0] == "finish")
        over = sum(event[0] == "finish" for event in log[:applied]) == len(names)
        return {
            "update_applied": f"only after {names[log[last][1]]} finished" if over else "while episodes were under way",
            "rollouts_with_two_versions": sum(begun != ended for begun, ended in theatre.engine.versions_seen),
        }
    finally:
        theatre.free = True
        theatre.source.close()


def _cache_log(events: Sequence[str]) -> Any:
    """An engine that keeps keys and values, asked for each prompt and for its continuation, beside a fresh one."""
    tokenizer = vocabulary_tokenizer({0: "\ue100pad"})

    def model(name: str) -> Any:
        size = {"hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 32}
        return tiny_language_model(len(tokenizer), seed=int(re.sub(r"\D", "", name) or 0), **size)

    sampling, prompt = Sampling(max_tokens=6, temperature=0), list(range(5, 25))
    current = re.findall(r"w\d+", " ".join(events))[0]
    engine = HFEngine(model(current), tokenizer, kv_cache_mb=1.0)
    torch.set_num_threads(1)
    said: tuple[int, ...] = ()
    stale, version = 0, 0
    for event in events:
        if found := re.match(r"update_weights\((\w+)\)", event):
            current, version = found[1], version + 1
            engine.update_weights(model(current).named_parameters(), version)
            continue
        before = engine._slots().reused_tokens if said else 0
        prompts = [prompt, [*prompt, *said, 30, 31]] if said else [prompt]
        given = engine.generate(prompts, sampling)
        fresh = HFEngine(model(current), tokenizer).generate(prompts, sampling)
        wrong = sum(one.token_ids != other.token_ids for one, other in zip(given, fresh, strict=True))
        # after an update the first thing asked may go on from nothing
        stale += wrong + (engine._slots().reused_tokens - before if said and version else 0)
        said = given[0].token_ids
    again = engine._slots().reused_tokens
    engine.generate([[*prompt, *said, 32]], sampling)
    assert engine._slots().reused_tokens > again, "under the same weights the cache should be used"
    return {f"prefix_blocks_from_{a}_used_under_{b}": stale for a, b in _changes(events)}


def _changes(events: Sequence[str]) -> list[tuple[str, str]]:
    weights = list(dict.fromkeys(re.findall(r"w\d+", " ".join(events))))
    return list(itertools.pairwise(weights))


def group_assembly(given: Given) -> Any:
    theatre = _Theatre(questions_per_update=1, group_size=given["group_size"], max_staleness=0)
    theatre.crashes = set(range(given["finished"], given["group_size"]))
    theatre.free = True
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(next(theatre.source)), daemon=True)
    try:
        theatre.source.publish(Weights, 0)
        thread.start()
        thread.join(PATIENCE_S)
        sizes = Counter(item.group_id for batch in got for item in batch)
        retried = theatre.source.metrics().get("retried_episodes") == given["group_size"] - given["finished"]
        whole = set(sizes.values()) == {given["group_size"]}
        return {"outcome": "retry the fourth" if retried and whole else "?", "deadlock": thread.is_alive()}
    finally:
        theatre.source.close()


ROLLOUT_OPS: dict[str, Callable[[Given], Any]] = {
    "admit": admit,
    "admit_rollout": admit_rollout,
    "event_log": event_log,
    "group_assembly": group_assembly,
}
