"""What no file of the repository may hold."""

from __future__ import annotations

import re

import pytest

from tests.architecture.source_checks import PACKAGES, ROOT, bad_habits, python_files, relative
from tests.architecture.test_sizes import tracked_files

SOURCES = [relative(path) for path in python_files(*PACKAGES, "scripts", "tests")]
TEXT_SUFFIXES = {".cfg", ".css", ".html", ".js", ".json", ".jsonl", ".md", ".py", ".sh", ".toml", ".txt"}
# Paths that only one machine has: a home folder, a work folder, a drive.
MACHINE_PATH = re.compile(r"(?<![\w.}])/(?:home|root|Users|work|opt|mnt)/\w[\w./-]*")


@pytest.mark.parametrize("path", SOURCES)
def test_source_has_no_bad_habits(path: str) -> None:
    problems = list(bad_habits((ROOT / path).read_text("utf-8"), path))
    assert not problems, "\n".join(problems)


def test_no_text_names_a_path_of_one_machine() -> None:
    found = {
        relative(path): match.group()
        for path in tracked_files()
        if path.suffix in TEXT_SUFFIXES and (match := MACHINE_PATH.search(path.read_text("utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize("folder", ["home", "root", "Users", "work"])
def test_the_path_check_can_fail(folder: str) -> None:
    for text in (f"open('/{folder}/ann/data')", f"see /{folder}/x.py", f"`/{folder}/main`"):
        assert MACHINE_PATH.search(text)


@pytest.mark.parametrize("text", ["https://example.org/home/x", "${root}/mnt/x", "a/mnt/b", "../shared/x"])
def test_the_path_check_lets_other_paths_be(text: str) -> None:
    assert not MACHINE_PATH.search(text)
