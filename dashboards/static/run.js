import { curves } from "./curves.js";
import { first, priced } from "./first.js";
import { logs } from "./logs.js";
import { $, duration, follow, headers, make, percent, say, svg, utc } from "./parts.js";

const name = decodeURIComponent(location.pathname.split("/")[2]);
const api = `/api/runs/${encodeURIComponent(name)}`;
const SIGNS = { loss: "✕", "fault-executed": "▼", "fault-healed": "▲", "fault-suppressed": "▽" };
let state = null;
let chosen = null;

const moment = (at_s) => `${duration(at_s)}, ${utc(state.started_unix_s + at_s)}`;
const cell = (text, kind = "") => make("td", { class: kind }, text);

// New children, while whoever is at one of the old ones stays at its like.
function replace(element, ...children) {
  const at = element.contains(document.activeElement) && document.activeElement.dataset.key;
  element.replaceChildren(...children);
  if (at) [...element.querySelectorAll("[data-key]")].find((each) => each.dataset.key === at)?.focus({ preventScroll: true });
}

const fill = (id, rows) => replace($(id).tBodies[0], ...rows);

// ---- what words mean -------------------------------------------------------------------------------------------------

function term(what, shown = what) {
  const meaning = state.meanings[what];
  if (!meaning) return shown;
  return make("button", { type: "button", class: "term", title: meaning, "data-key": what, "data-shown": shown }, shown);
}

function explain(event) {
  const button = event.target.closest?.(".term");
  if (!button) return;
  const said = button.closest("section").querySelector(".meaning");
  said.replaceChildren(make("b", {}, button.dataset.shown), ` ${state.meanings[button.dataset.key]}`);
}

document.addEventListener("focusin", explain);
document.addEventListener("click", explain);

function glossary() {
  if ($("meanings").children.length) return;
  const words = Object.entries(state.meanings).filter(([what]) => what !== "step");
  $("meanings").replaceChildren(...words.flatMap(([what, meaning]) => [make("dt", {}, what), make("dd", {}, meaning)]));
}

function bar(share, left, colour, kind = "") {
  const inner = make("span", { class: kind });
  inner.hidden = share <= 0;
  inner.style.marginLeft = `${100 * left}%`;
  inner.style.width = `${Math.max(0, 100 * share)}%`;
  inner.style.background = colour;
  return make("td", { class: "track" }, inner);
}

// ---- prices ----------------------------------------------------------------------------------------------------------

function priceOf(fault) {
  const amounts = state.bill && state.bill.by_fault[fault.id];
  return amounts ? ` (${priced(amounts, state.bill.units)})` : "";
}

// ---- timeline --------------------------------------------------------------------------------------------------------

function timeline({ rows, marks, slots_left_out: slots, marks_left_out: older }) {
  const wall = state.wall_s || 1;
  const shown = new Set();
  const lost = marks.filter((mark) => mark.kind === "loss");
  $("rows").replaceChildren(...rows.map(({ slot, bars }) => {
    const sums = {};
    const picture = svg("svg", { viewBox: `0 0 ${wall} 10`, preserveAspectRatio: "none", role: "img" });
    for (const [start, end, what] of bars) {
      shown.add(what);
      sums[what] = (sums[what] || 0) + end - start;
      const rect = svg("rect", { x: start, y: 0, width: Math.max(end - start, wall / 1500), height: 10, fill: state.colours[what] });
      const title = svg("title");
      title.textContent = `slot ${slot}: ${what} for ${duration(end - start)} from ${duration(start)}`;
      rect.append(title);
      picture.append(rect);
    }
    const words = Object.entries(sums).sort((a, b) => b[1] - a[1]).map(([what, seconds]) => `${what} ${duration(seconds)}`);
    picture.setAttribute("aria-label", `slot ${slot}: ${words.join(", ") || "nothing yet"}`);
    const crosses = lost.filter((mark) => mark.slot === slot).map((mark) => {
      const cross = make("b", { "aria-hidden": "true", title: mark.text }, "✕");
      cross.style.left = `${(100 * mark.at_s) / wall}%`;
      return cross;
    });
    return make("div", { class: "row" }, make("span", { "aria-hidden": "true" }, slot), picture, ...crosses);
  }));
  views(marks.filter((mark) => mark.kind === "view"), wall);
  buttons(marks.filter((mark) => mark.kind !== "view"), wall);
  $("ticks").replaceChildren(...[0, 1, 2, 3, 4, 5].map((part) => make("span", {}, duration((wall * part) / 5))));
  replace($("legend"),
    ...Object.entries(state.colours).filter(([what]) => shown.has(what)).map(([what, colour]) => {
      const patch = make("i");
      patch.style.background = colour;
      if (what === "pending") patch.className = "pending";
      return make("li", {}, patch, term(what));
    }),
    make("li", {}, "▼ fault"), make("li", {}, "▲ healed"), make("li", {}, "▽ suppressed"), make("li", {}, "✕ process lost"), make("li", {}, "┊ new view"));
  say("timeline-words", [slots && `${slots} slots that lost less are not drawn.`, older && `${older} older marks are not drawn.`].filter(Boolean).join(" "));
}

