"""Style sheet of the report: one column that fits a phone, colours for light and dark."""

STYLE = """
:root { color-scheme: light dark; --ground: #fbfaf8; --sheet: #fff; --ink: #1d2126; --soft: #5d6670; --rule: #e2e0db;
  --c0: #2f6db3; --c1: #c2571a; --c2: #2f8f5b; --c3: #7d8791; --c4: #8a4fa3; --c5: #b08a00; --mark: #b3123f; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171a; --sheet: #1c2024; --ink: #e6e8ea; --soft: #9aa4ae;
  --rule: #30363c; --c0: #6aa7ea; --c1: #f0905a; --c2: #62c48f; --c3: #98a2ac; --c4: #c48add; --c5: #dcb84a;
  --mark: #ff6f91; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 880px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
header p { color: var(--soft); margin: 4px 0 0; }
section { background: var(--sheet); border: 1px solid var(--rule); border-radius: 8px; padding: 12px 16px 16px;
  margin-top: 16px; }
h2 { font-size: 16px; margin: 0 0 10px; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: 10px 20px; margin: 0; }
.facts dt { color: var(--soft); font-size: 13px; }
.facts dd { margin: 0; font-size: 17px; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
figure { margin: 0 0 8px; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 16px; color: var(--soft); font-size: 13px; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg .x { text-anchor: middle; } svg .y { text-anchor: end; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.band { opacity: .11; } .area { opacity: .75; stroke: none; }
.s0 { stroke: var(--c0); fill: var(--c0); background: var(--c0); }
.s1 { stroke: var(--c1); fill: var(--c1); background: var(--c1); }
.s2 { stroke: var(--c2); fill: var(--c2); background: var(--c2); }
.s3 { stroke: var(--c3); fill: var(--c3); background: var(--c3); }
.s4 { stroke: var(--c4); fill: var(--c4); background: var(--c4); }
.s5 { stroke: var(--c5); fill: var(--c5); background: var(--c5); }
.line.s0, .line.s1, .line.s2, .line.s3, .line.s4, .line.s5 { fill: none; }
.band, .area { stroke: none !important; }
.mark { stroke: var(--mark); fill: var(--mark); background: var(--mark); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--rule); vertical-align: top;
  font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 500; white-space: nowrap; }
td:last-child { min-width: 140px; }
p { margin: 8px 0 0; } .none, p { color: var(--soft); } summary { cursor: pointer; color: var(--soft); }
@media (max-width: 520px) { svg text { font-size: 19px; } .facts { grid-template-columns: 1fr 1fr; }
  main { padding: 16px 8px 40px; } section { padding: 10px; } }
"""
