"""How an episode looks on a terminal (``render_mode="human"``): with rich where it is installed, plain otherwise."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from typing import Any

_PART = re.compile(r"<(think|search|tool_call|answer|information|tool_response)>.*?(?:</\1>|\Z)", re.DOTALL)
_STYLES = {
    "think": "italic bright_black", "search": "bold cyan", "tool_call": "bold cyan", "answer": "bold green",
    "information": "bright_black", "tool_response": "bright_black",
}  # fmt: skip
# a terminal would obey them: escape sequences, carriage returns, the bell
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def show_question(question_id: str, observation: str) -> None:
    """The beginning of an episode: a rule with the question's id, then the prompt."""
    if not find_spec("rich"):
        _plain(observation)
        return
    from rich.rule import Rule
    from rich.text import Text

    console = _console()
    console.print(Rule(Text(_sound(question_id), style="bold"), align="left"))
    console.print(Text(_sound(observation).strip()))


def show_turn(number: int, action: str, observation: str, reward: float, stop: str | None) -> None:
    """One turn: what the policy wrote, coloured by its tags; what came back, indented; at the end the outcome."""
    if not find_spec("rich"):
        _plain(action + observation + (f"\n[{stop}; reward {reward:g}]\n" if stop else ""))
        return
    from rich.padding import Padding
    from rich.text import Text

    console = _console()
    console.print(Text(f"turn {number}", style="bold yellow"))
    written = Text()
    said, end = _sound(action).strip(), 0
    for part in _PART.finditer(said):
        written.append(said[end : part.start()])
        written.append(part.group(), style=_STYLES[part.group(1)])
        end = part.end()
    written.append(said[end:])
    console.print(Padding(written or Text("(nothing)"), (0, 0, 0, 2)))
    if observation.strip():
        console.print(Padding(Text(_sound(observation).strip(), style="bright_black"), (0, 0, 0, 4)))
    if stop:
        colour = "green" if reward > 0 else "red"
        console.print(Text(f"{stop}; reward {reward:g}", style=f"bold {colour}"))


def _console() -> Any:
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False, soft_wrap=True)  # sys.stdout as it is now


def _plain(text: str) -> None:
    sys.stdout.write(_sound(text))
    sys.stdout.flush()


def _sound(text: str) -> str:
    """The text without what a terminal obeys or cannot show."""
    return _CONTROL.sub("\ufffd", text).encode("utf-8", "replace").decode("utf-8")
