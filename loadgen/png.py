"""Charts as PNG files, by matplotlib, which is an extra: `pip install 'pdserve[bench]'`."""

from collections.abc import Sequence
from pathlib import Path

from loadgen.chart import Chart


def write_pngs(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """One file for each chart. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    written = []
    for chart in charts:
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for series in chart.series:
            if series.kind == "spans":
                widths = [end - x for x, end in zip(series.x, series.x_end, strict=True)]
                axes.barh(series.y, widths, left=series.x, height=0.8, label=series.name)
            elif series.kind == "dots":
                axes.plot(series.x, series.y, ".", markersize=4, label=series.name)
            else:
                marker = "o" if len(series.x) < 20 else None
                axes.plot(series.x, series.y, label=series.name, marker=marker)
        if chart.is_log_x:
            axes.set_xscale("log")
        axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        path = folder / f"{chart.name}.png"
        figure.savefig(path, dpi=120)
        written.append(path)
    return written
