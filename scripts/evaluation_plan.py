"""Plans of an evaluation: each set with its environment, its searches, its identity. For scripts/evaluate.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
from evaluation_inputs import Searching, searching

import sorl_env  # noqa: F401  (registers the environments)
from sorl_algos.evaluation.engines import Player
from sorl_algos.evaluation.identity import data_digest, file_digest, text_digest
from sorl_algos.evaluation.play import Plan, longest_prompt, open_log, play, renderer_for
from sorl_algos.rollout.engine import Sampling
from sorl_algos.run import git_revision, package_versions
from sorl_env.benchmarks import environment_of, expand, find_set
from sorl_env.dialects import dialect_named
from sorl_env.prompts import PROMPTS, resolve_prompt

KINDS = {"SearchQA-v0": "open", "MedicalQA-v0": "choice", "MathQA-v0": "math"}
RULES = ("max_searches", "top_k", "max_observation_words", "dialect", "prompt")


def make_plans(arguments: Any, own: dict[str, Any]) -> list[Plan]:
    """A plan for each set; what the model and the engine are is added when they are there.

    Args:
        own: settings that the model was trained with; the command's go before them.

    Raises:
        ValueError, RetrievalError: an unknown set, prompt or rule; a set without questions, index or corpus.
    """
    if not arguments.sets:
        raise ValueError("no set given; name world:test, a set (nq, medqa ...), a group (qa, medical, aime) or a file")
    return [_plan(arguments, name, own) for name in expand(arguments.sets)]


def _plan(arguments: Any, name: str, own: dict[str, Any]) -> Plan:
    short, questions, path, left_out = find_set(name, arguments.data)
    environment = environment_of(questions)
    mode = "none" if environment == "MathQA-v0" else arguments.retrieval
    found: Searching = searching(
        mode, name, questions, index=arguments.index, passages=arguments.passages, recording=arguments.recording,
        only_with_passages=arguments.only_with_passages, seed=arguments.seed,
    )  # fmt: skip
    chosen = found.questions if arguments.limit is None else found.questions.sample_by_hash(arguments.limit)
    rules = _rules(arguments, own, mode, math=environment == "MathQA-v0")
    make_env = partial(_make_env, environment, found.retriever, chosen, rules)
    played = make_env(1).rules if len(chosen) else None
    tokens = {key: getattr(arguments, key) or own[key] for key in ("max_turn_tokens", "max_total_tokens")}
    sampling = Sampling(
        max_tokens=tokens["max_turn_tokens"],
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.sampling_top_k,
        stop=dialect_named(played.dialect).stop_strings if played else (),
    )
    style = arguments.style or own.get("chat_style", "continuation")
    system = arguments.system_prompt
    if system is None and environment != "MathQA-v0":  # as the prompt: a search agent's speaks of other things
        system = own.get("system_prompt")
    data = {
        "name": short,
        "questions": len(chosen),
        "sha256": data_digest(chosen),
        "limit": arguments.limit,
        "file_sha256": file_digest(path) if path else None,
        "left_out": dict(left_out) | ({"names no passage of the corpus": found.left_out} if found.left_out else {}),
    }
    identity = {
        "data": data,
        "retrieval": found.about,
        "prompt": _prompt(played.prompt, style, system) if played else {},
        "environment": {"id": environment, "rules": asdict(played) | {"prompt": None} if played else {}},
        "sampling": asdict(replace(sampling, seeds=None)) | {
            "samples": arguments.samples, "max_total_tokens": tokens["max_total_tokens"],
        },
        "seed": arguments.seed,
    }  # fmt: skip
    return Plan(
        name=short if arguments.retrieval == "index" or mode != arguments.retrieval else f"{short}.{mode}",
        questions=list(chosen),
        kind=KINDS[environment],
        make_env=make_env,
        identity=identity,
        sampling=sampling,
        samples=arguments.samples,
        seed=arguments.seed,
        batch=arguments.batch,
        max_total_tokens=tokens["max_total_tokens"],
        style=style,
        system=system,
    )


def _make_env(environment: str, retriever: Any, questions: Any, rules: dict[str, Any], slots: int) -> Any:
    return gymnasium.make_vec(environment, num_envs=slots, retriever=retriever, questions=questions, **rules)


def _rules(arguments: Any, own: dict[str, Any], mode: str, *, math: bool) -> dict[str, Any]:
    """Options of the environment: the command's, then the model's own, then (left out here) the environment's."""
    if arguments.prompt is not None and arguments.prompt_file is not None:
        raise ValueError("--prompt and --prompt-file are both given; choose one")
    given = {name: value for name in RULES if (value := getattr(arguments, name)) is not None}
    if arguments.prompt_file is not None:
        given["prompt"] = Path(arguments.prompt_file)
    if math:  # nothing is searched, and a search agent's prompt asks for another form of answer
        return {name: given[name] for name in ("prompt", "dialect") if name in given}
    rules = {name: own[name] for name in RULES if name in own}
    if "prompt_file" in own:
        rules["prompt"] = Path(own["prompt_file"])
    rules |= given
    if mode == "none":
        rules["max_searches"] = 0
        if "prompt" not in rules and rules.get("dialect", "search_r1") == "search_r1":
            rules["prompt"] = "closed_book"  # the environment's own would ask for searches
    return rules


def _prompt(prompt: Any, style: str, system: str | None) -> dict[str, Any]:
    name = prompt if prompt in PROMPTS else "its own"
    text = resolve_prompt(prompt)
    if not system:
        return {"name": name, "style": style, "sha256": text_digest(text)}
    return {"name": name, "style": style, "system": system, "sha256": text_digest(f"{system}\n{text}")}


def play_all(
    arguments: Any, plans: Sequence[Plan], player: Player, output: Path, progress: Any
) -> list[dict[str, Any]]:
    """Plays the sets one after another. What can be refused is refused before the first question is played."""
    plans = [replace(plan, identity=plan.identity | {"model": player.model, "engine": player.about}) for plan in plans]
    renderers = [renderer_for(plan, player.tokenizer) for plan in plans]
    for plan, renderer in zip(plans, renderers, strict=True):
        longest_prompt(plan, renderer)
        if not arguments.restart:
            open_log(plan, output)
    session = {"code": git_revision(), "versions": package_versions(), "batch": arguments.batch, "url": arguments.url}
    results = []
    for plan, renderer in zip(plans, renderers, strict=True):
        progress.begin(plan.name, plan.episodes)
        options = {"session": session, "restart": arguments.restart, "on_episodes": progress.advance}
        results.append(play(plan, player.engine, renderer, output, **options))
    return results
