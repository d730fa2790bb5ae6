"""Random inputs against the parts that read untrusted text; prints how many were tried and how many broke a rule.

python scripts/fuzz_env.py --inputs 20000 --seed 0
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Callable

from retrieval_index.types import Hit, Passage
from sorl_env.actions import Answer, CutText, Invalid, Search, answer_of, parse
from sorl_env.choices import choice_of
from sorl_env.dialects import DIALECTS
from sorl_env.episode import Episode, EpisodeRules
from sorl_env.math_answers import boxed, clean, number
from sorl_env.normalize import normalize_answer
from sorl_env.observations import render_observation
from sorl_env.questions import Question
from sorl_env.rewards import exact_match, format_valid, token_f1_score
from sorl_env.trajectory import Trajectory, Turn, from_row, to_row

PIECES = [
    *(f"<{slash}{name}>" for name in ("think", "search", "answer", "information") for slash in ("", "/")),
    "<tool_call>", "</tool_call>", "<tool_response>", '{"name": "search", "arguments": {"query_list": ["x"]}}',
    "\\boxed{", "}", "<|im_end|>", "[INST]", "<", ">", "＜answer＞", "\u200b", "\u2028", "\x00", "\ud83d", "é",
    "\u0301", "北京", "🧪", "A", "(B)", "the answer is ", "1,234", "1/0", "-0.5", "a the an", " ",
    "\n", "Doc 1(Title: x)",
]  # fmt: skip
QUESTION = Question("q", "?", ("gold",), "choice", {"options": {"A": "gold", "B": "1.5"}})
Rule = Callable[[str, random.Random], None]


def text(rng: random.Random) -> str:
    """A text of up to 30 pieces: tags, words, and now and then any character at all."""
    chosen = (
        rng.choice(PIECES) if rng.random() < 0.9 else chr(rng.randrange(0x110000)) for _ in range(rng.randint(0, 30))
    )
    return "".join(chosen)


def parsing(given: str, rng: random.Random) -> None:
    for dialect in DIALECTS.values():
        action = dialect.parse(given, 64)
        assert isinstance(action, (Search, Answer, Invalid))
        assert not isinstance(action, Search) or (action.query and len(action.query) <= 64 and "\n" not in action.query)
        assert isinstance(dialect.parse(CutText(given), 64), Invalid)
        read = parse(dialect.tagged(given))  # as rewards read it
        assert type(read) is type(action) and (answer_of([dialect.tagged(given)]) is None or isinstance(action, Answer))


def hiding(given: str, rng: random.Random) -> None:
    for name in ("think", "information"):
        inside = given.replace(f"</{name}>", "")
        assert isinstance(parse(f"<{name}>{inside}"), Invalid)
        assert isinstance(parse(f"<{name}>{inside}</{name}>"), Invalid)
        assert answer_of([f"<{name}><answer>gold</answer>{inside}"]) is None


def rendering(given: str, rng: random.Random) -> None:
    budget = rng.choice([None, 3, 7, 40])
    shown = render_observation([Hit(Passage("p", given, given), 1.0)] * rng.randint(0, 3), budget).strip()
    assert shown.startswith("<information>") and shown.endswith("</information>")
    assert len(re.findall(r"</?[a-z_|]+", shown)) == 2 and isinstance(parse(shown), Invalid)
    assert budget is None or len(shown.split()) <= budget


def normalising(given: str, rng: random.Random) -> None:
    once = normalize_answer(given)
    assert normalize_answer(once) == once
    assert 0.0 <= token_f1_score(given, "gold") <= 1.0


def reading_answers(given: str, rng: random.Random) -> None:
    assert choice_of(given, {"A": "gold", "B": "1.5"}) in ("A", "B", None)
    number(clean(boxed(given) or ""))
    assert format_valid(given) in (True, False)


def playing(given: str, rng: random.Random) -> None:
    words, dialect, told = rng.choice([None, 20]), rng.choice(["search_r1", "tool_call"]), rng.random() < 0.5
    rules = EpisodeRules(prompt="short", max_total_words=words, dialect=dialect, tell_budget=told)
    episode = Episode(QUESTION, rules, exact_match)
    episode.begin()
    turns = 0
    while not episode.finished:
        said = given if turns == 0 else text(rng)
        query = episode.query(said)
        episode.advance(said, None if query is None else [Hit(Passage("p", said, said), 1.0)])
        turns += 1
    assert turns <= 3 and (episode.stop == "answered" or sum(episode.rewards) == 0)
    again = Episode(QUESTION, episode.rules, exact_match)
    again.set_state(episode.get_state())
    assert again.transcript() == episode.transcript()


def recording(given: str, rng: random.Random) -> None:
    turn = Turn((1,), (2, 3), (-0.5, -0.25), 1.0, given, given)
    trajectory = Trajectory((turn,), "q", given, 0, "answered", {"text": given})
    assert from_row(to_row(trajectory)) == trajectory


RULES: dict[str, Rule] = {
    "parsing, three dialects": parsing,
    "nothing hidden is an action": hiding,
    "observations keep their block and budget": rendering,
    "normalising twice changes nothing": normalising,
    "letters, numbers, formats": reading_answers,
    "episodes end, and go on from their state": playing,
    "trajectories keep any text": recording,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=20_000, help="random texts for each rule")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    failures = 0
    print(f"{'rule':42} {'inputs':>9} {'failures':>9} {'seconds':>8}")
    for name, rule in RULES.items():
        rng, broken, start = random.Random(f"{arguments.seed}:{name}"), 0, time.perf_counter()
        for _ in range(arguments.inputs):
            given = text(rng)
            try:
                rule(given, rng)
            except Exception as error:  # whatever it is, it is a finding
                broken += 1
                if broken <= 3:
                    print(f"  {type(error).__name__} {error} for {given!r}")
        failures += broken
        print(f"{name:42} {arguments.inputs:>9,} {broken:>9,} {time.perf_counter() - start:>8.1f}", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
