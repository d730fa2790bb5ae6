"""MathQA-v0 and its problems, each answer worked out again by brute force from the problem's text."""

from __future__ import annotations

import itertools
import re
import warnings
from collections import Counter
from collections.abc import Callable

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import sorl_env  # noqa: F401  (registers the environments)
from sorl_env.actions import CutText
from sorl_env.math_problems import LEVELS, make_problem, math_questions


def power_mod(base: int, exponent: int, modulus: int) -> int:
    value = 1
    for _ in range(exponent):
        value = value * base % modulus
    return value


def sequence(a: int, b: int, p: int, q: int, index: int) -> int:
    values = [a, b]
    while len(values) <= index:
        values.append(p * values[-1] + q * values[-2])
    return values[index] % 1000


def avoiding_paths(right: int, up: int, x: int, y: int) -> int:
    ways = {(0, 0): 1}
    for i, j in itertools.product(range(right + 1), range(up + 1)):
        if (i, j) != (0, 0):
            ways[i, j] = 0 if (i, j) == (x, y) else ways.get((i - 1, j), 0) + ways.get((i, j - 1), 0)
    return ways[right, up]


def committees(size: int, women: int, men: int) -> int:
    people = [True] * women + [False] * men
    return sum(any(people[i] for i in chosen) for chosen in itertools.combinations(range(len(people)), size))


def odd_binomials(n: int, *_: int) -> int:
    row = 1  # the bits are the binomial coefficients modulo 2
    for _ in range(n):
        row ^= row << 1
    return row.bit_count() % 1000


BRUTE: dict[str, Callable[..., int]] = {
    r"Compute": lambda a, b, c: sum([a] * b) - abs(c),
    r"A shop": lambda count, price, paid: sum([price] * count) - paid,
    r"Solve": lambda a, b, c: next(x for x in range(-99, 99) if a * x + b == c),
    r"What is the greatest": lambda a, b: max(d for d in range(1, min(a, b) + 1) if a % d == b % d == 0),
    r"What is the larger": lambda _, b, c, __: max(x for x in range(-99, 99) if x * x - b * x + c == 0),
    r"An arithmetic": lambda first, step, terms: sum(range(first, first + step * terms, step)),
    r"How many positive": lambda n: sum(n % d == 0 for d in range(1, n + 1)),
    r"How many of the integers": lambda _, n, a, b: sum(k % a == 0 or k % b == 0 for k in range(1, n + 1)),
    r"What is the remainder": power_mod,
    r"A committee": committees,
    r"How many shortest": lambda _, __, right, up, x, y: avoiding_paths(right, up, x, y),
    r"Let S": lambda power, *rest: sum(k**power for k in range(1, rest[-2] + 1)) % 1000,
    r"A sequence": lambda a, b, p, _, q, *rest: sequence(a, b, p, q, rest[-2]),
    r"How many of the binomial": odd_binomials,
}


@pytest.mark.parametrize("level", LEVELS)
def test_answers_by_brute_force(level: int) -> None:
    kinds = Counter[str]()
    for number in range(36):
        text, answer = make_problem(number, level)
        start = next(start for start in BRUTE if text.startswith(start))
        kinds[start] += 1
        plain = re.sub(r"a_[01n]\b", "a", text).replace("a_", "a ")
        numbers = [int(match) for match in re.findall(r"(?<![\w)])-?\d+", plain)]
        assert BRUTE[start](*numbers) == answer, text
        assert make_problem(number, level) == (text, answer)
    assert len(kinds) >= 2 and min(kinds.values()) >= 4


def test_splits_are_disjoint_and_levels_balanced() -> None:
    sets = {split: math_questions(split) for split in ("train", "dev", "test")}
    assert {split: len(questions) for split, questions in sets.items()} == {"train": 2000, "dev": 200, "test": 500}
    texts = [question.text for questions in sets.values() for question in questions]
    assert len(set(texts)) == len(texts)
    for questions in sets.values():
        levels = Counter(question.metadata["level"] for question in questions)
        assert set(levels.values()) == {len(questions) // 5}
    assert math_questions("dev") == sets["dev"]
    with pytest.raises(ValueError, match="unknown split 'val'; known: train"):
        math_questions("val")
    with pytest.raises(ValueError, match="unknown level 6"):
        make_problem(0, 6)


def test_check_env_finds_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make("MathQA-v0").unwrapped)


@pytest.mark.parametrize(
    ("action", "reward", "terminated", "stop"),
    [
        ("<think>21 * 2</think> It is \\boxed{42}.", 1.0, True, "answered"),
        ("\\boxed{042.0}", 1.0, True, "answered"),
        ("\\boxed{41}", 0.0, True, "answered"),
        ("It is 42.", 0.0, True, "answered"),
        ("\\boxed{42", 0.0, True, "answered"),
        (CutText("so \\boxed{42}"), 0.0, False, "length_limit"),
    ],
)
def test_an_episode_is_one_turn(action: str, reward: float, terminated: bool, stop: str) -> None:
    questions = [sorl_env_question("6 * 7?", "42")]
    env = gymnasium.make("MathQA-v0", questions=questions)
    observation, _ = env.reset(seed=0)
    assert "\\boxed{answer}" in observation and observation.endswith("Problem: 6 * 7?\n")
    _, got, term, trunc, info = env.step(action)
    assert (got, term, trunc, info["stop"]) == (reward, terminated, not terminated, stop)
    assert info["scores"]["exact_match"] == reward
    vector = gymnasium.make_vec("MathQA-v0", num_envs=2, questions=questions)
    vector.reset(seed=0)
    assert vector.step([action, action])[1].tolist() == [reward, reward]


def sorl_env_question(text: str, answer: str) -> object:
    from sorl_env.questions import Question

    return Question("m", text, (answer,), "math")
