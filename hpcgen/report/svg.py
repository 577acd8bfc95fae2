"""Charts as SVG text: axes with round ticks, lines, areas, bars, bands and marks, in colours of the page's style sheet.

A chart is drawn in units of its view box and scales with the page. Classes name the colours (`s0`, `s1`, ... of the
style sheet), so that a chart follows the page into the dark.
"""

from collections.abc import Callable, Sequence
from html import escape

import numpy as np

WIDTH, HEIGHT = 720, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 30
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
    """A chart of x in [0, `x_most`] and y in [0, `y_most`]."""

    def __init__(
        self,
        x_most: float,
        y_most: float,
        *,
        x_ticks: list[float] | None = None,
        x_format: Format = number,
        y_format: Format = number,
        height: int = HEIGHT,
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
        left, right = self._x(start), self._x(stop)
        inner = self._height - _TOP - _BOTTOM
        self._below.append(
            f'<rect class="band {style}" x="{left:.1f}" y="{_TOP}" width="{max(right - left, 0.5):.1f}" '
            f'height="{inner}">{_title(title)}</rect>'
        )

    def line(self, xs: Sequence[float] | np.ndarray, ys: Sequence[float] | np.ndarray, style: str, title: str) -> None:
        points = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in _thinned(xs, ys))
        self._parts.append(f'<polyline class="line {style}" points="{points}">{_title(title)}</polyline>')

    def stairs(self, edges: Sequence[tuple[float, float]], ys: Sequence[float], style: str, title: str) -> None:
        """An area of rectangles: height ys[i] from edges[i][0] to edges[i][1]."""
        bottom = self._y(0)
        path = ""
        for (start, stop), y in zip(edges, ys, strict=True):
            left, right = self._x(start), self._x(stop)
            path += f"M{left:.1f} {bottom:.1f}V{self._y(y):.1f}H{max(right, left + 0.5):.1f}V{bottom:.1f}Z"
        self._parts.append(f'<path class="area {style}" d="{path}">{_title(title)}</path>')

    def bars(self, edges: np.ndarray, counts: np.ndarray, style: str, unit: str) -> None:
        """A histogram: counts [n] between edges [n + 1]."""
        for left, right, count in zip(edges[:-1], edges[1:], counts, strict=True):
            x, width = self._x(float(left)), self._x(float(right)) - self._x(float(left))
            y = self._y(float(count))
            title = _title(f"{count:,} with {left:,.0f} to {right:,.0f} {unit}")
            self._parts.append(
                f'<rect class="area {style}" x="{x:.1f}" y="{y:.1f}" width="{max(width - 1, 0.5):.1f}" '
                f'height="{self._y(0) - y:.1f}">{title}</rect>'
            )

    def mark(self, at: float, title: str, style: str = "mark") -> None:
        """A vertical line with a head."""
        x = self._x(at)
        self._parts.append(
            f'<g class="{style}">{_title(title)}<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" '
            f'y2="{self._height - _BOTTOM}"/><circle cx="{x:.1f}" cy="{_TOP + 3}" r="4"/></g>'
        )

    def render(self, label: str) -> str:
        """The chart as an `svg` element; `label` says what it shows to whoever does not see it."""
        axes = []
        for tick in self._x_ticks:
            if tick <= self._x_most * 1.001:
                x = self._x(tick)
                axes.append(f'<text class="x" x="{x:.1f}" y="{self._height - 8}">{escape(self._x_format(tick))}</text>')
        for tick in self._y_ticks:
            y = self._y(tick)
            axes.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            axes.append(f'<text class="y" x="{_LEFT - 6}" y="{y + 4:.1f}">{escape(self._y_format(tick))}</text>')
        body = "".join([*self._below, *axes, *self._parts])
        return f'<svg viewBox="0 0 {WIDTH} {self._height}" role="img" aria-label="{escape(label)}">{body}</svg>'

    def _x(self, value: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * min(max(value / self._x_most, 0.0), 1.0)

    def _y(self, value: float) -> float:
        return self._height - _BOTTOM - (self._height - _TOP - _BOTTOM) * min(max(value / self._y_most, 0.0), 1.0)


def _thinned(xs: Sequence[float] | np.ndarray, ys: Sequence[float] | np.ndarray) -> list[tuple[float, float]]:
    """At most _MOST_POINTS of the points, the first and the last among them."""
    x, y = np.asarray(xs, dtype=float), np.asarray(ys, dtype=float)
    if len(x) > _MOST_POINTS:
        keep = np.unique(np.linspace(0, len(x) - 1, _MOST_POINTS).astype(int))
        x, y = x[keep], y[keep]
    return list(zip(x.tolist(), y.tolist(), strict=True))


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""
