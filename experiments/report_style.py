"""The look of the report: one style sheet, light and dark, for wide windows and narrow ones, with nothing fetched."""

from __future__ import annotations

from dieplace.experiments.charts_draw import THEME


def _variables(index: int) -> str:
    return " ".join(f"--{name}: {colours[index]};" for name, colours in THEME.items())


# What is wider than its place scrolls in its own box, and says so: a bar that does not fade, a shade at each end that
# has more behind it, and words where the browser can tell that a box overflows (elsewhere on a narrow window).
SCROLLING = """
.wide { overflow-x: auto; margin: 8px 0 4px; container-type: scroll-state; scrollbar-width: thin;
  scrollbar-color: var(--edge, #b9c2d0) transparent;
  background: linear-gradient(to right, var(--paper, #fff) 30%, transparent) left / 40px 100% no-repeat local,
    linear-gradient(to left, var(--paper, #fff) 30%, transparent) right / 40px 100% no-repeat local,
    linear-gradient(to right, var(--edge, #b9c2d0), transparent) left / 14px 100% no-repeat scroll,
    linear-gradient(to left, var(--edge, #b9c2d0), transparent) right / 14px 100% no-repeat scroll; }
.wide::before { display: none; position: sticky; left: 0; width: max-content; font-size: 12px;
  color: var(--faint, #555b66); content: "goes on to the right: scroll sideways \\2192"; }
@container scroll-state(scrollable: x) { .wide::before { display: block; } }
@supports not (container-type: scroll-state) { @media (max-width: 730px) { .wide::before { display: block; } } }
@media print { .wide { overflow: visible; background: none; } .wide::before { display: none !important; } }
"""

STYLE = f"""
:root {{ color-scheme: light dark; --banner: #fdf3dc; --banner-edge: #e8cf8e; {_variables(0)} }}
@media (prefers-color-scheme: dark) {{
  :root {{ --banner: #2d2716; --banner-edge: #6b5a25; {_variables(1)} }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 1080px; padding: 24px 20px 60px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }}
h1 {{ font-size: 24px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }}
h2 {{ font-size: 19px; margin: 40px 0 8px; border-top: 1px solid var(--grid); padding-top: 20px; }}
h2 {{ overflow-wrap: anywhere; }}
h3 {{ font-size: 16px; margin: 28px 0 6px; overflow-wrap: anywhere; }}
h4 {{ font-size: 14px; margin: 18px 0 4px; overflow-wrap: anywhere; }}
p, ul, .banner, h1 {{ max-width: 920px; }}
p, ul {{ margin: 6px 0; }} ul {{ padding-left: 22px; }} p, li, summary {{ overflow-wrap: anywhere; }}
.banner {{ background: var(--banner); border: 1px solid var(--banner-edge); border-radius: 6px; padding: 10px 14px;
  margin: 14px 0; }}
ul.plain {{ margin: 8px 0; }}
.said {{ font-size: 16px; font-weight: 600; }}
.quiet {{ color: var(--faint); font-size: 13px; }}
{SCROLLING}
.chart svg {{ display: block; max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13px; }}
th {{ text-align: left; border-bottom: 2px solid var(--edge); padding: 4px 8px; vertical-align: bottom; }}
td {{ border-bottom: 1px solid var(--grid); padding: 4px 8px; vertical-align: top; overflow-wrap: break-word; }}
td:first-child {{ min-width: 80px; }}
th.n {{ white-space: normal; }} td.w {{ min-width: 260px; }} td.k {{ white-space: nowrap; }}
.n {{ text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }}
details {{ margin: 10px 0; }} summary {{ cursor: pointer; color: var(--faint); }}
@media print {{ body {{ max-width: none; }} h2, h3, h4 {{ break-after: avoid; }} table {{ font-size: 9px; }}
  .n, td.k {{ white-space: normal; }} .chart svg {{ min-width: 0 !important; }} }}
"""
