"""Settings from a YAML or JSON file, checked against a dataclass: unknown keys are errors, values get their types."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union

import yaml

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def load_settings(path: Path, schema: type) -> dict[str, Any]:
    """The settings in a file; see `read_settings`. Raises ValueError, naming the file, for what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"settings file {path} cannot be read: {error}") from None
    try:
        return read_settings(text, schema)
    except ValueError as error:
        raise ValueError(f"settings file {path}: {error}") from None


def read_settings(text: str, schema: type) -> dict[str, Any]:
    """Values by field name, ready for ``dataclasses.replace``; a section of the text fills a nested dataclass.

    Values are brought to the type that the field declares: YAML reads ``1e-6`` as a text, and it becomes a float here.

    Raises:
        ValueError: not YAML, a key that the schema does not have (all of them are named, with what was meant), or a
            value that does not fit its field.
    """
    try:
        read = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML or JSON: {' '.join(str(error).split())}") from None
    if read is None:
        return {}
    problems: list[str] = []
    settings = _section(read, schema, "", problems)
    if problems:
        raise ValueError("; ".join(problems))
    return settings


def _section(read: Any, schema: type, where: str, problems: list[str]) -> dict[str, Any]:
    if not isinstance(read, dict):
        problems.append(f"{where or 'the file'} must hold keys and values, not {type(read).__name__}")
        return {}
    hints = typing.get_type_hints(schema)
    known = [field.name for field in dataclasses.fields(schema)]
    settings = {}
    for key, value in read.items():
        name = f"{where}{key}"
        if key not in known:
            near = difflib.get_close_matches(str(key).replace("-", "_"), known, n=1)
            section = f" in {where.rstrip('.')}" if where else ""
            problems.append(f"unknown key {str(key)!r}{section}" + (f", did you mean {near[0]!r}?" if near else ""))
        elif dataclasses.is_dataclass(hints[key]):
            settings[key] = hints[key](**_section(value, hints[key], f"{name}.", problems))
        else:
            try:
                settings[key] = _coerced(value, hints[key])
            except (TypeError, ValueError):
                problems.append(f"{name} is {value!r}, which is not {_described(hints[key])}")
    return settings


def _coerced(value: Any, kind: Any) -> Any:
    """The value as the declared type. Raises ValueError or TypeError where it does not fit."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        return _coerced(value, next(option for option in options if option is not type(None)))
    if origin is Literal:
        if value not in options:
            raise ValueError
        return value
    if kind is bool:
        if str(value).lower() not in _WORDS:
            raise ValueError
        return _WORDS[str(value).lower()]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise TypeError
    if kind is int and float(value) != int(float(value)):
        raise ValueError
    return int(float(value)) if kind is int else kind(value)


def _described(kind: Any) -> str:
    options = [option for option in typing.get_args(kind) if option is not type(None)]
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, options))}"
    if options:
        return _described(options[0])
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "a text")
