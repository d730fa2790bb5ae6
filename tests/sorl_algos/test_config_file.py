"""Settings files: types by the schema, every unknown key named, remedies in one line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import pytest

from sorl_algos.config import TrainConfig
from sorl_algos.config_file import load_settings, read_settings


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    steps: int = 1


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    name: str = "a"
    where: Path | None = None
    flag: bool = False
    kind: Literal["x", "y"] = "x"


def test_values_get_the_type_that_the_field_declares() -> None:
    # YAML 1.1 reads 1e-6 (no dot) as a text and 3 as a whole number
    settings = read_settings("inner: {rate: 1e-6, steps: 3.0}\nname: 7\nwhere: a/b\nflag: 'yes'\nkind: y\n", Outer)
    assert settings == {"inner": Inner(1e-6, 3), "name": "7", "where": Path("a/b"), "flag": True, "kind": "y"}
    assert type(settings["inner"].steps) is int


def test_null_is_kept_where_the_field_allows_it() -> None:
    assert read_settings("where: null", Outer) == {"where": None}
    with pytest.raises(ValueError, match="name is None, which is not a text"):
        read_settings("name: null", Outer)


def test_all_unknown_keys_are_named_with_what_was_meant() -> None:
    with pytest.raises(ValueError) as caught:
        read_settings("inner:\n  raet: 1\n  st-eps: 2\nzzz: 1\n", Outer)
    message = str(caught.value)
    assert "'raet' in inner, did you mean 'rate'?" in message
    assert "'st-eps' in inner, did you mean 'steps'?" in message
    assert "unknown key 'zzz'" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inner: 3", "inner. must hold keys and values, not int"),
        ("flag: maybe", "flag is 'maybe', which is not true or false"),
        ("kind: z", "kind is 'z', which is not one of 'x', 'y'"),
        ("inner: {steps: 1.5}", "inner.steps is 1.5, which is not a whole number"),
        ("inner: {rate: true}", "inner.rate is True, which is not a number"),
        ("name: [1]", "name is [1], which is not a text"),
        ("a: [", "not valid YAML or JSON"),
        ("!!python/object/apply:os.getcwd []", "not valid YAML or JSON"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_settings(text, Outer)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_settings_of_a_run_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("lr: 1e-6\nalgorithm: ppo\nindex: null\nvalue_clip: 0.5\n", encoding="utf-8")
    config = dataclasses.replace(TrainConfig(), **load_settings(path, TrainConfig))
    assert (config.lr, config.algorithm, config.index, config.value_clip) == (1e-6, "ppo", None, 0.5)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.yaml cannot be read"):
        load_settings(tmp_path / "none.yaml", TrainConfig)
