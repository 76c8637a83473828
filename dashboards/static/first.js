// The first screen: is it well, what does it cost, what is wrong.
import { $, duration, make, percent, say, utc } from "./parts.js";

const NEWEST = 3; // faults that are named here; all are in the table below
const MEASUREMENTS = 4;

const card = ([key, value, note]) => make("div", {}, make("dt", {}, key), make("dd", {}, value, make("small", {}, note)));
const cards = (id, rows) => $(id).replaceChildren(...rows.map(card));
const short = (value) => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString() : value.toLocaleString("en", { maximumSignificantDigits: 3 }));
const brief = (value) => (value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1) : value.toPrecision(4));
const gigabytes = (bytes) => `${(bytes / 1e9).toPrecision(3)} GB`;

export function priced(amounts, units) {
  return Object.entries(amounts).map(([name, value]) => `${short(value)} ${units[name]}`).join(", ");
}

// ---- is it well? -------------------------------------------------------------------------------------------------------

function left(now) {
  if (now.total_steps === null) return "the loop has not said how many steps it takes";
  if (now.eta_s === null) return "known after a few steps";
  return `at ${duration(now.recent_step_s)} a step, with losses as so far`;
}

function memory(now) {
  return now.device_peak_bytes ? `most of a rank; ${gigabytes(now.device_peak_bytes)} of its GPU` : "most of a rank, on its host";
}

const VERDICTS = { starting: "It is starting.", well: "Yes.", degraded: "No.", stopped: "It has stopped." };

function judge({ verdict }) {
  $("verdict").className = verdict.state;
  say("verdict", `${VERDICTS[verdict.state]} ${verdict.why}`);
}

function figures({ now, status, verdict, wall_s: wall, queued_s: queued }) {
  const spares = now.spares ? ` + ${now.spares} spare${now.spares > 1 ? "s" : ""}` : "";
  const steps = now.steps.toLocaleString();
  cards("figures", [
    verdict.state === "starting" ? ["goodput", "-", "known once a step is committed"] : ["goodput", percent(now.goodput), `${percent(now.scheduling_goodput)} with spares`],
    ["progress", now.total_steps ? `${steps} of ${now.total_steps.toLocaleString()} steps` : `${steps} steps`, verdict.state === "starting" ? "none is committed yet" : `${duration(now.step_s)} each, ${now.rolled_back} rolled back`],
    ...(status === "running" ? [["time left", now.eta_s === null ? "-" : `about ${duration(now.eta_s)}`, left(now)]] : []),
    ["world size", `${now.view_size} of ${now.world}`, `${now.generation < 0 ? "no view yet" : `view ${now.generation}`}${spares}`],
    ["lost", `${now.losses}`, `processes, ${now.views} views`],
    ["wall time", duration(wall), verdict.state === "starting" ? "since it was started" : `${percent(now.ettr)} of it in committed steps`],
    ...(now.tokens_per_s ? [["tokens a second", Math.round(now.tokens_per_s).toLocaleString(), "at the median step"]] : []),
    ...(now.peak_bytes ? [["memory", gigabytes(now.peak_bytes), memory(now)]] : []),
    ...(queued ? [["queued", duration(queued), "until there was room"]] : []),
    ...Object.entries(now.measurements).slice(0, MEASUREMENTS).map(([key, value]) => [key, value === null ? "not finite" : brief(value), "newest value"]),
  ]);
}

// ---- what does it cost? ------------------------------------------------------------------------------------------------

function budget({ budget: found }) {
  if (!found) return [];
  const lasts = found.left_usd > 0 ? `of ${short(found.usd)} USD, for ${duration(found.lasts_s)}` : `of ${short(found.usd)} USD`;
  return [["budget left", `${short(Math.max(0, found.left_usd))} USD`, lasts]];
}

function costs({ bill, now, verdict }) {
  $("no-cost").hidden = bill !== null;
  $("cost").hidden = bill === null;
  if (bill) {
    const { total, lost, faults, units } = bill;
    cards("cost", [
      ...Object.keys(total).map((name) => [`${units[name]} so far`, short(total[name]), verdict.state === "starting" ? "for the start" : `${short(lost[name])} lost, ${short(faults[name])} of it to faults`]),
      ...budget(bill),
      ...[["per million tokens", bill.per_million_tokens], ["per kept step", bill.per_step]].filter(([, amounts]) => amounts).map(([key, amounts]) => {
        const [[leading, value], ...rest] = Object.entries(amounts);
        return [key, `${short(value)} ${units[leading]}`, priced(Object.fromEntries(rest), units)];
      }),
    ]);
  }
  say("cost-words", bill ? `Prices: ${bill.basis}.` : "");
  $("factors").hidden = verdict.state === "starting";
  factors(now.factors);
}

function factors(found) {
  if (!found) return;
  const program = found.program === null ? ["x program (MFU)", "-", "the model's FLOPs are not counted"] : ["x program (MFU)", percent(found.program), found.rests_on];
  cards("factors", [
    ["scheduling", percent(found.scheduling), "the world's part of what was held"],
    ["x runtime", percent(found.runtime), "of that in steps that are kept"],
    program,
    ["=", percent(found.product), "of all that is paid for"],
  ]);
}

// ---- what is wrong? ----------------------------------------------------------------------------------------------------

function wrong({ wrong: lines, status, bill, faults, started_unix_s }, choose) {
  const all = lines.length ? lines.map((line) => make("li", { class: "bad" }, line))
    : [make("li", { class: "well" }, status === "running" ? "Nothing is wrong now." : "Nothing is wrong.")];
  const problems = faults.filter((fault) => fault.phase !== "suppressed");
  const newest = problems.slice(0, NEWEST).map((fault) => {
    const amounts = bill && bill.by_fault[fault.id];
    const cost = `${duration(fault.cost_s)} of rank time${amounts ? `, ${priced(amounts, bill.units)}` : ""}`;
    return make("li", {}, make("button", { type: "button", "data-first": fault.id, onclick: () => choose(fault.id) }, fault.id),
      ` ${fault.kind} ${fault.phase} at ${duration(fault.at_s)}, ${utc(started_unix_s + fault.at_s)}: ${cost}`);
  });
  const focused = document.activeElement?.dataset?.first;
  $("wrong").replaceChildren(...all, ...newest);
  if (focused) [...$("wrong").querySelectorAll("button")].find((each) => each.dataset.first === focused)?.focus({ preventScroll: true });
  const more = problems.length - newest.length;
  say("wrong-words", more > 0 ? `${more} older ${more > 1 ? "faults" : "fault"} below.` : problems.length ? "" : "Nothing has struck.");
}

export function first(state, choose) {
  judge(state);
  figures(state);
  costs(state);
  wrong(state, choose);
}
