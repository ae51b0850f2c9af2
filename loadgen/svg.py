"""A chart as SVG for a web page: the page's style sheet gives the colours (`.s0`, `.s1`, ...)."""

import math
from collections.abc import Callable
from html import escape

from loadgen.chart import Chart, Series

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 40
Scale = Callable[[float], float]


def svg(chart: Chart) -> str:
    """One <svg> element, readable without scripts; a title on each series names it on hover."""
    x_scale, x_ticks = _axis(_extent(chart, "x"), _LEFT, _WIDTH - _RIGHT, chart.is_log_x)
    y_scale, y_ticks = _axis(_extent(chart, "y"), _HEIGHT - _BOTTOM, _TOP, False)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(chart.title)}">',
        f"<title>{escape(chart.title)}</title>",
    ]
    for tick in x_ticks:
        x = x_scale(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>')
        parts.append(_text(x, _HEIGHT - _BOTTOM + 15, "middle", f"{tick:g}"))
    for tick in y_ticks:
        y = y_scale(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 6, y + 4, "end", f"{tick:g}"))
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, "middle", chart.x_label))
    parts.append(
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y_label)}</text>"
    )
    num_rows = max((len(series.y) for series in chart.series), default=1)
    for number, series in enumerate(chart.series):
        shape = _shape(series, x_scale, y_scale, num_rows)
        parts.append(f'<g class="s{number % 6} {series.kind}"><title>{escape(series.name)}</title>'
                     f"{shape}</g>")  # fmt: skip
    return "".join(parts) + "</svg>"


def _shape(series: Series, x_scale: Scale, y_scale: Scale, num_rows: int) -> str:
    points = [(x_scale(x), y_scale(y)) for x, y in zip(series.x, series.y, strict=True)]
    if series.kind == "dots":
        return "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in points)
    if series.kind == "line":
        if len(points) == 1:
            return f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3"/>'
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        return f'<path d="M{path}"/>' if points else ""
    height = max(1.0, min(8.0, 0.8 * (_HEIGHT - _TOP - _BOTTOM) / max(1, num_rows)))
    ends = [x_scale(x) for x in series.x_end]
    return "".join(
        f'<rect x="{x:.1f}" y="{y - height / 2:.1f}" width="{max(0.5, end - x):.1f}" '
        f'height="{height:.1f}"/>'
        for (x, y), end in zip(points, ends, strict=True)
    )


def _extent(chart: Chart, axis: str) -> tuple[float, float]:
    values = [value for series in chart.series for value in getattr(series, axis)]
    if axis == "x":
        values += [value for series in chart.series for value in series.x_end]
    if axis == "y" or not chart.is_log_x:
        values.append(0.0)
    return min(values), max(values)


def _axis(
    extent: tuple[float, float], start: float, end: float, is_log: bool
) -> tuple[Scale, list[float]]:
    """Value -> place between `start` and `end`, and the values to mark."""
    low, high = extent
    if is_log:
        low_e, high_e = math.log10(low), math.log10(high)
        if high_e - low_e < 0.1:
            low_e, high_e = low_e - 0.1, high_e + 0.1

        def log_scale(value: float) -> float:
            return start + (math.log10(value) - low_e) / (high_e - low_e) * (end - start)

        return log_scale, _log_ticks(low_e, high_e)
    if high <= low:
        high = low + 1.0

    def scale(value: float) -> float:
        return start + (value - low) / (high - low) * (end - start)

    step = _round_step((high - low) / 5)
    first = math.ceil(low / step - 1e-9)
    return scale, [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low_e: float, high_e: float) -> list[float]:
    factors = (1,) if high_e - low_e > 3 else (1, 2, 5)
    ticks = [f * 10.0**e for e in range(math.floor(low_e), math.ceil(high_e) + 1) for f in factors]
    return [tick for tick in ticks if low_e - 1e-9 <= math.log10(tick) <= high_e + 1e-9]


def _round_step(raw: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power: float = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
