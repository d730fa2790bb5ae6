"""Episodes as one self-contained page: the look of the run report, without its scripts."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from sorl_algos.report_assets.episodes import single_card
from sorl_algos.report_assets.markup import Html, tag
from sorl_algos.report_assets.runs import ShownEpisode

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; form-action 'none'"


def trajectory_page(episodes: Sequence[ShownEpisode], title: str) -> str:
    """A whole HTML page. Everything a model or a passage wrote is escaped, and no script may run."""
    style = resources.files("sorl_algos.report_assets").joinpath("style.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        tag("title", title),
        Html(f"<style>{style}</style>"),
    )
    cards = [single_card(episode, f"episode{index}") for index, episode in enumerate(episodes)]
    body = tag("body", tag("main", tag("h1", title), tag("p", f"{len(cards)} episodes"), cards))
    return "<!doctype html>\n" + tag("html", head, body, lang="en")
