"""Scores a model on sets of questions: `python scripts/evaluate.py MODEL SET ...`; see docs/evaluation.md.

python scripts/evaluate.py base world:test --limit 64
python scripts/evaluate.py runs/quickstart world:test world:test_unseen --retrieval empty
python scripts/evaluate.py smollm2 nq hotpotqa --data data --index indexes/wiki --recording results/searches.jsonl
python scripts/evaluate.py my-model qa medical aime --engine openai --url http://127.0.0.1:8000/v1 --tokenizer DIR

The same command goes on where it stopped, and gives the same numbers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from console import RichProgress, in_one_line
from evaluation_inputs import Mode
from evaluation_table import print_plans, print_results
from train import checked, fail


@dataclass(frozen=True)
class Arguments:
    model: tyro.conf.Positional[str]
    """base, smollm2, a model's directory, a run's directory, a hub name, or the name that a server knows."""
    sets: tyro.conf.Positional[tuple[str, ...]]
    """world:test, medical:test, a name (nq, medqa, aime_2024 ...), a group (qa, medical, aime), or a file."""
    data: Path = Path(os.environ.get("SORL_DATA") or "data")
    """Directory of the question files that names are looked up in."""
    output: Path | None = None
    """Directory of the results; default results/MODEL."""
    limit: int | None = None
    """At most so many questions of each set, chosen by a hash of their ids."""
    engine: Literal["hf", "vllm", "openai"] = "hf"
    url: str = ""
    """Base of an OpenAI-compatible server's API, as http://127.0.0.1:8000/v1; its key is read from OPENAI_API_KEY."""
    tokenizer: str = ""
    """Tokenizer of the server's model, where the model's name does not tell."""
    send: Literal["ids", "text"] = "ids"
    """How a server gets its prompts."""
    extras: bool = True
    """Whether a server is sent fields beyond OpenAI's own."""
    retrieval: Mode = "index"
    """index, or a control: none (no search allowed), empty (searches find nothing), random, oracle (passages)."""
    index: str | None = None
    """A built index or the URL of a retrieval server; the bundled sets bring their own."""
    passages: tuple[Path, ...] = ()
    """Corpus files that random and oracle draw from; default: the passages of the index."""
    only_with_passages: bool = False
    """Only questions that name passages of the corpus, which oracle always does: for the controls beside it."""
    recording: Path | None = None
    """A file that records what searches found; without --index it is played back."""
    prompt: str | None = None
    """A name or a template with {question}; default: the model's own, or else the environment's."""
    prompt_file: Path | None = None
    dialect: str | None = None
    max_searches: int | None = None
    top_k: int | None = None
    max_observation_words: int | None = None
    max_turn_tokens: int | None = None
    max_total_tokens: int | None = None
    style: Literal["continuation", "chat"] | None = None
    """One growing assistant text, or turns that close; default: the model's own, or else continuation."""
    system_prompt: str | None = None
    """A system message before the question; default: the model's own, or else none."""
    temperature: float = 0.0
    top_p: float = 1.0
    sampling_top_k: int = 0
    samples: int = 1
    """Episodes of each question, whose scores are averaged."""
    seed: int = 0
    batch: int = 32
    """Questions played at one time."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    device: str = "auto"
    threads: int = 0
    """Threads of torch; 0: its own choice."""
    restart: bool = False
    """Drop what earlier runs of this command left."""
    dry_run: bool = False
    """Check everything, show what would be played, load no model."""


def main() -> None:
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    arguments = checked(lambda: in_one_line(lambda: tyro.cli(Arguments, description=__doc__)))
    from evaluation_plan import make_plans, play_all

    from sorl_algos.evaluation.engines import make_player, trained_with
    from sorl_algos.rollout.engine import EngineError
    from sorl_env.controls import RetrievalFailed

    if arguments.threads:
        import torch

        torch.set_num_threads(arguments.threads)
    model, own = checked(lambda: trained_with(arguments.model))
    plans = checked(lambda: make_plans(arguments, own))
    output = arguments.output or Path("results") / arguments.model.strip("/.").replace("/", "_")
    if arguments.dry_run:
        checked(lambda: print_plans(plans, arguments.tokenizer or model, output))
        return
    names = ("dtype", "device", "batch", "url", "tokenizer", "send", "extras")
    options = {name: getattr(arguments, name) for name in names} | {"key": os.environ.get("OPENAI_API_KEY")}
    try:
        player = checked(lambda: make_player(arguments.engine, model, **options))
        with RichProgress() as progress:
            results = checked(lambda: play_all(arguments, plans, player, output, progress))
    except (EngineError, RetrievalFailed) as error:
        fail(" ".join(str(error).split()))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last whole batch")
        raise SystemExit(130) from None
    print_results(results, output, seed=arguments.seed)


if __name__ == "__main__":
    main()
