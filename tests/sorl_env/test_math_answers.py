"""Mathematical equality: exact where it can be, symbolic where it must be, always bounded."""

from __future__ import annotations

import multiprocessing
import threading
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sorl_env.math_answers import boxed, clean, math_equal_score, math_equal_texts, members, number
from sorl_env.questions import Question
from sorl_env.rewards import math_equal

needs_sympy = pytest.mark.skipif(
    __import__("importlib.util", fromlist=["util"]).find_spec("math_verify") is None,
    reason="math-verify is not installed",
)


@pytest.mark.parametrize(
    ("prediction", "gold", "equal"),
    [
        ("\\boxed{\\frac{1}{2}}", "0.5", True),
        ("\\boxed{073}", "73", True),
        ("\\boxed{5,000}", "5000", True),
        ("\\boxed{1,2}", "12", False),
        ("\\boxed{\\text{(A)}}", "A", True),
        ("\\boxed{-5}", "5", False),
        ("\\boxed{1.5}", "15", False),
        ("\\boxed{x = 5}", "5", True),
        ("\\boxed 2", "2", True),
        ("\\boxed{12", "12", False),
        ("first \\boxed{3}, no: \\boxed{4}", "4", True),
        ("\\boxed{4} and so \\boxed{4", "4", False),
        ("\\boxed{", "", False),
        ("$\\dfrac{3}{4}$", "0.75", True),
        ("-\\frac{1}{2}", "-0.5", True),
        ("\\frac12", "1/2", True),
        ("1{,}234", "1234", True),
        ("12,34", "1234", False),
        ("50\\%", "50", True),
        ("90^\\circ", "90", True),
        ("−7", "-7", True),
        ("3.0", "3", True),
        ("7.", "7", True),
        ("0.333", "1/3", False),
        ("B", "A", False),
        ("r", "R", False),
        ("\\text{Evelyn}", "evelyn", True),
        ("", "5", False),
        ("1/0", "1/0", True),
        # all members of a set and no others; the order counts in brackets
        ("\\boxed{12}", "7, 12", False),
        ("\\boxed{12, 7}", "7, 12", True),
        ("\\boxed{7, 12, 13}", "7, 12", False),
        ("7, 7", "7, 12", False),
        ("12 and 7", "7, 12", True),
        ("\\{12, 7\\}", "7, 12", True),
        ("(1, 2)", "(2, 1)", False),
        ("(1, 0.5)", "(1, \\frac{1}{2})", True),
        ("[1, 2)", "(1, 2)", False),
        ("(1,2), (3,4)", "(3,4), (1,2)", True),
    ],
)
def test_decided_exactly(prediction: str, gold: str, equal: bool) -> None:
    assert math_equal_texts(prediction, gold) is equal


@needs_sympy
@pytest.mark.parametrize(
    ("prediction", "gold", "equal"),
    [
        ("\\sqrt{8}", "2\\sqrt{2}", True),
        ("2*sqrt(2)", "\\sqrt{8}", True),
        ("(x+1)^2", "x^2+2x+1", True),
        ("\\frac{\\pi}{4}", "pi/4", True),
        ("2^{10}", "1024", True),
        ("11\\frac{1}{2}", "11.5", True),
        ("\\sqrt{3}", "\\sqrt{2}", False),
        ("x+1", "x+2", False),
        ("\\frac{", "1", False),
    ],
)
def test_decided_symbolically(prediction: str, gold: str, equal: bool) -> None:
    assert math_equal_texts(f"\\boxed{{{prediction}}}" if equal else prediction, gold, timeout_s=30.0) is equal


@needs_sympy
def test_time_is_bounded_and_the_next_pair_works() -> None:
    assert math_equal_texts("\\sqrt{4}", "2", timeout_s=30.0)  # the worker runs
    start = time.perf_counter()
    assert not math_equal_texts("9^{9^{9^{9^9}}}", "1", timeout_s=0.5)
    assert time.perf_counter() - start < 3.0
    assert math_equal_texts("\\sqrt{4}", "2", timeout_s=30.0)


def _in_a_process(queue: multiprocessing.Queue[bool]) -> None:
    queue.put(math_equal_texts("\\sqrt{9}", "3", timeout_s=30.0))


@needs_sympy
def test_works_in_threads_and_in_forked_processes() -> None:
    found: list[bool] = []

    def check() -> None:
        found.append(math_equal_texts("\\boxed{\\frac{1}{3}}", "1/3"))
        found.append(math_equal_texts("\\sqrt{16}", "4", timeout_s=30.0))

    threads = [threading.Thread(target=check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_in_a_process, args=(queue,), daemon=True)  # a daemon may not have children
    process.start()
    assert queue.get(timeout=60)
    process.join()


def test_parts() -> None:
    assert boxed("a \\boxed{\\frac{1}{2}} b") == "\\frac{1}{2}"
    assert boxed("\\boxed{\\{1, 2\\}}") == "\\{1, 2\\}"
    assert boxed("no box") == "no box" and boxed("\\boxed{a") is None
    assert clean("$x = 5$") == "5" and clean("\\text{(C)}") == "C" and clean("1,000,000") == "1000000"
    assert number("-3/6") == Fraction(-1, 2) and number("x") is None and number("1/0") is None
    assert members("(1, 2)") == (True, ["1", "2"]) and members("1; 2") == (False, ["1", "2"])


@given(st.integers(-(10**12), 10**12))
def test_an_integer_equals_its_spellings_and_no_other(value: int) -> None:
    for spelling in (f"{value}", f"{value:,}", f"\\boxed{{{value}}}", f"{value}.0", f"${value}$"):
        assert math_equal_score(spelling, str(value)) == 1.0
        assert math_equal_score(spelling, str(value + 1)) == 0.0


def test_reward() -> None:
    question = Question("m", "1/4 of 2?", ("0.5",), "math")
    assert math_equal(["<answer>\\boxed{\\frac12}</answer>"], question) == 1.0
    assert math_equal(["<answer>1/2</answer>"], question) == 1.0
    assert math_equal(["1/2"], question) == 0.0
