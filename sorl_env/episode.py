"""The rules of the game, without gymnasium: one question, some searches, one answer.

One episode, by hand::

    episode = Episode(question, EpisodeRules(max_searches=2), reward_fn)
    observation = episode.begin()
    query = episode.query(action_text)  # what this action asks the retriever, or None
    hits = retriever.search([query], rules.top_k)[0] if query is not None else None
    step = episode.advance(action_text, hits)  # one turn
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retrieval_index.types import Hit
from sorl_env.actions import MAX_QUERY_CHARS, Action, Answer, CutText, Query, Search, clean_query
from sorl_env.choices import options_of, without_options
from sorl_env.dialects import Dialect, dialect_named
from sorl_env.observations import budget_note, hint
from sorl_env.prompts import DIALECT_OF, prompt_text, resolve_prompt
from sorl_env.questions import Question
from sorl_env.rewards import RewardFn, answer_scores, checked_reward

STOP_REASONS = ("answered", "turn_limit", "length_limit", "retrieval_error")

FEWEST_OBSERVATION_WORDS = 3  # two tags and a word

INFO_KEYS = (
    "question_id",
    "stop",
    "action_kind",
    "retrieved_ids",
    "retrieved_titles",
    "searches",
    "answer",
    "scores",
)


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """How an episode is played.

    Args:
        max_searches: searches allowed; one further turn is left for the answer, so an episode has at most
            ``max_searches + 1`` turns.
        top_k: passages asked for in each search.
        max_observation_words: upper bound on the words of one observation, the two tags included; None: no
            limit.
        max_query_chars: longer queries are cut before they reach the retriever.
        invalid_penalty: taken off the reward of every turn without a valid action; turns cut by the engine
            are spared.
        search_cost: taken off the reward of every turn whose search was carried out.
        prompt: a name in PROMPTS, a template that holds ``{question}``, or the path (a Path) of such a file, which
            is read once, here; None: the wording that explains the dialect.
        tell_budget: whether observations say how many searches (and words, with ``max_total_words``) are left.
        max_turn_words: a longer turn counts as cut at its length limit, whatever it holds; None: no limit.
        max_total_words: words of all turns and observations after the prompt; observations are cut to what is
            left, and an episode that has used it up without an answer ends with stop "length_limit"; None: no
            limit. (Budgets in tokens are the engine's.)
        dialect: a name in ``dialects.DIALECTS``.
        options_in_query: whether a query may hold the options of a multiple-choice question; if not, they are
            taken out of it, and the question itself is searched for where nothing else is left.
        last_turn_answers: whether the last turn ends the episode as answered whatever is in it (a problem that is
            solved in one go), and not as cut off by the turn limit.

    Raises ValueError for a value that makes no sense.
    """

    max_searches: int = 2
    top_k: int = 3
    max_observation_words: int | None = 400
    max_query_chars: int = MAX_QUERY_CHARS
    invalid_penalty: float = 0.0
    search_cost: float = 0.0
    prompt: str | Path | None = None
    tell_budget: bool = False
    dialect: str = "search_r1"
    options_in_query: bool = True
    last_turn_answers: bool = False
    max_turn_words: int | None = None
    max_total_words: int | None = None

    def __post_init__(self) -> None:
        _at_least(0, max_searches=self.max_searches)
        _at_least(1, top_k=self.top_k, max_query_chars=self.max_query_chars)
        if self.max_observation_words is not None:
            _at_least(FEWEST_OBSERVATION_WORDS, max_observation_words=self.max_observation_words)
        for name in ("max_turn_words", "max_total_words"):
            if getattr(self, name) is not None:
                _at_least(1, **{name: getattr(self, name)})
        for name in ("invalid_penalty", "search_cost"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise ValueError(
                    f"{name} is what is taken off the reward: a finite number of at least 0, got {value!r}"
                )
        for name in ("tell_budget", "options_in_query", "last_turn_answers"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        dialect = dialect_named(self.dialect)
        if self.max_searches and not dialect.search_form:
            raise ValueError(f"dialect {self.dialect!r} has no search; set max_searches=0 or take another dialect")
        object.__setattr__(self, "prompt", checked_prompt(self.prompt, dialect))

    @property
    def max_turns(self) -> int:
        return self.max_searches + 1


@dataclass(frozen=True, slots=True)
class Step:
    """What one turn led to. ``observation`` is "" when the episode is over."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class Episode:
    """One play of one question. Plain state, no clock, no randomness."""

    def __init__(self, question: Question, rules: EpisodeRules, reward_fn: RewardFn) -> None:
        self.question = question
        self.rules = rules
        self.reward_fn = reward_fn
        self.action_texts: list[str] = []
        self.observations: list[str] = []
        self.rewards: list[float] = []
        self.searches = 0
        self.stop: str | None = None
        self._parsed: tuple[str, Action] | None = None

    @property
    def _dialect(self) -> Dialect:
        return dialect_named(self.rules.dialect)  # looked up, so that an episode can be pickled

    @property
    def finished(self) -> bool:
        return self.stop is not None

    @property
    def turns_left(self) -> int:
        return 0 if self.finished else self.rules.max_turns - len(self.action_texts)

    def begin(self) -> str:
        """The first observation. Starts the episode anew."""
        self.action_texts, self.rewards = [], []
        self.searches, self.stop, self._parsed = 0, None, None
        assert self.rules.prompt is not None  # the rules put one in
        first = prompt_text(self.rules.prompt, question_block(self.question))
        if self.rules.tell_budget:
            first += budget_note(self.rules.max_searches, self.rules.max_total_words)
        self.observations = [first]
        return first

    def query(self, action_text: str) -> str | None:
        """The query that ``advance`` needs the hits of, or None if this action leads to no search.

        Changes nothing. The last turn is for the answer: a search asked for in it is not carried out. The text is a
        ``Query``, which knows its question.
        """
        self._check_running()
        action = self._parse(self._within_turn(action_text))
        if not isinstance(action, Search) or self.turns_left <= 1:
            return None
        room = self._observation_words(action_text)
        if room is not None and room < FEWEST_OBSERVATION_WORDS:
            return None
        text = action.query
        if not self.rules.options_in_query and self.question.kind == "choice":
            text = without_options(text, self.question) or clean_query(self.question.text, self.rules.max_query_chars)
        return Query(text, self.question.id, self.searches)

    def advance(self, action_text: str, hits: Sequence[Hit] | None = None, error: bool = False) -> Step:
        """Play one turn.

        Args:
            action_text: what the policy wrote; CutText if the engine cut it at its length limit.
            hits: what the retriever found for ``query(action_text)``; None if that was None.
            error: the search failed; the episode ends with stop "retrieval_error".

        Raises RuntimeError outside a running episode, ValueError where hits and query do not fit together.
        """
        action_text = self._within_turn(action_text)
        query = self.query(action_text)
        if query is not None and hits is None and not error:
            raise ValueError(f"this action searches for {query!r}: advance() needs its hits, or error=True")
        if query is None and (hits is not None or error):
            raise ValueError("this action leads to no search: advance() takes neither hits nor error for it")
        action = self._parse(action_text)
        kind = _kind(action, action_text)
        last = self.turns_left == 1
        self.action_texts.append(action_text)

        reward, observation, scores = 0.0, "", None
        if error:
            self.stop = "retrieval_error"
        elif isinstance(action, Answer):
            self.stop = "answered"
        elif hits is not None:
            self.searches += 1
            reward -= self.rules.search_cost
            limits = [self.rules.max_observation_words, self._observation_words()]
            observation = self._dialect.render(hits, min((n for n in limits if n is not None), default=None))
        elif kind == "invalid":
            reward -= self.rules.invalid_penalty
        if last and self.stop is None:
            answered = "answered" if self.rules.last_turn_answers else "turn_limit"
            self.stop = "length_limit" if kind == "cut" else answered
        if self.stop is None and not isinstance(action, (Search, Answer)):
            forms = [self._dialect.search_form] if self.turns_left > 1 else []
            observation = hint(action.reason, [*filter(None, forms), self._dialect.answer_form])
        left = self._words_left(observation)
        left = None if left is None else left - self._note_words
        if self.stop is None and left is not None and (left <= 0 or (kind == "search" and query is None)):
            self.stop, observation = "length_limit", ""

        if self.stop is None:
            if self.rules.tell_budget:
                observation += budget_note(self.turns_left - 1, left)
        elif not error:
            said = tuple(map(self._dialect.tagged, self.action_texts))
            reward += checked_reward(self.reward_fn, said, self.question)
            scores = answer_scores(said, self.question)
        self.observations.append(observation)
        self.rewards.append(reward)
        found = () if hits is None else tuple(hit.passage for hit in hits)
        info = self.info(kind)
        info["retrieved_ids"] = tuple(passage.id for passage in found)
        info["retrieved_titles"] = tuple(passage.title for passage in found)
        info["answer"] = action.text if isinstance(action, Answer) else None
        info["scores"] = scores
        return Step(observation, reward, self.stop == "answered", self.stop not in (None, "answered"), info)

    def info(self, action_kind: str | None = None) -> dict[str, Any]:
        """A new info dictionary with the keys of INFO_KEYS, for the state as it is."""
        return {
            "question_id": self.question.id,
            "stop": self.stop,
            "action_kind": action_kind,
            "retrieved_ids": (),
            "retrieved_titles": (),
            "searches": self.searches,
            "answer": None,
            "scores": None,
        }

    def transcript(self) -> str:
        """Prompt, actions and observations so far, one after another, with the outcome."""
        parts = [self.observations[0]] if self.observations else []
        for action, observation in zip(self.action_texts, self.observations[1:], strict=True):
            parts += [action, observation]
        if self.finished:
            parts.append(f"\n[{self.stop}; reward {sum(self.rewards):g}]\n")
        return "".join(parts)

    def get_state(self) -> dict[str, Any]:
        """All that ``set_state`` needs, as plain data that JSON can hold."""
        return {
            "question_id": self.question.id,
            "rules": _plain_rules(self.rules),
            "action_texts": [str(text) for text in self.action_texts],
            "cut": [isinstance(text, CutText) for text in self.action_texts],
            "observations": list(self.observations),
            "rewards": list(self.rewards),
            "searches": self.searches,
            "stop": self.stop,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where ``get_state`` was called.

        Raises ValueError for another question or other rules.
        """
        if state["question_id"] != self.question.id:
            raise ValueError(f"the state is of question {state['question_id']!r}, this episode of {self.question.id!r}")
        if state["rules"] != _plain_rules(self.rules):
            raise ValueError("the state was made under other rules; make the environment with the same options")
        cut = zip(state["action_texts"], state["cut"], strict=True)
        self.action_texts = [CutText(text) if was_cut else text for text, was_cut in cut]
        self.observations = list(state["observations"])
        self.rewards = [float(reward) for reward in state["rewards"]]
        self.searches = int(state["searches"])
        self.stop = state["stop"]
        self._parsed = None

    def _within_turn(self, action_text: str) -> str:
        """The turn as it counts: one over its budget of words was cut."""
        most = self.rules.max_turn_words
        if most is None or isinstance(action_text, CutText) or len(action_text.split()) <= most:
            return action_text
        return CutText(action_text)

    def _words_left(self, *more: str) -> int | None:
        """Words left of the whole budget, after those of ``more``; None without a budget."""
        if self.rules.max_total_words is None:
            return None
        used = (*self.action_texts, *self.observations[1:], *more)
        return self.rules.max_total_words - sum(len(text.split()) for text in used)

    @property
    def _note_words(self) -> int:
        """Words of the line that tells what is left, which is in the budget itself."""
        limited = self.rules.max_total_words is not None
        return len(budget_note(0, 0 if limited else None).split()) if self.rules.tell_budget else 0

    def _observation_words(self, *more: str) -> int | None:
        """Words that the passages of the next observation may take, after those of ``more``; None without a budget."""
        left = self._words_left(*more)
        return None if left is None else left - self._note_words - self._dialect.tag_words

    def _parse(self, action_text: str) -> Action:
        if self._parsed is None or self._parsed[0] is not action_text:
            self._parsed = (action_text, self._dialect.parse(action_text, self.rules.max_query_chars))
        return self._parsed[1]

    def _check_running(self) -> None:
        if not self.observations:
            raise RuntimeError("the episode has not begun; call reset() (begin() on an Episode) first")
        if self.finished:
            raise RuntimeError(f"the episode is over ({self.stop}); call reset() before the next step")


def question_block(question: Question) -> str:
    """The question's text, followed by its options, one a line, where it is multiple choice."""
    if question.kind != "choice":
        return question.text
    lines = [f"{letter}) {option}" for letter, option in options_of(question).items()]
    return "\n".join([question.text, *lines])


def _kind(action: Action, action_text: str) -> str:
    if isinstance(action_text, CutText):
        return "cut"
    if isinstance(action, Search):
        return "search"
    return "answer" if isinstance(action, Answer) else "invalid"


def checked_prompt(prompt: str | Path | None, dialect: Dialect) -> str:
    """A name or a template. Raises ValueError for what is neither, or for a wording that explains another dialect."""
    if prompt is None:
        return dialect.prompt
    template = resolve_prompt(prompt)
    explained = DIALECT_OF.get(prompt, dialect.name) if isinstance(prompt, str) else dialect.name
    if explained != dialect.name:
        fitting = [name for name, meant in DIALECT_OF.items() if meant == dialect.name]
        raise ValueError(
            f"prompt {prompt!r} explains the dialect {explained!r}, but the dialect is {dialect.name!r}; use "
            f"{' or '.join(map(repr, [*fitting, 'short']))}, or a wording of your own"
        )
    return template if isinstance(prompt, Path) else prompt


def _plain_rules(rules: EpisodeRules) -> dict[str, Any]:
    return asdict(rules)


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
