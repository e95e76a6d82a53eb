"""The page's style sheet: light and dark, from a phone to a wide screen."""

STYLE = """
:root {
  color-scheme: light dark;
  --rust: #8f5546; --page: #f6f5f2; --card: #ffffff; --ink: #1c1b19; --soft: #6b6861; --line: #e4e1d9;
  --blue: #2b6cd4; --teal: #12877b; --amber: #c77d0a; --red: #c8402f; --violet: #7a56c2; --gray: #a5a199;
  --good: #19764b; --warn: #a8620a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --rust: #a06a5a; --page: #161513; --card: #201f1c; --ink: #edebe5; --soft: #a19d94; --line: #35332e;
    --blue: #6ea1f5; --teal: #3fbfae; --amber: #e3a542; --red: #ee7867; --violet: #a98be8; --gray: #6f6b64;
    --good: #5cc492; --warn: #e3a542;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; padding: clamp(16px, 4vw, 48px) 16px 48px; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  -webkit-text-size-adjust: 100%; overflow-wrap: break-word;
}
main { max-width: 1040px; margin: 0 auto; display: grid; gap: 20px; }
main > * { min-width: 0; }
h1 { margin: 0; font-size: clamp(24px, 4vw, 34px); line-height: 1.2; font-weight: 650; letter-spacing: -0.01em; }
h2 { margin: 0 0 14px; font-size: 17px; font-weight: 650; }
header p { margin: 6px 0 0; color: var(--soft); }
.pill {
  display: inline-block; vertical-align: middle; margin-left: 10px; padding: 2px 12px; border-radius: 99px;
  font-size: 14px; font-weight: 600; letter-spacing: 0; color: var(--card); background: var(--gray);
}
.pill.completed { background: var(--good); } .pill.running { background: var(--blue); }
.pill.failed { background: var(--red); } .pill.preempted { background: var(--warn); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 20px; }
.tiles { display: grid; grid-template-columns: repeat(3, 1fr); gap: 1px; padding: 0;
  overflow: hidden; background: var(--line); }
.tiles > div { background: var(--card); padding: 16px 20px; }
.tiles span { display: block; font-size: 14px; color: var(--soft); }
.tiles strong { display: block; font-size: 28px; line-height: 1.25; font-weight: 640; letter-spacing: -0.02em;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.tiles small { display: block; font-size: 13px; line-height: 1.4; color: var(--soft); }
.tiles .unknown strong { font-size: 17px; line-height: 35px; color: var(--soft); font-weight: 500; letter-spacing: 0; }
.first { border-left: 5px solid var(--amber); }
.first.none { border-left-color: var(--good); }
.first ol { margin: 0; padding: 0; list-style: none; display: grid; gap: 14px; }
.first b { text-transform: capitalize; } .first em { font-style: normal; color: var(--soft); }
.first p { margin: 2px 0 0; } .first .share { font-variant-numeric: tabular-nums; }
.bar { display: flex; gap: 2px; height: 34px; border-radius: 7px; overflow: hidden; }
.bar span { min-width: 2px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 10px 0 0; padding: 0; list-style: none;
  font-size: 14px; color: var(--soft); }
.legend i { display: inline-block; width: 11px; height: 11px; margin-right: 7px; border-radius: 3px; }
.legend b { color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); gap: 20px; }
.pair > section { min-width: 0; }
.chart { margin: 0; }
.chart figcaption { font-weight: 650; font-size: 17px; }
.chart figcaption small { float: right; font-weight: 400; font-size: 13px; line-height: 26px; color: var(--soft); }
.chart .legend { margin: 4px 0 0; }
.plot { position: relative; height: 210px; margin: 14px 10px 44px 56px; font-size: 13px; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.plot path { fill: none; vector-effect: non-scaling-stroke; }
.plot .grid { stroke: var(--line); stroke-width: 1; }
.plot .mark { stroke: var(--gray); stroke-width: 1; stroke-dasharray: 3 4; }
.plot .line { stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.plot .y { position: absolute; right: 100%; margin-right: 8px; transform: translateY(-50%); white-space: nowrap; }
.plot .x { position: absolute; top: 100%; margin-top: 5px; white-space: nowrap; transform: translateX(-50%); }
.plot .x.first { transform: none; } .plot .x.last { transform: translateX(-100%); }
.plot .x-name { position: absolute; top: 100%; right: 0; margin-top: 24px; }
.heat + .heat { margin-top: 8px; }
.heat .plot { margin-left: 34px; }
.heat rect { fill: var(--blue); }
.timeline { display: grid; gap: 8px; }
.lane { display: grid; grid-template-columns: minmax(130px, 15%) 1fr; gap: 12px; align-items: center;
  font-size: 14px; }
.lane b { font-weight: 500; color: var(--soft); line-height: 1.25; }
.lane > div { position: relative; height: 24px; border-radius: 5px; background: var(--page); }
.lane .span { position: absolute; top: 0; bottom: 0; border-radius: 4px; }
.lane .save { position: absolute; top: 3px; bottom: 3px; width: 2px; margin-left: -1px; background: var(--card); }
table { width: 100%; border-collapse: collapse; font-size: 15px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; font-size: 14px; color: var(--soft); }
th, td { padding: 7px 14px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
.wide { overflow-x: auto; }
td, th { white-space: nowrap; }
.bad { color: var(--red); font-weight: 600; }
.note { margin: 10px 0 0; font-size: 14px; color: var(--soft); }
footer { color: var(--soft); font-size: 14px; }
@media (max-width: 640px) { .tiles { grid-template-columns: 1fr 1fr; } }
@media (max-width: 480px) {
  section { padding: 16px; } .tiles > div { padding: 12px 14px; }
  .tiles strong { font-size: 23px; } .plot { margin-left: 50px; }
  .lane { grid-template-columns: 1fr; gap: 3px; }
}
"""
