"""HTML elements that escape what they hold, so that no caller can forget to."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable

# C0 controls (without tab and newline), DEL and C1 controls: invisible at best, terminal commands at worst.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Html(str):
    """Markup that is already safe; every other string is escaped when it becomes a child or an attribute."""

    __slots__ = ()


Child = str | None | Iterable["Child"]


def visible(text: str) -> str:
    """The text with control characters as symbols and lone surrogates replaced: safe to write and print."""
    text = text.replace("\r\n", "\n").encode("utf-8", "replace").decode("utf-8")
    return _CONTROL.sub(lambda found: chr(0x2400 + ord(found[0])) if ord(found[0]) < 0x20 else "\ufffd", text)


def escape(text: str) -> Html:
    """The text as HTML that shows it letter by letter; quotes are escaped too, for attributes."""
    return text if isinstance(text, Html) else Html(html.escape(visible(text)))


def tag(name: str, *children: Child, **attributes: str | float | None) -> Html:
    """An element. `class_` becomes `class`, `data_x` becomes `data-x`; None leaves an attribute out."""
    written = [
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(visible(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    ]
    return Html(f"<{name}{''.join(written)}>{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Html:
    """Children side by side, escaped unless they are Html; iterables are flattened, None is nothing."""
    parts = []
    for child in children:
        if child is None:
            continue
        parts.append(escape(child) if isinstance(child, str) else join(child))
    return Html("".join(parts))


def number(value: float, digits: int = 4) -> str:
    """A number for reading: at most `digits` significant digits, whole numbers whole, a true minus sign."""
    if not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e7:
        text = str(int(value))
    else:
        text = f"{value:.{digits}g}"
    return text.replace("-", "\N{MINUS SIGN}", 1) if text.startswith("-") else text


def signed(value: float, decimals: int = 2) -> str:
    """A difference with its sign: +0.42, −0.10, 0.00."""
    text = f"{value:+.{decimals}f}"
    if not text.strip("+-0."):
        return text[1:]
    return text.replace("-", "\N{MINUS SIGN}", 1)


def scrolling(table: Html) -> Html:
    return tag("div", table, class_="scroll", tabindex=0)