function views(marks, wall) {
  $("views").replaceChildren(...marks.map((mark) => {
    const line = make("i", { title: mark.text });
    line.style.left = `${(100 * mark.at_s) / wall}%`;
    return line;
  }));
}

const faultOf = (mark) => state.faults.find((fault) => (mark.kind === "loss"
  ? fault.members.includes(mark.text.split(" ")[0])
  : mark.text.startsWith(`${fault.id} `)));

const APART = 2.6; // percent of the width between two buttons of a lane

function lanes(marks, wall) {
  const ends = [];
  return marks.map((mark) => {
    const left = Math.min(99, Math.max(0.5, (100 * mark.at_s) / wall));
    let lane = ends.findIndex((end) => left - end >= APART);
    if (lane < 0) lane = ends.length < 5 ? ends.length : ends.indexOf(Math.min(...ends));
    ends[lane] = left;
    return { mark, left, lane };
  });
}

function buttons(all, wall) {
  const marks = all.filter((mark) => mark.kind !== "loss" || (faultOf(mark)?.id ?? "loss-").startsWith("loss-"));
  const placed = lanes(marks, wall);
  $("marks").style.height = `${1.4 * (1 + Math.max(0, ...placed.map(({ lane }) => lane)))}rem`;
  const focused = document.activeElement && document.activeElement.dataset.mark;
  $("marks").replaceChildren(...placed.map(({ mark, left, lane }) => {
    const fault = faultOf(mark);
    const key = `${mark.kind} ${mark.at_s}`;
    const button = make("button", {
      type: "button", class: mark.kind.replace("fault-", ""), title: mark.text, "data-mark": key,
      "aria-label": `${mark.text}, at ${moment(mark.at_s)}`, "aria-pressed": String(fault !== undefined && fault.id === chosen),
      onclick: () => choose(fault ? fault.id : null),
    }, SIGNS[mark.kind] || "•");
    button.style.left = `${left}%`;
    button.style.top = `${1.4 * lane}rem`;
    return button;
  }));
  if (focused) [...$("marks").children].find((button) => button.dataset.mark === focused)?.focus({ preventScroll: true });
}

function choose(id) {
  chosen = id;
  timeline(state.timeline);
  story();
}

function showStory(id) {
  choose(id);
  $("story").scrollIntoView({ block: "nearest" });
}

let storyText = "";
function story() {
  const fault = state.faults.find((each) => each.id === chosen);
  const text = JSON.stringify(fault || null);
  if (text === storyText || (!fault && !chosen)) return;
  storyText = text;
  if (fault && fault.phase === "suppressed") {
    return $("story").replaceChildren(make("h3", {}, `${fault.id}: ${fault.kind} (${fault.component})`), make("p", {}, "It was kept from striking."),
      make("ol", {}, ...fault.story.map((line) => make("li", {}, `${moment(line.at_s)}  ${line.text}`))));
  }
  if (!fault) return $("story").replaceChildren(make("p", { class: "soft" }, "It is not on record any more."));
  const costs = Object.entries(fault.cost).map(([what, seconds]) => `${what} ${duration(seconds)}`);
  $("story").replaceChildren(
    make("h3", {}, `${fault.id}: ${fault.kind} (${fault.component}), ${duration(fault.cost_s)} of rank time`),
    make("p", {}, costs.length ? `${costs.join(", ")}.` : "It cost nothing.", ` A fault like this should cost ${duration(fault.predicted_s)}, start-up of replacements (here ${duration(fault.init_s)}) included.`),
    make("p", { class: "soft" }, `Stall ${duration(fault.stall_s)}; all in all ${duration(fault.excess_s)} of wall time.`),
    make("ol", {}, ...fault.story.map((line) => make("li", {}, `${moment(line.at_s)}  ${line.text}`))));
}

