"""Style sheet of the report: one column that fits a phone, colours for light and dark."""

STYLE = """
:root { color-scheme: light dark; --ground: #f6f5f2; --sheet: #fff; --ink: #1d2126; --soft: #5d6670; --rule: #e5e2dc;
  --lane: #f4f2ee; --c0: #2f6db3; --c1: #c8641f; --c2: #2f8f5b; --c3: #87919b; --c4: #8a4fa3; --c5: #a98400;
  --mark: #b3123f; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171a; --sheet: #1c2024; --ink: #e6e8ea; --soft: #9aa4ae;
  --rule: #2f353b; --lane: #23282d; --c0: #6aa7ea; --c1: #ec9560; --c2: #62c48f; --c3: #7f8a95; --c4: #c48add;
  --c5: #dcb84a; --mark: #ff6f91; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 920px; margin: 0 auto; padding: 28px 16px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
header p { color: var(--soft); margin: 4px 0 0; }
section { background: var(--sheet); border: 1px solid var(--rule); border-radius: 10px; padding: 14px 18px 18px;
  margin-top: 16px; }
h2 { font-size: 16px; margin: 0 0 12px; }
p { margin: 8px 0 0; color: var(--soft); } section > p:first-of-type { margin-top: 0; }
summary { cursor: pointer; color: var(--soft); margin-top: 10px; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(180px, 1fr)); gap: 12px 20px;
  margin: 14px 0 0; }
.facts dt { color: var(--soft); font-size: 13px; }
.facts dd { margin: 0; font-size: 15px; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.facts.large { margin-top: 0; } .facts.large dd { font-size: 27px; line-height: 1.25; font-weight: 600; }
h2 + .facts { margin-top: 0; }

figure { margin: 0; } figure + figure { margin-top: 12px; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 16px; color: var(--soft); font-size: 13px; margin: 6px 0 0 54px; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.key.dashes { height: 0; width: 16px; border-top: 2px dashed var(--soft); border-radius: 0; vertical-align: 4px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; } .pair figure { margin: 0; min-width: 0; }
.chart { display: grid; grid-template: var(--height) 20px / 46px 1fr; column-gap: 8px; margin: 8px 22px 0 0;
  font-size: 12px; color: var(--soft); font-variant-numeric: tabular-nums; }
.chart svg { width: 100%; height: 100%; overflow: visible; }
.chart .y, .chart .x { position: relative; } .chart .x { grid-column: 2; }
.chart .y span { position: absolute; right: 0; transform: translateY(-50%); line-height: 1; }
.chart .x span { position: absolute; top: 4px; transform: translateX(-50%); white-space: nowrap; }
.lanes { display: grid; grid-template-columns: auto 1fr; column-gap: 10px; }
.lanes .names { margin-top: 8px; font-size: 12px; color: var(--soft); text-align: right; }
.lanes .names span { display: block; height: 24px; line-height: 24px; white-space: nowrap; }
.lanes .chart { grid-template-columns: 0 1fr; column-gap: 0; } .lanes figcaption { grid-column: 2; margin-left: 0; }

.grid { stroke: var(--rule); } .lane { fill: var(--lane); }
.grid, .line { vector-effect: non-scaling-stroke; }
.line { fill: none !important; stroke-width: 2; stroke-linejoin: round; }
.line.dashed { stroke-dasharray: 6 5; }
.band { opacity: .1; } .area { opacity: .8; } .pale { opacity: .55; }
.band, .area, .block { stroke: none !important; }
.s0 { stroke: var(--c0); fill: var(--c0); background: var(--c0); }
.s1 { stroke: var(--c1); fill: var(--c1); background: var(--c1); }
.s2 { stroke: var(--c2); fill: var(--c2); background: var(--c2); }
.s3 { stroke: var(--c3); fill: var(--c3); background: var(--c3); }
.s4 { stroke: var(--c4); fill: var(--c4); background: var(--c4); }
.s5 { stroke: var(--c5); fill: var(--c5); background: var(--c5); }
.mark { stroke: var(--mark); fill: var(--mark); background: var(--mark); }

.scroll { overflow-x: auto; margin-top: 10px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--rule); vertical-align: top;
  font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 500; white-space: nowrap; } tr:last-child td { border-bottom: 0; }
td:last-child { min-width: 130px; }
.ratio { display: inline-block; position: relative; width: 110px; height: 10px; margin-right: 10px; border-radius: 5px;
  background: linear-gradient(90deg, var(--lane) 49.5%, var(--soft) 49.5%, var(--soft) 50.5%, var(--lane) 50.5%); }
.ratio i { position: absolute; top: 0; bottom: 0; background: var(--c4); border-radius: 5px; }
@media (max-width: 560px) { main { padding: 18px 8px 40px; } section { padding: 12px; } .facts { gap: 10px 12px;
  grid-template-columns: 1fr 1fr; } .facts.large dd { font-size: 22px; } .pair { grid-template-columns: 1fr; }
  .chart { grid-template-columns: 36px 1fr; column-gap: 6px; font-size: 11px; }
  .chart .x span:nth-child(even) { display: none; } figcaption { margin-left: 42px; }
  .lanes { column-gap: 8px; } .lanes .names { font-size: 11px; }
  td:first-child { white-space: nowrap; } .ratio { width: 56px; margin-right: 6px; } }
"""
