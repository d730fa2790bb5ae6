"""Ops on text: rewards, parsing, episodes."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
from gymnasium.utils.env_checker import check_env

import sorl_env  # registers the environments
from retrieval_index.types import Hit, Passage
from sorl_env.actions import Answer, Search, answer_of, parse
from sorl_env.choices import choice_of, gold_letter, letter_of, yes_no_maybe
from sorl_env.episode import EpisodeRules
from sorl_env.legacy import squad_normalize
from sorl_env.math_answers import math_equal_texts
from sorl_env.normalize import normalize_answer
from sorl_env.observations import cut_block, render_observation
from sorl_env.questions import Question, question_from_row
from sorl_env.rewards import REWARDS, exact_match, exact_match_score, format_valid, token_f1, token_f1_score
from sorl_env.search_qa import SearchQAEnv
from tests.cases.judge import Raised
from tests.fakes import FakeRetriever

Given = Mapping[str, Any]
assert sorl_env


# --- Rewards ------------------------------------------------------------------------------------------------


def score_pairs(given: Given) -> Any:
    pairs = given["pairs_pred_gold"]
    official = [float(squad_normalize(predicted) == squad_normalize(gold)) for predicted, gold in pairs]
    return {"scores": [exact_match_score(*pair) for pair in pairs], "official_squad_v1_scores": official}


def score_f1(given: Given) -> Any:
    return {"scores": [token_f1_score(*pair) for pair in given["pairs_pred_gold"]]}


def score_record(given: Given) -> Any:
    question = question_from_row({"id": "q", "question": "?", "answer": given["record"]}, "row")
    return {"scores": [exact_match([_answered(text)], question) for text in given["predictions"]]}


def score_any(given: Given) -> Any:
    try:
        question = question_from_row({"id": "q", "question": "?", "golden_answers": given["golds"]}, "row")
    except ValueError as error:
        assert "'q'" in str(error)  # names the sample
        return Raised(error).facts() | {"raises": True}
    return {"scores": [exact_match([_answered(text)], question) for text in given["predictions"]]}


def best_f1(given: Given) -> Any:
    return {"score": token_f1([_answered(given["prediction"])], _question(given["golds"]))}


def normalise(given: Given) -> Any:
    once = [normalize_answer(text) for text in given["texts"]]
    return {"normalized": once, "property": [normalize_answer(text) for text in once] == once}


def score_response(given: Given) -> Any:
    turns = [given["response"]]
    reward = REWARDS[given.get("metric", "exact_match")]
    return {"extracted": answer_of(turns), "score": reward(turns, _question(given["golds"]))}


def label(given: Given) -> Any:
    return {"labels": [yes_no_maybe(text) for text in given["texts"]]}


def letters(given: Given) -> Any:
    return {"letters": [letter_of(text, given["allowed"]) for text in given["texts"]]}


def letters_or_texts(given: Given) -> Any:
    return {"letters": [choice_of(text, given["options"]) for text in given["texts"]]}


def gold_letters(given: Given) -> Any:
    base = [(row["index"], given["n_options"], row["index_base"]) for row in given["rows"]]
    return {"letters": [gold_letter(*row) or "unlabelled" for row in base]}


def equal_in_mathematics(given: Given) -> Any:
    def compare() -> list[bool]:
        return [math_equal_texts(*pair) for pair in given["pairs_pred_gold"]]

    return {"equal": _in_a_thread(compare) if "thread" in given.get("run_in", "") else compare()}


# --- Parsing ------------------------------------------------------------------------------------------------


def parse_action(given: Given) -> Any:
    limit = re.search(r"max_query_chars\s*=\s*(\d+)", given.get("assume", ""))
    options = {"max_query_chars": int(limit.group(1))} if limit else {}
    if "texts" in given:
        return {"actions": [_action(text, options) for text in given["texts"]]}
    text = given.get("text") or given["text_template"].replace("{Q}", _spelt_out(given["Q"]))
    start = time.perf_counter()
    action = _action(text, options)
    seconds = time.perf_counter() - start
    query = action["content"] or ""
    return action | {"query": query, "query_len": len(query), "regex_time": seconds}


def render(given: Given) -> Any:
    text = render_observation([Hit(Passage("p", "", passage), 1.0) for passage in given["passages"]])
    return {"count_of": _CountIn(text), "message": text, "text": text}


def score_trajectory(given: Given) -> Any:
    said = [part["text"] for part in given["segments"] if part["role"] == "assistant"]
    return {"extracted": answer_of(said), "score": exact_match(said, _question(given["golds"]))}


def check_format(given: Given) -> Any:
    return {"valid": [format_valid(text) for text in given["texts"]]}


# --- Episodes -----------------------------------------------------------------------------------------------


def run_env(given: Given) -> Any:
    retriever = FakeRetriever()
    rules = {name: value for name, value in given.items() if name in EpisodeRules.__dataclass_fields__}
    rules.setdefault("max_searches", given.get("max_turns", 3) - 1)
    env = SearchQAEnv(retriever, [_question(given["gold"])], **rules)
    env.reset(seed=0)
    steps: list[dict[str, Any]] = []
    answer: dict[str, Any] = {"turns_used": 0}
    for number, action in enumerate(given["actions"], start=1):
        try:
            observation, reward, terminated, truncated, info = env.step(action)
        except RuntimeError as error:
            answer[f"step_{number}"] = "raises" if "reset" in str(error) else f"raises {error}"
            continue
        answer["turns_used"] += 1
        answer[f"step_{number}"] = "goes on"
        steps.append(
            {
                "terminated": terminated,
                "truncated": truncated,
                "reward": reward,
                "invalid": info["action_kind"] == "invalid",
                "stop": info["stop"],
                "observation": observation,
            }
        )
    return answer | {"steps": steps, "retriever_calls": len(retriever.calls)}


def check_space(given: Given) -> Any:
    env = gymnasium.make("SearchQA-v0", retriever=FakeRetriever(), questions=[_question(["x"])])
    first, _ = env.reset(seed=0)
    last, *_ = env.step(_answered("x"))
    seen = all(text in env.observation_space for text in (given["observation"], first, last, ""))
    check_env(env.unwrapped, skip_render_check=True)
    return {
        "observation_space_contains_all": seen,
        "observation_space_contains": seen,
        "action_space_contains": given.get("action", "") in env.action_space,
        "check_env_passes": True,
    }


def cut_observation(given: Given) -> Any:
    budget = given["max_obs_tokens"]
    text = cut_block(" ".join(given["passages"]), budget, " ")
    shown = render_observation([Hit(Passage("p", "", passage), 1.0) for passage in given["passages"]], budget).strip()
    whole = shown.startswith("<information>") and shown.endswith("</information>")
    assert whole and len(re.sub(r"</?information>", " t ", shown).split()) <= budget
    return {"text": text, "tokens": len(text.split())}


TEXT_OPS: dict[str, Callable[[Given], Any]] = {
    "exact_match": score_pairs,
    "token_f1": score_f1,
    "exact_match_record": score_record,
    "exact_match_any": score_any,
    "token_f1_any": best_f1,
    "normalize_answer": normalise,
    "score_response": score_response,
    "yes_no_maybe": label,
    "mcq_letter": letters,
    "mcq_letter_or_text": letters_or_texts,
    "gold_letter_from_index": gold_letters,
    "math_equal": equal_in_mathematics,
    "parse_action": parse_action,
    "render_observation": render,
    "score_trajectory": score_trajectory,
    "format_valid": check_format,
    "run_env": run_env,
    "check_space": check_space,
    "truncate_observation": cut_observation,
}


class _CountIn(Counter[str]):
    """How often each text stands in the whole, counted when it is asked for."""

    def __init__(self, whole: str) -> None:
        super().__init__()
        self._whole = whole

    def __contains__(self, part: object) -> bool:
        return isinstance(part, str)

    def __getitem__(self, part: str) -> int:
        return self._whole.count(part)


def _answered(text: str) -> str:
    return f"<answer>{text}</answer>"


def _question(answers: Any) -> Question:
    return Question("q", "?", tuple(answers))


def _action(text: str, options: Mapping[str, Any]) -> dict[str, Any]:
    action = parse(text, **options)
    if isinstance(action, Search):
        return {"type": "search", "content": action.query}
    if isinstance(action, Answer):
        return {"type": "answer", "content": action.text}
    return {"type": None, "content": None}


def _spelt_out(text: str) -> str:
    """``'whale ' repeated 2000 times`` as the text that it means; any other text as it is."""
    repeated = re.match(r"'(.*)' repeated (\d+) times", text)
    return repeated.group(1) * int(repeated.group(2)) if repeated else text


def _in_a_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]
