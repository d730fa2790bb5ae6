"""Generated problems with integer answers, in five levels; a problem depends on its number alone.

Level 1 is arithmetic, 2 equations and divisors, 3 sums and counting, 4 remainders and combinations, 5 asks
for a remainder modulo 1000 of something too large to write down, in the manner of AIME.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from sorl_env.questions import Question, QuestionSet

SPLITS = {"train": 2000, "dev": 200, "test": 500}
LEVELS = (1, 2, 3, 4, 5)

_Problem = tuple[str, int]


def math_questions(split: str) -> QuestionSet:
    """The problems of one split: "train" (2,000), "dev" (200) or "test" (500); no text is in two of them.

    The level, 1 to 5, is in ``metadata["level"]``; levels take turns. Raises ValueError for an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    seen: set[str] = set()
    number = 0
    for name, size in SPLITS.items():
        questions: list[Question] = []
        while len(questions) < size:
            level = LEVELS[len(questions) % len(LEVELS)]
            text, answer = make_problem(number, level)
            number += 1
            if text in seen:
                continue
            seen.add(text)
            questions.append(Question(f"math/{name}/{len(questions)}", text, (str(answer),), "math", {"level": level}))
        if name == split:
            return QuestionSet(questions, f"math/{split}")
    raise AssertionError("every split was made")


def make_problem(number: int, level: int) -> _Problem:
    """Problem number ``number`` of a level: its text and its integer answer. Raises ValueError for another
    level.
    """
    if level not in LEVELS:
        raise ValueError(f"unknown level {level!r}; known: {', '.join(map(str, LEVELS))}")
    random = Random(f"{level}:{number}")
    makers = _MAKERS[level]
    return makers[random.randrange(len(makers))](random)


def _arithmetic(random: Random) -> _Problem:
    a, b, c = random.randint(12, 99), random.randint(3, 25), random.randint(10, 200)
    return f"Compute {a} * {b} - {c}.", a * b - c


def _shopping(random: Random) -> _Problem:
    count, price, paid = random.randint(3, 12), random.randint(4, 30), random.randint(10, 90)
    text = (
        f"A shop sells {count} boxes at {price} coins each, and lowers the whole bill by {paid} coins. "
        "How many coins is the bill? A negative number means that the shop pays."
    )
    return text, count * price - paid


def _linear(random: Random) -> _Problem:
    a, x, b = random.randint(2, 15), random.randint(-30, 30), random.randint(1, 90)
    return f"Solve {a}x + {b} = {a * x + b} for x.", x


def _common_divisor(random: Random) -> _Problem:
    shared, a, b = random.randint(2, 40), random.randint(2, 30), random.randint(2, 30)
    return f"What is the greatest common divisor of {shared * a} and {shared * b}?", shared * math.gcd(a, b)


def _quadratic(random: Random) -> _Problem:
    small = random.randint(-20, 15)
    large = small + random.randint(1, 15)
    total, product = small + large, small * large
    return f"What is the larger root of x^2 - ({total})x + ({product}) = 0?", large


def _series(random: Random) -> _Problem:
    first, step, terms = random.randint(-20, 50), random.randint(2, 15), random.randint(8, 60)
    text = (
        f"An arithmetic sequence starts with {first} and grows by {step}. What is the sum of its first {terms} terms?"
    )
    return text, terms * first + step * terms * (terms - 1) // 2


def _divisors(random: Random) -> _Problem:
    a, b, c = random.randint(1, 5), random.randint(0, 4), random.randint(0, 3)
    return f"How many positive divisors has {2**a * 3**b * 5**c}?", (a + 1) * (b + 1) * (c + 1)


def _multiples(random: Random) -> _Problem:
    limit, a, b = random.randint(200, 5000), random.randint(3, 12), random.randint(3, 12)
    both = math.lcm(a, b)
    text = f"How many of the integers from 1 to {limit} are divisible by {a} or by {b}?"
    return text, limit // a + limit // b - limit // both


def _remainder(random: Random) -> _Problem:
    base, exponent, modulus = random.randint(2, 30), random.randint(20, 400), random.randint(7, 97)
    return f"What is the remainder of {base}^{exponent} divided by {modulus}?", pow(base, exponent, modulus)


def _committee(random: Random) -> _Problem:
    women, men, size = random.randint(4, 9), random.randint(4, 9), random.randint(3, 5)
    text = (
        f"A committee of {size} is chosen from {women} women and {men} men. "
        "How many committees have at least one woman?"
    )
    return text, math.comb(women + men, size) - math.comb(men, size)


def _paths(random: Random) -> _Problem:
    right, up = random.randint(3, 9), random.randint(3, 9)
    x, y = random.randint(1, right - 1), random.randint(1, up - 1)
    text = (
        f"How many shortest lattice paths lead from (0, 0) to ({right}, {up}) "
        f"in steps of one to the right or one up, if the point ({x}, {y}) must be avoided?"
    )
    through = math.comb(x + y, x) * math.comb(right - x + up - y, right - x)
    return text, math.comb(right + up, right) - through


def _power_sum(random: Random) -> _Problem:
    power, terms = random.randint(2, 4), random.randint(40, 900)
    text = f"Let S be the sum of k^{power} over k = 1, 2, ..., {terms}. What is the remainder of S divided by 1000?"
    return text, sum(pow(k, power, 1000) for k in range(1, terms + 1)) % 1000


def _recurrence(random: Random) -> _Problem:
    p, q, index = random.randint(1, 5), random.randint(1, 5), random.randint(30, 300)
    a, b = random.randint(0, 6), random.randint(1, 9)
    text = (
        f"A sequence has a_0 = {a}, a_1 = {b} and a_n = {p} a_(n-1) + {q} a_(n-2) for n > 1. "
        f"What is the remainder of a_{index} divided by 1000?"
    )
    for _ in range(index):
        a, b = b, (p * b + q * a) % 1000
    return text, a % 1000


def _no_carry(random: Random) -> _Problem:
    n = random.randint(150, 2500)
    twos = n.bit_count()
    text = (
        f"How many of the binomial coefficients C({n}, 0), C({n}, 1), ..., C({n}, {n}) are odd? "
        "Give the remainder of that number divided by 1000."
    )
    return text, 2**twos % 1000  # a coefficient is odd where its index has no bit that n lacks (Lucas)


_MAKERS: dict[int, tuple[Callable[[Random], _Problem], ...]] = {
    1: (_arithmetic, _shopping),
    2: (_linear, _common_divisor, _quadratic),
    3: (_series, _divisors, _multiples),
    4: (_remainder, _committee, _paths),
    5: (_power_sum, _recurrence, _no_carry),
}