// ---- tables ----------------------------------------------------------------------------------------------------------

function rates(ahead) {
  if (!ahead) return [];
  const often = (found) => [found.mean, found.high, found.low].map((rate) => cell(duration(1 / rate)));
  return [...Object.entries(ahead.rates), ["all", ahead.all]].map(([kind, found]) => make("tr", {}, cell(kind, "l"), ...often(found)));
}

function tables() {
  const { rank_s: undecided, colour } = state.pending;
  const rows = state.waterfall.map((row) => make("tr", {}, make("td", { class: "l" }, term(row.name === "goodput" ? "step" : row.name, row.name)),
    cell(duration(row.rank_s)), cell(percent(row.share)), bar(row.share, row.left, row.colour)));
  if (undecided > 0) rows.push(make("tr", { class: "pending" }, make("td", { class: "l" }, term("pending")), cell(duration(undecided)), cell("not decided"),
    bar(Math.min(1, undecided / state.waterfall[0].rank_s), 0, colour, "pending")));
  fill("waterfall", rows);
  const { terms, goodput, error } = state.prediction;
  fill("prediction", [...terms.map((term) => make("tr", {}, cell(term.name, "l"), cell(percent(term.predicted)), cell(percent(term.measured)))),
    make("tr", {}, make("th", { scope: "row", class: "l" }, "goodput"), cell(percent(goodput)), cell(percent(state.now.goodput)))]);
  say("prediction-words", `Measured is ${percent(Math.abs(error))} ${error < 0 ? "below" : "above"} what the faults that came should have left.`);
  fill("forecast", rates(state.forecast));
  $("forecast-words").replaceChildren(...state.forecast_words.map((line) => make("li", {}, line)));
  const step = state.law.reduce((sum, part) => sum + part.seconds, 0) || 1;
  fill("law", state.law.map((part) => make("tr", {}, make("td", { class: "l" }, term(part.category, part.name)), cell(duration(part.seconds)), bar(part.seconds / step, 0, state.colours.step))));
  const hidden = state.fleet_law?.overlap_s;
  if (hidden !== null && hidden !== undefined) $("law").tBodies[0].append(make("tr", {}, cell("hidden behind computing", "l"), cell(duration(hidden)), bar(hidden / step, 0, state.colours.exposed_comm)));
  fill("faults", state.faults.map((fault) => make("tr", {},
    make("td", { class: "l" }, make("button", { type: "button", "data-key": fault.id, onclick: () => showStory(fault.id) }, fault.id)),
    cell(moment(fault.at_s)), cell(`${fault.kind} ${fault.phase}`, "l"),
    cell(fault.members.join(", ") + (fault.members_left_out ? ` +${fault.members_left_out}` : "") || "-", "l"), cell(duration(fault.cost_s) + priceOf(fault)), cell(duration(fault.stall_s)))));
  const counts = state.fault_counts.map((each) => `${each.count} ${each.kind} ${each.phase}`);
  say("fault-words", counts.length ? `${counts.join(", ")}.` : state.faults.length ? "" : "Nothing has struck.");
  fill("members", state.slots.map((member) => make("tr", {}, cell(`${member.slot} ${member.coordinate}`.trim()), cell(member.incarnation), cell(member.state + (member.cause ? `: ${member.cause}` : ""), member.state === "lost" ? "l lost" : "l"),
    cell(member.node || "-", "l"), cell(member.pid || "-"), cell(member.shards || "-"))));
  hosts(state);
  say("member-words", state.slots_left_out ? `${state.slots_left_out} more slots are not listed.` : "");
}

