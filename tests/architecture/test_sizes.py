"""Files stay short enough to read, and the repository small enough to clone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.architecture.source_checks import PACKAGES, ROOT, python_files, relative

MEGABYTE = 1_000_000


def line_count(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_trainer_stays_under_400_lines() -> None:
    assert line_count(ROOT / "sorl_algos" / "trainer.py") < 400


@pytest.mark.parametrize("path", [relative(path) for path in python_files(*PACKAGES)])
def test_package_files_stay_within_600_lines(path: str) -> None:
    assert line_count(ROOT / path) <= 600


@pytest.mark.parametrize("path", [relative(path) for path in python_files("scripts")])
def test_scripts_stay_under_150_lines(path: str) -> None:
    """A script is what one runs: the files of scripts/ itself. A folder below it holds modules."""
    limit = 150 if path.count("/") == 1 else 600
    assert line_count(ROOT / path) < limit


def test_no_tracked_file_is_larger_than_10_megabytes() -> None:
    files = tracked_files()
    assert len(files) > 50, "git lists hardly any file: is this a checkout?"
    assert [relative(path) for path in files if path.stat().st_size > 10 * MEGABYTE] == []


def test_the_bundled_world_stays_within_3_megabytes() -> None:
    world = [path for path in tracked_files() if relative(path).startswith("sorl_env/world/")]
    assert 0 < sum(path.stat().st_size for path in world) <= 3 * MEGABYTE
