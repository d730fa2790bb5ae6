"""Trains a search agent: `python scripts/train.py PRESET [--option value ...]`; `--help` after a preset lists options.

`--config FILE` (YAML, JSON) changes settings first. A run directory that holds the same run is resumed. `--dry-run`
trains nothing: it shows the settings and the memory a GPU needs (`--gpus N --gpu-memory-gb GB`: of other GPUs than the
preset's or this machine's), and refuses what does not fit. Presets for real models are called
MODEL-TASK-ALGORITHM-Ngpu, such as qwen2.5-7b-nq-so_ppo-8gpu (docs/scaling.md has the table).
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import tyro
from console import RichProgress, in_one_line, results_table, settle_processor
from dry_report import dry_run
from dry_run import DryRun, take_options
from presets import PRESETS, SMALL, known_presets
from train_inputs import eval_sets, load_questions, load_retriever

from retrieval_index.types import RetrievalError
from sorl_algos.config import TrainConfig
from sorl_algos.config_file import load_settings


def fail(message: str) -> NoReturn:
    """One clear line and exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def parse(arguments: list[str]) -> tuple[TrainConfig, DryRun | None]:
    """The configuration meant by the command line; and if it is only to be shown, for which hardware."""
    arguments, dry = take_options(arguments)
    presets = PRESETS if arguments and arguments[0] in PRESETS else SMALL
    if "--config" in arguments[:-1]:
        place = arguments.index("--config")
        settings = load_settings(Path(arguments[place + 1]), TrainConfig)
        presets = {name: (text, dataclasses.replace(base, **settings)) for name, (text, base) in presets.items()}
        arguments = arguments[:place] + arguments[place + 2 :]
    if not arguments or (arguments[0] not in PRESETS and not arguments[0].startswith("-")):
        given = f"unknown preset {arguments[0]!r}" if arguments else "no preset given"
        fail(f"{given}; known: {known_presets()} (try `train.py quickstart --help`)")
    if arguments[0] in presets:  # the others' options need not be put together
        presets = {arguments[0]: presets[arguments[0]]}
    cli = tyro.extras.overridable_config_cli
    return in_one_line(lambda: cli(presets, description=__doc__, args=arguments)), dry


def checked(make: Callable[[], Any]) -> Any:
    """The result of ``make``; bad input becomes one line and exit status 2, before anything is written."""
    try:
        return make()
    except (ValueError, FileNotFoundError, KeyError, RetrievalError) as error:
        fail(" ".join(str(error).split()))


def stopped() -> NoReturn:
    """What an interrupted run says, and the exit status of Ctrl-C."""
    print("interrupted; the same command goes on from the last checkpoint")
    raise SystemExit(130)


def main() -> None:
    settle_processor()
    config, dry = checked(lambda: parse(sys.argv[1:]))
    if dry is not None:
        checked(lambda: dry_run(config, dry, take_options(sys.argv[1:])[0]))
        return
    retriever = checked(lambda: load_retriever(config.index))
    questions = checked(lambda: load_questions(config.questions, config.env))
    dev = checked(lambda: load_questions(config.eval_questions, config.env))
    sets = checked(lambda: eval_sets(config, config.test_limit))
    from sorl_algos.report import write_report
    from sorl_algos.run import Run  # torch comes with it: seconds

    main_rank = os.environ.get("RANK", "0") == "0"  # torchrun and accelerate launch start a process for each rank
    with RichProgress(shown=main_rank) as progress:
        run = checked(
            lambda: Run(
                config,
                retriever=retriever,
                train_questions=questions,
                dev_questions=dev,
                eval_sets=sets,
                progress=progress,
            )
        )
        try:
            summary = run.execute()
        except KeyboardInterrupt:  # between updates there is nothing to save that is not saved
            stopped()
    if not main_rank:
        return
    if summary["updates_run"] == 0 and summary["finished"]:
        print(f"all {config.updates} updates of {config.run_dir} were done already; raise --updates to go on")
    else:
        print(
            f"{summary['updates_run']} updates run, {summary['updates_done']} of {config.updates} done, "
            f"{summary['seconds'] / 60:.1f} minutes"
        )
    if summary.get("alarm_update") is not None:
        print(f"the collapse alarm went off after {summary['alarm_update']} updates: see {config.run_dir}/alarms.jsonl")
    if any(entry["stage"] == "after" for entry in summary["evaluations"]):
        results_table(summary["evaluations"])
    report = write_report(config.run_dir, config.run_dir / "report.html")
    print(f"report: {report}")
    if not summary["finished"] and config.on_alarm == "stop" and summary.get("alarm", {}).get("active"):
        print("stopped by the alarm; the same command with --on-alarm log goes on from the last checkpoint")
        raise SystemExit(3)
    if not summary["finished"] and config.stop_after_minutes is None:
        stopped()


if __name__ == "__main__":
    main()
