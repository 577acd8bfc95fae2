"""Charts as HTML: an SVG that stretches to whatever room there is, and its axes as text of the page beside it.

So a chart is as legible on a phone as on a desk: lines keep their width and letters their size. Classes name the
colours (`s0`, `s1`, ... of the style sheet), and a chart follows the page into the dark.
"""

from collections.abc import Callable, Sequence
from html import escape

import numpy as np

SIDE = 1000
"""Width and height of the drawing, in its own units."""
_MOST_POINTS = 600
"""Points of a line: about one a pixel."""

Format = Callable[[float], str]


def number(value: float) -> str:
    """'1.2k', '350', '0.25'."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scaled = value / (1e3 if suffix == "k" else size)
            return f"{scaled:.4g}{suffix}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"


def ticks(most: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to at least `most`: steps of 1, 2 or 5 times a power of ten."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / count
    power = 10.0 ** np.floor(np.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [float(step * i) for i in range(int(np.ceil(most / step * 0.999)) + 1)]


def time_ticks(most: float, count: int = 6) -> list[float]:
    """As `ticks`, for seconds: steps of a whole number of seconds, minutes or hours."""
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600)
    step = next((step for step in steps if step * count >= most), None)
    if step is None:
        return [3600 * hours for hours in ticks(most / 3600, count)]
    return [float(step * i) for i in range(int(np.ceil(most / step)) + 1)]


class Chart:
    """A chart of x in [0, `x_most`] and y in [0, `y_most`]; `height` in pixels."""

    def __init__(
        self,
        x_most: float,
        y_most: float,
        *,
        x_ticks: list[float] | None = None,
        x_format: Format = number,
        y_format: Format = number,
        height: int = 190,
    ) -> None:
        self._height = height
        self._x_ticks, self._y_ticks = x_ticks or ticks(x_most, 6), ticks(y_most, 4)
        self._x_most = max(x_most, 1e-9)
        self._y_most = self._y_ticks[-1]
        self._x_format, self._y_format = x_format, y_format
        self._below: list[str] = []
        self._parts: list[str] = []

    def band(self, start: float, stop: float, style: str, title: str = "") -> None:
        """A background from x = start to x = stop."""
        self._below.append(self._rectangle("band", style, start, stop, 0, self._y_most, title))

    def line(self, xs: Sequence[float] | np.ndarray, ys: Sequence[float] | np.ndarray, style: str, title: str) -> None:
        points = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in _thinned(xs, ys))
        self._parts.append(f'<polyline class="line {style}" points="{points}">{_title(title)}</polyline>')

    def steps(self, xs: Sequence[float] | np.ndarray, ys: Sequence[float] | np.ndarray, style: str, title: str) -> None:
        """A line that stays at ys[i] until xs[i + 1]."""
        (x, y), *rest = _thinned(xs, ys)
        path = f"M{self._x(x):.1f} {self._y(y):.1f}"
        path += "".join(f"H{self._x(x):.1f}V{self._y(y):.1f}" for x, y in rest)
        self._parts.append(f'<path class="line {style}" d="{path}">{_title(title)}</path>')

    def stairs(self, edges: Sequence[tuple[float, float]], ys: Sequence[float], style: str, title: str) -> None:
        """An area of rectangles: height ys[i] from edges[i][0] to edges[i][1]."""
        path = ""
        for (start, stop), y in zip(edges, ys, strict=True):
            left, right = self._x(start), self._x(stop)
            path += f"M{left:.1f} {SIDE}V{self._y(y):.1f}H{max(right, left + 0.8):.1f}V{SIDE}Z"
        self._parts.append(f'<path class="area {style}" d="{path}">{_title(title)}</path>')

    def bars(self, edges: np.ndarray, counts: np.ndarray, style: str, unit: str) -> None:
        """A histogram: counts [n] between edges [n + 1]."""
        gap = (float(edges[-1]) - float(edges[0])) * 0.002
        for left, right, count in zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True):
            title = f"{count:,} with {left:,.0f} to {right:,.0f} {unit}"
            self._parts.append(self._rectangle("area", style, left, right - gap, 0, count, title))

    def block(self, start: float, stop: float, bottom: float, top: float, style: str, title: str) -> None:
        """A rectangle; one that lasts no time is still seen."""
        self._parts.append(self._rectangle("block", style, start, stop, bottom, top, title, least=3))

    def lanes(self, count: int) -> None:
        """A strip for each of `count` lanes, in place of the grid."""
        self._y_ticks = [0.0]
        self._y_most = float(count)
        for lane in range(count):
            self._below.append(self._rectangle("lane", "", 0, self._x_most, lane + 0.1, lane + 0.9, ""))

    def level(self, y: float, style: str, title: str, start: float = 0.0, stop: float | None = None) -> None:
        """A dashed horizontal line: what was to be expected."""
        right = self._x_most if stop is None else stop
        self._dashed(start, right, y, y, style, title)

    def moment(self, x: float, style: str, title: str) -> None:
        """A dashed vertical line: when something was to be expected."""
        self._dashed(x, x, 0, self._y_most, style, title)

    def render(self, label: str) -> str:
        """The chart as an element; `label` says what it shows to whoever does not see it."""
        grid, marks_y = [], []
        for tick in self._y_ticks:
            y = self._y(tick)
            grid.append(f'<line class="grid" x1="0" x2="{SIDE}" y1="{y:.1f}" y2="{y:.1f}"/>')
            marks_y.append(f'<span style="top:{y / SIDE:.2%}">{escape(self._y_format(tick))}</span>')
        marks_x = [
            f'<span style="left:{self._x(tick) / SIDE:.2%}">{escape(self._x_format(tick))}</span>'
            for tick in self._x_ticks
            if tick <= self._x_most * 1.001
        ]
        body = "".join([*self._below, *grid, *self._parts])
        return (
            f'<div class="chart" role="img" aria-label="{escape(label)}" style="--height:{self._height}px">'
            f'<div class="y">{"".join(marks_y)}</div>'
            f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none">{body}</svg>'
            f'<div class="x">{"".join(marks_x)}</div></div>'
        )

    def _rectangle(
        self,
        kind: str,
        style: str,
        start: float,
        stop: float,
        bottom: float,
        top: float,
        title: str,
        least: float = 0.8,
    ) -> str:
        x, y = self._x(start), self._y(top)
        width, height = max(self._x(stop) - x, least), self._y(bottom) - y
        x = min(x, SIDE - width)
        return (
            f'<rect class="{kind} {style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">'
            f"{_title(title)}</rect>"
        )

    def _dashed(self, left: float, right: float, low: float, high: float, style: str, title: str) -> None:
        self._parts.append(
            f'<line class="line dashed {style}" x1="{self._x(left):.1f}" x2="{self._x(right):.1f}" '
            f'y1="{self._y(low):.1f}" y2="{self._y(high):.1f}">{_title(title)}</line>'
        )

    def _x(self, value: float) -> float:
        return SIDE * min(max(value / self._x_most, 0.0), 1.0)

    def _y(self, value: float) -> float:
        return SIDE * (1 - min(max(value / self._y_most, 0.0), 1.0))


def _thinned(xs: Sequence[float] | np.ndarray, ys: Sequence[float] | np.ndarray) -> list[tuple[float, float]]:
    """At most _MOST_POINTS of the points, the first and the last among them."""
    x, y = np.asarray(xs, dtype=float), np.asarray(ys, dtype=float)
    if len(x) > _MOST_POINTS:
        keep = np.unique(np.linspace(0, len(x) - 1, _MOST_POINTS).astype(int))
        x, y = x[keep], y[keep]
    return list(zip(x.tolist(), y.tolist(), strict=True))


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""
