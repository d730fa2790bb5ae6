"""Instruction texts. A prompt is a template that holds ``{question}`` exactly once."""

from __future__ import annotations

from pathlib import Path

PLACEHOLDER = "{question}"

PROMPTS: dict[str, str] = {
    # the tag dialect of Search-R1, in full
    "search_r1": (
        "Answer the question below. Think first, between <think> and </think>, and think again whenever "
        "you have learned something new. If a fact is missing, ask the search engine by writing "
        "<search>your query</search>; the passages it finds come back between <information> and "
        "</information>. You may search more than once. As soon as you know enough, write only the answer "
        "itself, as short as possible, between <answer> and </answer>, for example <answer>Lima</answer>.\n"
        "Question: {question}\n"
    ),
    # multiple choice with a search engine; the options follow the question
    "medical": (
        "Answer the medical question below by choosing one of its options. Think between <think> and </think>. "
        "You may look things up: write <search>your query</search>, and passages from the literature come "
        "back between <information> and </information>. When you are sure, write the letter of the right "
        "option, and nothing else, between <answer> and </answer>, for example <answer>A</answer>.\n"
        "Question: {question}\n"
    ),
    # the same two for a model that is shown the search tool by its chat template
    "tools": (
        "Answer the question below. Think first, between <think> and </think>, and think again whenever you have "
        "learned something new. If a fact is missing, call the tool search, one query a call; you may call it more "
        "than once. As soon as you know enough, write only the answer itself, as short as possible, between <answer> "
        "and </answer>, for example <answer>Lima</answer>.\nQuestion: {question}\n"
    ),
    "medical_tools": (
        "Answer the medical question below by choosing one of its options. Think between <think> and </think>. "
        "You may look things up in the literature by calling the tool search, one query a call. When you are sure, "
        "write the letter of the right option, and nothing else, between <answer> and </answer>, for example "
        "<answer>A</answer>.\nQuestion: {question}\n"
    ),
    # one answer from memory: what a model knows without a search engine
    "closed_book": (
        "Answer the question below from what you know. Think first, between <think> and </think>. Then write only the "
        "answer itself, as short as possible (where options are given, the letter of the right one), between <answer> "
        "and </answer>, for example <answer>Lima</answer>.\nQuestion: {question}\n"
    ),
    # one answer, no search
    "math": (
        "Solve the problem below step by step. Then give the final answer once, in its simplest form, as "
        "\\boxed{answer}.\nProblem: {question}\n"
    ),
    # for tiny models that were taught the tags by demonstrations
    "short": "Question: {question}\n",
}

# which dialect a wording explains; the others say nothing of it
DIALECT_OF = {
    "search_r1": "search_r1", "medical": "search_r1", "tools": "tool_call", "medical_tools": "tool_call",
    "closed_book": "search_r1", "math": "boxed",
}  # fmt: skip


def load_prompt(path: str | Path) -> str:
    """The template in a UTF-8 text file. Raises ValueError unless it holds ``{question}`` exactly once."""
    path = Path(path)
    try:
        template = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt file {path} is not UTF-8 ({error.reason}); save it as UTF-8") from None
    return _checked(template, f"prompt file {path}")


def resolve_prompt(prompt: str | Path) -> str:
    """The template meant by ``prompt``: a name in PROMPTS, a template text, or a file (a Path).

    Raises ValueError for anything else, with the known names.
    """
    if isinstance(prompt, Path):
        return load_prompt(prompt)
    if prompt in PROMPTS:
        return PROMPTS[prompt]
    if PLACEHOLDER in prompt:
        return _checked(prompt, "the prompt")
    raise ValueError(
        f"unknown prompt {prompt!r}; known: {', '.join(sorted(PROMPTS))}; or give a template with {PLACEHOLDER} in it"
    )


def prompt_text(prompt: str | Path, question: str) -> str:
    """The first observation: the template with the question put in. Braces in the question mean nothing."""
    return resolve_prompt(prompt).replace(PLACEHOLDER, question)


def _checked(template: str, name: str) -> str:
    found = template.count(PLACEHOLDER)
    if found != 1:
        raise ValueError(f"{name} holds {PLACEHOLDER} {found} times; it must hold it exactly once")
    return template
