"""Read a question set, check every row, and write it as JSONL or as verl's parquet rows.

python scripts/prepare_data.py nq --output data/nq.jsonl
python scripts/prepare_data.py hub:openlifescienceai/medmcqa --split validation --output data/medmcqa.jsonl.gz
python scripts/prepare_data.py benchmark.json --config medqa --output data/medqa.parquet --prompt medical
python scripts/prepare_data.py dapo_math_17k --dry-run
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from sorl_env.prompts import load_prompt
from sorl_env.question_sets import PUBLIC_SETS, json_line, open_source, read_questions, stated_size, write_questions


@dataclass(frozen=True)
class Arguments:
    """Read a question set, check every row, and write it as JSONL or as verl's parquet rows."""

    source: tyro.conf.Positional[str] = ""
    """A known set (--list shows them), a file (JSONL, JSON, parquet), or hub:owner/name."""
    output: Path | None = None
    """Where to write: .jsonl, .jsonl.gz, or .parquet (verl's rows)."""
    config: str | None = None
    """Configuration on the hub, or the set within MIRAGE's benchmark.json."""
    split: str | None = None
    """Split on the hub (default: the known set's own, otherwise test)."""
    kind: str | None = None
    """Kind of all questions ("math" for mathematics); told from the rows where left out."""
    limit: int | None = None
    """At most so many questions."""
    prompt: str = "search_r1"
    """Prompt of verl's rows: a name, or a template with {question}."""
    prompt_file: Path | None = None
    """A file with such a template."""
    dry_run: bool = False
    """Say what would be read and written, and how large it is; write nothing."""
    list: bool = False
    """Show the known sets."""


def show_sets(console: Console) -> None:
    table = Table("name", "on the hub", "configuration", "split")
    for name, known in PUBLIC_SETS.items():
        table.add_row(name, known.hub, ", ".join(filter(None, known.configs)) or "-", known.split)
    console.print(table)
    console.print("BioASQ and MIRAGE (benchmark.json) are handed out as files: give the path.")


def dry_run(arguments: Arguments, console: Console) -> None:
    """Hub sets: what the hub states, nothing is fetched. Files: every row is read and checked."""
    if not Path(arguments.source).is_file():
        open_source(arguments.source)  # refuses an unknown name
        rows, size = stated_size(arguments.source, config=arguments.config, split=arguments.split)
        shown = "an unknown number of" if rows is None else f"{rows:,}"
        stored = "of unknown size" if size is None else f"about {size / 1e6:,.1f} MB"
        console.print(f"{arguments.source}: {shown} rows, {stored}; nothing was fetched or written")
        return
    questions, left_out = read_questions(
        arguments.source, config=arguments.config, kind=arguments.kind, limit=arguments.limit
    )
    size = sum(len(json_line(question)) for question in questions)
    console.print(f"{arguments.source}: {len(questions):,} questions, about {size / 1e6:,.2f} MB as JSONL")
    for reason, count in left_out.items():
        console.print(f"  {count:,} rows left out: {reason}", markup=False)
    kinds = sorted({question.kind for question in questions})
    console.print(f"  kinds: {', '.join(kinds)}; the first: {questions[0].text[:100]!r}", markup=False)
    console.print("nothing was written")


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    console, errors = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    if arguments.list:
        show_sets(console)
        return 0
    try:
        if not arguments.source:
            raise ValueError("no source given; name a known set (--list), a file, or hub:owner/name")
        if arguments.dry_run:
            dry_run(arguments, console)
            return 0
        if arguments.output is None:
            raise ValueError("no --output given; name a .jsonl, .jsonl.gz or .parquet file, or use --dry-run")
        prompt = load_prompt(arguments.prompt_file) if arguments.prompt_file else arguments.prompt
        with console.status("reading") as status:
            questions, left_out = read_questions(
                arguments.source,
                config=arguments.config,
                split=arguments.split,
                kind=arguments.kind,
                limit=arguments.limit,
                on_row=lambda number: status.update(f"reading: {number:,} rows") if number % 500 == 0 else None,
            )
            count = write_questions(
                arguments.output, questions, name=questions.name, split=arguments.split or "train", prompt=prompt
            )
    except (ValueError, OSError, ImportError) as error:
        errors.print(f"prepare_data: {' '.join(str(error).split())}", markup=False)
        return 2
    console.print(f"{count:,} questions in {arguments.output} ({arguments.output.stat().st_size / 1e6:,.2f} MB)")
    for reason, left in left_out.items():
        console.print(f"{left:,} rows left out: {reason}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
