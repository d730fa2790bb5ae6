"""The examples of docs/environments.md do what they say."""

from __future__ import annotations

import doctest
from pathlib import Path

import sorl_env.observations

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


def test_the_page() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted >= 12 and result.failed == 0


def test_docstrings() -> None:
    assert doctest.testmod(sorl_env.observations).failed == 0
