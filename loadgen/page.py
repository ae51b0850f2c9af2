"""One self-contained HTML page: figures as tables, charts as SVG. No script, nothing loaded."""

from collections.abc import Sequence
from html import escape

from loadgen.chart import Chart
from loadgen.svg import svg

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # caption, header, rows

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --dim: #8885; --soft: #667; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #14171a; --soft: #9aa; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1360px; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1rem; margin: 0 0 .3rem; }
.charts { display: grid; gap: 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid var(--dim); text-align: right; }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; font: 11px system-ui, sans-serif; }
svg text { fill: var(--soft); } .grid { stroke: var(--dim); fill: none; stroke-width: .6; }
.line path { fill: none; stroke: var(--c); stroke-width: 1.8; }
.line circle, .dots circle, .spans rect { fill: var(--c); } .dots circle { opacity: .55; }
.s0 { --c: #2a78d6; } .s1 { --c: #e0702a; } .s2 { --c: #2a9d63; } .s3 { --c: #a35bd0; }
.s4 { --c: #c7403f; } .s5 { --c: #8a8d00; }
.key { margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1rem; list-style: none; }
.key li::before { content: ""; display: inline-block; width: .8em; height: .8em;
  margin-right: .4em; background: var(--c); }
footer { color: var(--soft); margin-top: 2rem; }
"""


def page(
    title: str,
    paragraphs: Sequence[str],
    tables: Sequence[Table],
    charts: Sequence[Chart],
    footer: str = "",
) -> str:
    """All text is escaped here."""
    body = [f"<h1>{escape(title)}</h1>"]
    body += [f"<p>{escape(text)}</p>" for text in paragraphs]
    body += [_table(table) for table in tables]
    body.append('<div class="charts">')
    body += [_figure(chart) for chart in charts]
    body.append(f"</div><footer>{escape(footer)}</footer>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        + "\n".join(body)
        + "</body></html>\n"
    )


def _table(table: Table) -> str:
    caption, header, rows = table
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="wide"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _figure(chart: Chart) -> str:
    names = [escape(series.name) for series in chart.series]
    key = "".join(f'<li class="s{i % 6}">{name}</li>' for i, name in enumerate(names))
    title = escape(chart.title)
    return f'<section><h2>{title}</h2><ul class="key">{key}</ul>{svg(chart)}</section>'
