"""The style sheet of the report: light and dark, narrow and wide, screen and paper. Nothing is fetched."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1f2430; --muted: #667085; --line: #e4e7ec;
  --accent: #0072b2; --soft: #e8f2f9;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12151b; --card: #1b1f28; --ink: #e7eaf0; --muted: #98a2b3; --line: #2c323e;
    --accent: #56b4e9; --soft: #1d2c3a;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 24px; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 40px 0 12px; }
p { margin: 0 0 12px; max-width: 75ch; }
.muted, .meaning, figcaption, .tile small { color: var(--muted); }
.card, .tile, figure { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.tile { padding: 14px 16px; }
.tile b { display: block; font-size: 28px; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.25; }
.tile span { font-size: 13px; font-weight: 600; }
.tile small { display: block; font-size: 12px; }
.card { padding: 4px 18px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 9px 12px 9px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child > td, tr:last-child > th[scope=row] { border-bottom: 0; }
thead th { color: var(--muted); font-size: 12.5px; font-weight: 600; }
th[scope=row] { font-weight: 500; }
thead th[scope=colgroup] { color: var(--ink); }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
thead th.number { padding-left: 18px; }
.best { color: var(--accent); font-weight: 700; }
td.word, th.word { white-space: nowrap; color: var(--muted); padding-left: 20px; padding-right: 28px; }
code, .value { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.bar { width: 45%; }
.bar i { display: block; height: 10px; margin-top: 6px; min-width: 2px; border-radius: 5px; background: var(--accent);
  opacity: .75; }
.plots { display: flex; flex-wrap: wrap; gap: 16px; }
figure { margin: 0; padding: 16px; display: flex; flex-direction: column; flex: 1 1 min(100%, 460px); }
figure.wide { flex-basis: 100%; }
figure h3 { font-size: 15px; margin: 0 0 10px; }
figure img { display: block; width: 100%; max-width: 640px; height: auto; margin: auto; padding: 8px;
  background: white; border-radius: 6px; }
figure.wide img { max-width: 960px; }
figcaption { font-size: 13px; margin-top: 10px; }
.notes { background: var(--soft); border-radius: 10px; padding: 14px 18px 14px 36px; margin: 24px 0 0; }
details summary { cursor: pointer; padding: 10px 0; font-weight: 500; }
@media (max-width: 560px) { main { padding: 24px 14px 48px; } .bar, .meaning { display: none; } }
@media print { body { background: none; } figure, .card, .tile { break-inside: avoid; } }
"""
