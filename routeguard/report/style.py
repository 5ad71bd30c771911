"""The page's style sheet: light, dark and paper, by CSS alone."""

from __future__ import annotations

# Okabe-Ito, distinguishable with any colour vision; black follows the text's colour.
_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#b45a93", "#b87d00", "#2b8cc4", "#777777", "currentColor")
_DARK = ("#56b4e9", "#ff8c42", "#2fc99a", "#e29ac6", "#f0b429", "#8fd0f5", "#aaaaaa", "currentColor")
# Eleven steps of matplotlib's cividis; light text on the dark five.
_SHADES = (
    "#00224e", "#0d346b", "#35456c", "#4f576c", "#666970", "#7c7b78",
    "#948e77", "#aea371", "#c8b866", "#e5cf52", "#fee838",
)  # fmt: skip

_BASE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1f24; --soft: #57606a; --rule: #d0d7de; --card: #f6f8fa;
  --good: #116329; --bad: #a40e26; --careful: #fff4d6; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1318; --text: #e6edf3; --soft: #9aa5b1; --rule: #333c46;
  --card: #171d24; --good: #56d364; --bad: #ff7b72; --careful: #33290f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 3rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; padding-top: .6rem; border-top: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
p { margin: .4rem 0; max-width: 46rem; }
.soft { color: var(--soft); font-size: .9rem; }
.good { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
.warnings { background: var(--careful); border-left: 4px solid var(--bad); padding: .6rem 1rem .6rem 2rem;
  margin: .6rem 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: .6rem 0 1rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding-bottom: .3rem; }
th, td { padding: .28rem .7rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th:first-child { text-align: left; font-weight: 500; padding-left: 0; }
td.words, th.words { text-align: left; }
thead th, thead th:first-child { border-bottom: 2px solid var(--rule); font-weight: 600; }
.facts th { color: var(--soft); vertical-align: top; white-space: normal; min-width: 7rem; }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.heat caption { white-space: nowrap; }
.heat th + th { text-align: center; }
.heat td { min-width: 4rem; text-align: center; border: 1px solid var(--page); }
.side { display: flex; flex-wrap: wrap; gap: 0 2rem; }
figure { margin: .6rem 0 1rem; max-width: 46rem; }
figure > svg { width: 100%; height: auto; display: block; background: var(--card); border-radius: 6px; }
svg text { font-size: 12px; fill: var(--soft); }
.grid { stroke: var(--rule); stroke-width: 1; fill: none; }
.axis { stroke: var(--soft); stroke-width: 1; fill: none; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.dashed { stroke-dasharray: 6 4; }
circle.dashed { stroke-dasharray: none; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; margin: .4rem 0 0; padding: 0;
  font-size: .85rem; }
.sample { width: 28px; height: 12px; margin-right: .4rem; vertical-align: middle; }
footer { margin-top: 2.5rem; color: var(--soft); font-size: .85rem; }
"""

_PRINT = """
@page { margin: 15mm; }
@media print { :root { --page: #fff; --text: #000; --soft: #444; --rule: #bbb; --card: #fff; --good: #116329;
  --bad: #a40e26; --careful: #fff; color-scheme: light; } body { max-width: none; padding: 0; font-size: 10.5pt; }
  .wide { overflow: visible; } figure, tr { break-inside: avoid; } h2, h3, caption { break-after: avoid; }
  .heat td { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def style_sheet() -> str:
    """All rules of the page, for its `<style>` element."""
    light = "".join(f".colour{i} {{ stroke: {c}; }}\n" for i, c in enumerate(_LIGHT))
    dark = "".join(f".colour{i} {{ stroke: {c}; }}\n" for i, c in enumerate(_DARK))
    half = len(_SHADES) // 2
    shades = "".join(
        f".shade{i} {{ background: {c}; color: {'#fff' if i < half else '#000'}; }}\n" for i, c in enumerate(_SHADES)
    )
    return f"{_BASE}{light}@media screen and (prefers-color-scheme: dark) {{\n{dark}}}\n{shades}{_PRINT}"
