"""Line charts as inline SVG: axes, ticks, a thin raw line, a thick running mean, values to point at."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from sorl_algos.report_assets.markup import Html, number, tag

WIDTH, HEIGHT = 380, 204
LEFT, RIGHT, TOP, BOTTOM = 46, 372, 10, 170
DASHES = (None, "6 3", "1.5 3", "9 3 2 3")
COLOURS = 8
MOST_POINTS = 240

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Series:
    """One line: finite (x, y) points in order of x; colour 0 to 7, dash 0 to 3."""

    label: str
    points: Points
    colour: int = 0
    dash: int = 0
    markers: bool = False


@dataclass(frozen=True, slots=True)
class Guide:
    """A horizontal line at a value that means something."""

    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at an update where something happened, in the colour of its run (None: of an alarm)."""

    x: float
    label: str
    colour: int | None = None


def smoothing_window(count: int) -> int:
    """How many updates the running mean spans: about a fifteenth of them, 1 (no smoothing) for a few."""
    return 1 if count < 10 else max(3, min(25, round(count / 15)))


def running_mean(points: Points, window: int) -> list[tuple[float, float]]:
    """At every point the mean of it and the up to `window - 1` before it: nothing from the future."""
    smooth, total = [], 0.0
    for index, (x, y) in enumerate(points):
        total += y
        if index >= window:
            total -= points[index - window][1]
        smooth.append((x, total / min(index + 1, window)))
    return smooth