function words() {
  const { interval, checkpoints, ledger } = state;
  $("interval").replaceChildren(...(interval.length ? interval.map((each) => make("li", {}, make("b", {}, each.action), ` at ${moment(each.at_s)}: ${each.reason}`))
    : [make("li", { class: "soft" }, "No interval was decided on.")]));
  const counts = Object.entries(checkpoints.counts).map(([phase, count]) => `${count} ${phase}`).join(", ") || "none";
  say("checkpoints", `Checkpoints: ${counts}. The newest, of step ${checkpoints.step}, blocked the loop for ${duration(checkpoints.blocked_s)} and was durable after ${duration(checkpoints.latency_s)}.`);
  say("ledger", `The ledger ${ledger.closes ? "closes" : "does not close"}; ${percent(ledger.other)} of rank time was recorded by nobody.${ledger.digest ? ` Final state ${ledger.digest}.` : ""}`);
}

function show(newest) {
  if (newest === null) return say("status", "starting");
  state = newest;
  document.title = state.now ? `${percent(state.now.goodput)} ${state.run}` : state.run;
  say("run", state.run);
  say("status", state.status);
  $("status").className = `badge ${state.status === "completed, not saved" ? "failed" : state.status}`;
  say("line", state.status === "running" ? "live" : "from the journal");
  say("reason", state.reason || "");
  $("damage").hidden = !state.damage;
  say("damage", state.damage ? `The journal is read up to here, and no further: ${state.damage}` : "");
  if (!state.now) return;
  $("page").hidden = false;
  first(state, showStory);
  timeline(state.timeline);
  story();
  tables();
  words();
  glossary();
  curves(state.curves, state.curve_marks);
  logs(api, state.status === "running");
  chaos();
}

// ---- chaos -----------------------------------------------------------------------------------------------------------

let asked = 0;
async function chaos(force = false) {
  if (!force && Date.now() - asked < 2000) return;
  asked = Date.now();
  try {
    const answer = await fetch(`${api}/chaos`, { headers: headers() });
    if (answer.ok) controls(await answer.json());
  } catch (error) {
    $("chaos").hidden = true;
  }
}

let places = {};

function controls({ running, ended, kinds, places: named, slots, nodes, may }) {
  places = named;
  $("chaos").hidden = ended || !may;
  say("chaos-words", running ? "Planned faults strike." : "No planned fault strikes.");
  $("chaos-start").disabled = running;
  $("chaos-stop").disabled = !running;
  if ($("inject-kind").options.length !== kinds.length) $("inject-kind").replaceChildren(...kinds.map((kind) => make("option", { value: kind }, kind)));
  const place = places[$("inject-kind").value];
  say("inject-where", place);
  $("inject-place").hidden = !place;
  $("inject-place").max = (place === "node" ? nodes : slots) - 1;
}

// Each host with its ranks; what chaos does to a host, or to a rank, stands beside it.
function hosts({ hosts: all, injected }) {
  say("injected", injected.length ? `Struck for all: ${injected.join(", ")}.` : "");
  replace($("hosts"), ...all.map(({ node, injected: kinds, ranks }) => make("li", { class: kinds.length ? "host injected" : "host" },
    make("b", {}, node), kinds.length ? make("span", { class: "bad" }, ` ${kinds.join(", ")}`) : "",
    make("span", { class: "ranks" }, ...ranks.map((rank) => make("span", { class: rank.injected.length ? "rank injected" : `rank ${rank.state}`, title: rank.state },
      `${rank.slot}${rank.injected.length ? ` ${rank.injected.join(", ")}` : ""}`))))));
}

async function order(body) {
  try {
    const answer = await fetch(`${api}/chaos`, { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body) });
    const { said, detail } = await answer.json();
    say("chaos-said", answer.ok ? `Ordered: ${said}` : `Refused: ${detail}`);
  } catch (error) {
    say("chaos-said", "The server cannot be reached.");
  }
  chaos(true);
}

$("chaos-start").addEventListener("click", () => order({ action: "start" }));
$("chaos-stop").addEventListener("click", () => order({ action: "stop" }));
$("chaos-heal").addEventListener("click", () => order({ action: "heal" }));
$("inject-kind").addEventListener("change", () => chaos(true));
$("inject").addEventListener("submit", (event) => {
  event.preventDefault();
  const kind = $("inject-kind").value;
  const place = places[kind] ? { [places[kind]]: Number($("inject-place").value) } : {};
  order({ action: "inject", kind, ...place, duration_s: Number($("inject-s").value) });
});

say("run", name);
follow(`${api}/events`, (text) => say("line", text), show);
