"""Some processes at a time, until there are no more to begin."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

Job = TypeVar("Job")
Ended = subprocess.CompletedProcess[str]


def side_by_side(
    jobs: Sequence[Job],
    start: Callable[[Job], subprocess.Popen[str]],
    *,
    processes: int,
    minutes: float | None = None,
) -> Iterator[tuple[Job, int, Ended]]:
    """Runs the jobs in order, so many at a time, and gives each as it ends, with how many are left and its output.

    What still runs when the caller stops iterating is killed.

    Args:
        start: begins a job's process, with pipes for its output.
        minutes: no job is begun after so many.

    Raises:
        ValueError: not one process.
    """
    if processes < 1:
        raise ValueError(f"processes is {processes}; at least 1 is needed")
    waiting, running = list(jobs), dict[Future[Ended], tuple[Job, subprocess.Popen[str]]]()
    began = time.monotonic()
    with ThreadPoolExecutor(processes) as threads:  # a thread a process reads its pipes
        try:
            while True:
                late = minutes is not None and time.monotonic() - began > 60 * minutes
                while waiting and len(running) < processes and not late:
                    job = waiting.pop(0)
                    process = start(job)
                    running[threads.submit(_until_the_end, process)] = (job, process)
                if not running:
                    return
                for ended in wait(running, return_when=FIRST_COMPLETED).done:
                    job, _ = running.pop(ended)
                    yield job, len(waiting) + len(running), ended.result()
        finally:
            for _, process in running.values():
                process.kill()


def _until_the_end(process: subprocess.Popen[str]) -> Ended:
    printed, errors = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, printed, errors)
