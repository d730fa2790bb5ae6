"""Print the trajectories of a JSONL file: one colour a turn, grey for what the policy read.

python scripts/show_trajectories.py runs/quickstart/trajectories_after.jsonl --limit 3
python scripts/show_trajectories.py runs/quickstart/trajectories_after.jsonl --only wrong --no-prompt
python scripts/show_trajectories.py runs/quickstart/trajectories_after.jsonl --html episodes.html
python scripts/show_trajectories.py rollouts.parquet --audit --tokenizer path/to/model
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from sorl_algos.metrics import write_text_atomically
from sorl_algos.report_assets.markup import number, signed, visible
from sorl_algos.report_assets.runs import ShownEpisode, ShownTurn, read_episodes
from sorl_algos.trajectory_page import trajectory_page
from sorl_env.audit import audit
from sorl_env.trajectory_files import raw_rows

TURN_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")


@dataclass(frozen=True)
class Arguments:
    """Print the trajectories of a JSONL file: one colour a turn, grey for what the policy read."""

    file: tyro.conf.Positional[Path]
    """A file of trajectories, such as trajectories_after.jsonl of a run."""
    limit: int = 10
    """At most this many."""
    question_id: str | None = None
    """Those of this question alone."""
    only: Literal["all", "right", "wrong"] = "all"
    """Those with a reward above 0, or those without."""
    prompt: bool = True
    """Whether the first observation, the prompt, is shown."""
    html: Path | None = None
    """Write a page to look at in a browser, instead of printing."""
    audit: bool = False
    """Check a file of recorded token ids (JSONL or parquet, verl's rows too), instead of printing."""
    tokenizer: str | None = None
    """For the audit: directory or name of the model that sampled them."""


def chosen(episodes: list[ShownEpisode], arguments: Arguments) -> list[ShownEpisode]:
    """The episodes that the arguments ask for. Raises ValueError if there is none."""
    found = [
        episode
        for episode in episodes
        if arguments.question_id in (None, episode.question_id)
        and (arguments.only == "all" or (arguments.only == "right") == ((episode.reward or 0) > 0))
    ]
    if not found:
        known = ", ".join(sorted({episode.question_id for episode in episodes})[:5])
        raise ValueError(
            f"none of the {len(episodes)} trajectories of {arguments.file} is asked for by "
            f"--question-id {arguments.question_id} --only {arguments.only}; question ids begin with {known}"
        )
    return found[: arguments.limit]


def episode_lines(episode: ShownEpisode, *, prompt: bool) -> Iterator[Text | Rule | Padding]:
    """One episode. Everything is Text, so that brackets in it are not taken for styles."""
    yield Rule(Text(visible(episode.question or episode.question_id), style="bold"), align="left")
    reward = "–" if episode.reward is None else number(episode.reward, 3)
    good = (episode.reward or 0) > 0
    yield Text.assemble(
        ("reward ", "dim"), (reward, "bold green" if good else "bold red"),
        ("   stop ", "dim"), visible(episode.stop) or "–",
        ("   gold ", "dim"), visible(" · ".join(episode.answers)) or "–",
        ("   id ", "dim"), visible(episode.question_id),
    )  # fmt: skip
    for index, turn in enumerate(episode.turns):
        if turn.observation_text.strip() and (prompt or index > 0):
            yield Padding(Text(visible(turn.observation_text).strip(), style="bright_black"), (0, 0, 0, 2))
        yield _heading(index, turn)
        colour = TURN_COLOURS[index % len(TURN_COLOURS)]
        yield Padding(Text(visible(turn.action_text).strip() or "(empty)", style=colour), (0, 0, 0, 2))
    yield Text()


def _heading(index: int, turn: ShownTurn) -> Text:
    facts = [
        turn.action_kind,
        None if turn.ratio is None else f"ratio {turn.ratio:.3f}",
        None if turn.advantage is None else f"advantage {signed(turn.advantage)}",
        f"reward {number(turn.reward, 3)}" if turn.reward else None,
        f"found {' · '.join(turn.retrieved)}" if turn.retrieved else None,
    ]
    colour = TURN_COLOURS[index % len(TURN_COLOURS)]
    return Text.assemble(
        (f"turn {index + 1}", f"bold {colour}"), (visible("  ".join(["", *filter(None, facts)])), "dim")
    )


def print_audit(arguments: Arguments, console: Console) -> int:
    """Prints the report; 1 if the file has a fault."""
    tokenizer = None
    if arguments.tokenizer is not None:
        from transformers import AutoTokenizer  # seconds to import

        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    report = audit(raw_rows(arguments.file), tokenizer)
    for line in report.lines():
        console.print(line, markup=False, soft_wrap=True)
    console.print("sound" if report.sound else "NOT SOUND: do not train on this file")
    return 0 if report.sound else 1


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        if arguments.audit:
            return print_audit(arguments, console)
        episodes, broken = read_episodes(arguments.file)
        if not episodes:
            raise ValueError(f"{arguments.file} holds no trajectory; give a JSONL file that a run wrote")
        shown = chosen(episodes, arguments)
        if arguments.html is not None:
            write_text_atomically(arguments.html, trajectory_page(shown, arguments.file.name))
            console.print(f"{len(shown)} episodes in {arguments.html}", markup=False)
            return 0
    except (ValueError, OSError) as error:
        errors.print(f"show_trajectories: {error}", markup=False)
        return 2
    for episode in shown:
        for line in episode_lines(episode, prompt=arguments.prompt):
            console.print(line)
    if broken:
        lines = ", ".join(map(str, broken[:5]))
        errors.print(f"{arguments.file}: left out {len(broken)} lines that hold no trajectory ({lines})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