def thin_out(points: Points, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most `most` points: the lowest and the highest of each stretch, so that spikes survive."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 2))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        kept.extend(sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}))
    return kept


def nice_step(span: float, ticks: int) -> float:
    """The step, 1, 2 or 5 times a power of ten, that cuts `span` (positive) into about `ticks` pieces."""
    power = 10.0 ** math.floor(math.log10(span / ticks))
    return next((m * power for m in (1, 2, 5) if m * power >= span / ticks * 0.999), 10 * power)


def axis(
    values: Sequence[float], *, floor: float | None, ceiling: float | None
) -> tuple[float, float, float]:
    """Low end, high end and step of the axis; without the few values that would flatten all the others."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    if len(ordered) >= 8:
        few = max(1, len(ordered) // 33)
        inner_low, inner_high = ordered[few], ordered[-1 - few]
        if high - low > 8 * (inner_high - inner_low) > 0:
            low, high = max(low, 2 * inner_low - inner_high), min(high, 2 * inner_high - inner_low)
    if floor is not None:
        low = min(low, floor)
    if ceiling is not None:
        high = max(high, ceiling)
    if high - low <= 1e-9 * max(abs(high), abs(low), 1e-6):
        spread = abs(high) * 0.1 or 1.0
        low, high = (low, high + spread) if floor == low else (low - spread, high + spread)
    step = nice_step(high - low, 4)
    return math.floor(low / step + 1e-6) * step, math.ceil(high / step - 1e-6) * step, step


@dataclass(frozen=True, slots=True)
class Frame:
    """Where values lie in the picture."""

    first: float
    last: float
    low: float
    high: float
    step: float

    def across(self, x: float) -> float:
        return LEFT + (x - self.first) / (self.last - self.first) * (RIGHT - LEFT)

    def down(self, y: float) -> float:
        """Height on the page; a value off the scale runs just outside the frame, where it is not drawn."""
        return min(
            max(BOTTOM - (y - self.low) / (self.high - self.low) * (BOTTOM - TOP), TOP - 8), BOTTOM + 8
        )

    def path(self, points: Points) -> str:
        return "M" + "L".join(f"{self.across(x):.1f} {self.down(y):.1f}" for x, y in points)


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    guide: Guide | None = None,
    floor: float | None = None,
    ceiling: float | None = None,
    raw: bool = True,
    marks: Sequence[Mark] = (),
) -> Html:
    """An SVG chart of the series over updates.

    `floor` and `ceiling` are values that the vertical axis must reach; `raw` draws the thin lines too. `marks`
    outside the updates of the series are left out.
    At least one series must have points.
    """
    series = [line for line in series if line.points]
    values = [y for line in series for _, y in line.points]
    updates = [x for line in series for x, _ in line.points]
    low, high, step = axis(values, floor=floor, ceiling=ceiling)
    first, last = min(updates), max(updates)
    frame = Frame(first - (first == last), last + (first == last), low, high, step)
    hover = {
        "left": LEFT,
        "right": RIGHT,
        "width": WIDTH,
        "first": frame.first,
        "last": frame.last,
        "series": [_read_out(line) for line in series],
    }
    # An inner svg cuts off what lies outside its box; three units of slack spare lines along the frame.
    x, y, width, height = LEFT - 3, TOP - 3, RIGHT - LEFT + 6, BOTTOM - TOP + 6
    return tag(
        "svg",
        _grid(frame),
        tag(
            "svg",
            [_mark(mark, frame) for mark in marks if first <= mark.x <= last],
            [_line(line, frame, raw=raw) for line in series],
            x=x,
            y=y,
            width=width,
            height=height,
            viewBox=f"{x} {y} {width} {height}",
        ),
        _guide(guide, series, frame) if guide is not None and low <= guide.value <= high else None,
        _off_scale(values, frame),
        tag("line", x1=LEFT, x2=LEFT, y1=TOP, y2=BOTTOM, class_="cursor"),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        class_="chart",
        role="img",
        aria_label=title,
        data_chart=json.dumps(hover, separators=(",", ":")),
    )


def _mark(mark: Mark, frame: Frame) -> Html:
    x = f"{frame.across(mark.x):.1f}"
    colour = "" if mark.colour is None else f" c{mark.colour % COLOURS}"
    return tag("g", tag("title", mark.label), tag("line", x1=x, x2=x, y1=TOP, y2=BOTTOM, class_=f"alarm{colour}"))


def swatch(colour: int | None, dash: int = 0) -> Html:
    """A short piece of a series' line for the legend; no colour where the dashes alone matter."""
    line = tag(
        "line",
        x1=0,
        x2=26,
        y1=5,
        y2=5,
        class_="line neutral" if colour is None else f"line c{colour % COLOURS}",
        stroke_dasharray=DASHES[dash % len(DASHES)],
    )
    return tag("svg", line, viewBox="0 0 26 10", width=26, height=10, class_="swatch", aria_hidden="true")


def legend(entries: Sequence[Html]) -> Html:
    return tag("div", entries, class_="legend")


def legend_entry(label: str, index: int) -> Html:
    return tag("span", swatch(index), label, class_="entry")


def _line(line: Series, frame: Frame, *, raw: bool) -> Html:
    points, colour = thin_out(line.points), f"c{line.colour % COLOURS}"
    window = 1 if line.markers else smoothing_window(len(line.points))
    smooth = thin_out(running_mean(line.points, window))
    dots = points if line.markers or len(points) == 1 else []
    return tag(
        "g",
        tag("path", d=frame.path(points), class_=f"line {colour} raw") if raw and window > 1 else None,
        tag(
            "path",
            d=frame.path(smooth),
            class_=f"line {colour}",
            stroke_dasharray=DASHES[line.dash % len(DASHES)],
        ),
        [
            tag("circle", cx=f"{frame.across(x):.1f}", cy=f"{frame.down(y):.1f}", r=3, class_=f"dot {colour}")
            for x, y in dots
        ],
    )


def _read_out(line: Series) -> dict[str, object]:
    points = thin_out(line.points)
    return {
        "label": line.label,
        "colour": line.colour % COLOURS,
        "x": [int(x) if x == int(x) else x for x, _ in points],
        "y": [float(f"{y:.4g}") for _, y in points],
    }


def _grid(frame: Frame) -> Html:
    levels = [frame.low + i * frame.step for i in range(round((frame.high - frame.low) / frame.step) + 1)]
    stride = max(1.0, nice_step(frame.last - frame.first, 6))
    updates = [
        i * stride for i in range(math.ceil(frame.first / stride), math.floor(frame.last / stride) + 1)
    ]
    return tag(
        "g",
        [
            (
                tag(
                    "line",
                    x1=LEFT,
                    x2=RIGHT,
                    y1=f"{frame.down(level):.1f}",
                    y2=f"{frame.down(level):.1f}",
                    class_="grid",
                ),
                tag(
                    "text",
                    tick(level, frame.step),
                    x=LEFT - 6,
                    y=f"{frame.down(level) + 3.5:.1f}",
                    class_="tick end",
                ),
            )
            for level in levels
        ],
        [
            tag(
                "text",
                tick(update, stride),
                x=f"{frame.across(update):.1f}",
                y=BOTTOM + 15,
                class_="tick middle",
            )
            for update in updates
        ],
        tag("text", "update", x=RIGHT, y=BOTTOM + 28, class_="tick end"),
    )


def tick(value: float, step: float) -> str:
    """A tick's label: as many decimals as its step needs, powers of ten for the very small and large."""
    if abs(value) < step * 1e-6:
        return "0"
    if step < 5e-4 or abs(value) >= 1e6:
        digits = max(0, math.floor(math.log10(abs(value)) + 1e-9) - math.floor(math.log10(step) + 1e-9))
        mantissa, power = f"{value:.{digits}e}".split("e")
        text = f"{mantissa}e{int(power)}"
    else:
        text = f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"
    return text.replace("-", "\N{MINUS SIGN}")


def _guide(guide: Guide, series: Sequence[Series], frame: Frame) -> Html:
    """The line with its label above it, at the end where fewer points are in the label's way."""
    y = frame.down(guide.value)
    text_y = y - 4 if y - TOP > 14 else y + 12
    near = [
        frame.across(at)
        for line in series
        for at, value in line.points
        if abs(frame.down(value) - (text_y - 4)) < 9
    ]
    third = (RIGHT - LEFT) / 3
    right = sum(at > RIGHT - third for at in near) <= sum(at < LEFT + third for at in near)
    x, anchor = (RIGHT - 2, "end") if right else (LEFT + 4, "start")
    return tag(
        "g",
        tag("line", x1=LEFT, x2=RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="guide"),
        tag("text", guide.label, x=x, y=f"{text_y:.1f}", class_=f"tick {anchor} guide-label"),
    )


def _off_scale(values: Sequence[float], frame: Frame) -> Html | None:
    slack = 1e-6 * (frame.high - frame.low)
    above = [value for value in values if value > frame.high + slack]
    below = [value for value in values if value < frame.low - slack]
    return (
        tag(
            "g",
            tag(
                "text",
                f"▲ {len(above)} off the scale, up to {number(max(above), 3)}",
                x=LEFT + 4,
                y=TOP + 10,
                class_="tick off-scale",
            )
            if above
            else None,
            tag(
                "text",
                f"▼ {len(below)} off the scale, down to {number(min(below), 3)}",
                x=LEFT + 4,
                y=BOTTOM - 5,
                class_="tick off-scale",
            )
            if below
            else None,
        )
        if above or below
        else None
    )
