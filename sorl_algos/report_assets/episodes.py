"""Trajectories on the page: the same question before and after training, side by side, one colour a turn."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from sorl_algos.report_assets.glossary import STOPS
from sorl_algos.report_assets.markup import Html, join, number, signed, tag
from sorl_algos.report_assets.runs import ShownEpisode, ShownTurn

TURN_COLOURS = 6
_TAG = re.compile(r"(</?(?:think|search|answer|information)>)")
_LONG = 420  # characters of an observation that are shown without a click

Pair = tuple[ShownEpisode | None, ShownEpisode | None]


def pairs(episodes: Mapping[str, list[ShownEpisode]]) -> list[Pair]:
    """(before, after) of the same question, in the files' order; a question played twice pairs in turn."""
    waiting: dict[str, list[ShownEpisode]] = defaultdict(list)
    for episode in episodes.get("after", []):
        waiting[_key(episode)].append(episode)
    paired: list[Pair] = []
    for episode in episodes.get("before", []):
        partner = waiting[_key(episode)]
        paired.append((episode, partner.pop(0) if partner else None))
    unmatched = {id(episode) for rest in waiting.values() for episode in rest}
    return paired + [(None, episode) for episode in episodes.get("after", []) if id(episode) in unmatched]


def overview(shown: Iterable[Pair], prefix: str) -> Html:
    """One small box a question, coloured by what became of it; a link to its card."""
    boxes = []
    for index, (before, after) in enumerate(shown):
        outcome = _outcome(before, after)
        boxes.append(
            tag(
                "a",
                str(index + 1),
                href=f"#{prefix}{index}",
                class_=f"box {outcome.split()[0]}",
                title=outcome,
            )
        )
    meaning = (
        "Green: right after training, framed where it was wrong before. "
        "Red: right before, wrong after. Grey: wrong both times."
    )
    return join([tag("div", boxes, class_="boxes"), tag("p", meaning, class_="boxes-key")])


def card(pair: Pair, anchor: str, clip: tuple[float, float] | None) -> Html:
    """One question with both its episodes. `clip` is the range outside which a ratio is marked as clipped."""
    before, after = pair
    either = after or before
    assert either is not None  # `pairs` never leaves both sides empty
    return tag(
        "article",
        _card_header(either),
        tag("div", _episode("before", before, clip), _episode("after", after, clip), class_="sides"),
        class_="card",
        id=anchor,
    )


def single_card(episode: ShownEpisode, anchor: str) -> Html:
    """One question with one episode of it."""
    return tag("article", _card_header(episode), _episode("episode", episode, None), class_="card", id=anchor)


def _card_header(episode: ShownEpisode) -> Html:
    return tag(
        "header",
        tag("h4", episode.question or f"question {episode.question_id}"),
        tag(
            "p",
            "gold answer: ",
            tag("b", " · ".join(episode.answers) or "not recorded"),
            tag("span", episode.question_id, class_="id"),
            class_="gold",
        ),
    )


def _episode(stage: str, episode: ShownEpisode | None, clip: tuple[float, float] | None) -> Html:
    if episode is None:
        return tag("section", tag("h5", stage), tag("p", "not recorded", class_="faint"), class_="side")
    searches = sum(turn.action_kind == "search" for turn in episode.turns)
    verdict = "neutral" if episode.reward is None else "good" if episode.reward > 0 else "bad"
    return tag(
        "section",
        tag(
            "h5",
            stage,
            tag(
                "span",
                "reward ",
                "–" if episode.reward is None else number(episode.reward, 3),
                class_=f"chip {verdict}",
            ),
            tag(
                "span",
                episode.stop.replace("_", " ") or "no stop reason",
                class_="chip",
                title=STOPS.get(episode.stop),
            ),
            tag("span", f"{searches} search" + ("" if searches == 1 else "es"), class_="chip"),
        ),
        [_turn(index, turn, clip) for index, turn in enumerate(episode.turns)],
        class_="side",
    )


def _turn(index: int, turn: ShownTurn, clip: tuple[float, float] | None) -> Html:
    return tag(
        "div",
        _observation(index, turn.observation_text),
        tag(
            "div",
            tag(
                "div",
                tag("span", f"turn {index + 1}", class_="turn-name"),
                _badges(turn, clip),
                class_="badges",
            ),
            _action(turn.action_text),
            tag("p", "found: ", " · ".join(turn.retrieved), class_="found") if turn.retrieved else None,
            class_=f"action t{index % TURN_COLOURS}",
        ),
        class_="turn",
    )


def _observation(index: int, text: str) -> Html:
    """The text that the policy read. The first one is the prompt, much the same every time: folded away."""
    body = tag(
        "pre",
        [tag("span", part, class_="tag") if _TAG.fullmatch(part) else part for part in _TAG.split(text.strip())],
    )
    if not text.strip():
        return tag("div", tag("span", "no observation", class_="label"), class_="observation")
    if index == 0:
        return tag("details", tag("summary", "prompt · masked"), body, class_="observation")
    label = tag(
        "span",
        "retrieved text · masked" if "<information>" in text else "observation · masked",
        class_="label",
        title="Not sampled by the policy: carries no gradient and enters no ratio.",
    )
    if len(text) <= _LONG:
        return tag("div", label, body, class_="observation")
    more = tag("button", "show all", type="button", class_="more", aria_expanded="false")
    return tag("div", label, body, more, class_="observation long")


def _action(text: str) -> Html:
    """What the policy wrote, tags faint, query, answer and thought each in their style."""
    inside, parts = "", []
    for part in _TAG.split(text):
        if _TAG.fullmatch(part):
            inside = "" if part.startswith("</") else part.strip("<>")
            parts.append(tag("span", part, class_="tag"))
        elif part:
            parts.append(tag("span", part, class_=f"in-{inside}" if inside else None))
    return tag("pre", parts or tag("span", "(empty)", class_="faint"))


def _badges(turn: ShownTurn, clip: tuple[float, float] | None) -> list[Html]:
    badges = []
    if turn.action_kind and turn.action_kind not in ("search", "answer"):
        badges.append(
            tag(
                "span",
                turn.action_kind,
                class_="badge bad",
                title="cut at the length limit" if turn.action_kind == "cut" else "neither a search nor an answer",
            )
        )
    if turn.ratio is not None:
        outside = clip is not None and not clip[0] <= turn.ratio <= clip[1]
        badges.append(
            tag(
                "span",
                f"ratio {turn.ratio:.3f}",
                class_="badge clipped" if outside else "badge",
                title="the trained policy against the starting one, exp of the turn's mean log-ratio"
                + (", outside the clip range" if outside else ""),
            )
        )
    if turn.advantage is not None:
        sign = "good" if turn.advantage > 0 else "bad" if turn.advantage < 0 else ""
        badges.append(
            tag(
                "span",
                f"advantage {signed(turn.advantage)}",
                class_=f"badge {sign}".strip(),
                title="mean advantage of the turn's tokens: above 0 is made likelier, below 0 less likely",
            )
        )
    if turn.reward:
        badges.append(
            tag(
                "span",
                f"reward {number(turn.reward, 3)}",
                class_="badge good" if turn.reward > 0 else "badge bad",
            )
        )
    return badges


def _key(episode: ShownEpisode) -> str:
    return episode.question_id or episode.question


def _outcome(before: ShownEpisode | None, after: ShownEpisode | None) -> str:
    if before is None or after is None or before.reward is None or after.reward is None:
        return "unpaired"
    if after.reward > before.reward:
        return "improved"
    if after.reward < before.reward:
        return "worse"
    return "right both times" if after.reward > 0 else "wrong both times"
