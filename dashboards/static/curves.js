// Curves with axes, the values under the mouse or the arrow keys, and a mark for each fault. uPlot draws; text only ever becomes text.
import uPlot from "./vendor/uPlot.esm.js";
import { $, duration, make, svg } from "./parts.js";

const NEAR = 6; // pixels between the mouse and a mark that is meant
const UNITS = [[180, 1, "s"], [10800, 60, "min"], [345600, 3600, "h"], [Infinity, 86400, "d"]];
const INCREMENTS = [...Array(21).keys()].flatMap((power) => [1, 2, 5].map((digit) => Number(`${digit}e${power - 10}`)));
const charts = new Map();

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const short = (value) => String(Number(value.toPrecision(5)));
const amount = (value, unit) => (value === null || value === undefined ? "-" : `${Number(value.toPrecision(unit ? 4 : 6))}${unit === "%" ? "%" : unit && ` ${unit}`}`);

function at(curve, point) {
  const [step, seconds] = curve.x === "step" ? point : [point[1], point[0]];
  return [step !== null && `step ${step.toLocaleString("en")}`, seconds !== null && duration(seconds)].filter(Boolean).join(", ");
}

function words(curve, point) {
  return `${at(curve, point)}: ${curve.series.map((what, index) => `${curve.series.length > 1 ? `${what} ` : ""}${amount(point[2 + index], curve.unit)}`).join(", ")}`;
}

function unitOf(curve) {
  const last = curve.points[curve.points.length - 1][0];
  return curve.x === "step" ? [0, 1, "step"] : UNITS.find(([limit]) => last <= limit);
}

function widthOf(u, values, axis) {
  if (!values) return 44;
  u.ctx.font = u.axes[axis].font[0];
  return Math.ceil(Math.max(...values.map((each) => u.ctx.measureText(each).width)) / devicePixelRatio) + 16;
}

function axes(chart) {
  const look = { stroke: () => colour("--soft"), font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif", labelSize: 16, labelGap: 0,
    grid: { stroke: () => colour("--line"), width: 1 }, ticks: { stroke: () => colour("--line"), width: 1, size: 4 } };
  const [, scale] = unitOf(chart.curve);
  const whole = chart.curve.x === "step";
  return [
    { ...look, size: 26, space: 60, label: whole ? "step" : `time, ${unitOf(chart.curve)[2]}`, incrs: INCREMENTS.filter((each) => !whole || each >= 1).map((each) => each * scale),
      values: (u, splits) => splits.map((each) => (whole ? each.toLocaleString("en") : short(each / scale))) },
    { ...look, size: (u, values) => widthOf(u, values, 1), space: 30, label: chart.curve.unit || chart.curve.name.slice(0, 40), values: (u, splits) => splits.map(short) },
  ];
}

function series(curve) {
  const lines = curve.series.map((what, index) => ({ label: what, stroke: () => colour(index === curve.series.length - 1 ? "--good" : "--focus"),
    width: index === curve.series.length - 1 ? 1.8 : 1, points: { show: false } }));
  return [{}, ...lines];
}

// Time begins with the run; a single step still has a width.
function span(curve, min, max) {
  if (curve.x === "time") return [0, max || 1];
  return min === max ? [min - 1, max + 1] : [min, max];
}

const column = (curve, index) => curve.points.map((point) => point[index]);
const columns = (curve) => [column(curve, 0), ...curve.series.map((what, index) => column(curve, 2 + index))];

// ---- what is under the mouse, or at the place that the arrow keys have come to -------------------------------------------

function read(chart, index) {
  const { curve, plot, box, says } = chart;
  const last = curve.points.length - 1;
  const shown = index === null || index === undefined ? last : Math.min(index, last);
  const near = chart.marks.filter((mark) => index !== null && Math.abs(plot.valToPos(mark[curve.x], "x") - plot.cursor.left) <= NEAR);
  const text = (index === null ? "newest: " : "") + words(curve, curve.points[shown]) + near.map((mark) => ` · ▼ ${mark.text}`).join("");
  if (says.textContent !== text) says.textContent = text;
  for (const [name, value] of [["aria-valuemax", last], ["aria-valuenow", shown], ["aria-valuetext", text]]) box.setAttribute(name, value);
}

function walk(chart, event) {
  const last = chart.curve.points.length - 1;
  const now = chart.plot.cursor.idx ?? last;
  const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last, PageUp: now - 10, PageDown: now + 10 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const point = chart.curve.points[Math.max(0, Math.min(last, to))];
  const value = point.slice(2).findLast((each) => each !== null) ?? 0;
  chart.plot.setCursor({ left: chart.plot.valToPos(point[0], "x"), top: chart.plot.valToPos(value, "y") });
}

// ---- faults --------------------------------------------------------------------------------------------------------------

function place(chart) {
  const { plot, curve } = chart;
  const { min, max } = plot.scales.x;
  const shown = chart.marks.filter((mark) => mark[curve.x] !== null && mark[curve.x] >= min && mark[curve.x] <= max);
  const marks = shown.map((mark) => {
    const line = make("i", { class: "fault", title: `${mark.text}, at ${duration(mark.time)}` });
    line.style.left = `${plot.valToPos(mark[curve.x], "x")}px`;
    return line;
  });
  plot.over.querySelectorAll(".fault").forEach((line) => line.remove());
  plot.over.prepend(...marks);
}

// ---- one chart each ------------------------------------------------------------------------------------------------------

const size = (box) => ({ width: Math.max(160, box.clientWidth), height: box.clientWidth < 420 ? 170 : 200 });

function draw(chart) {
  chart.plot?.destroy();
  const { box, curve } = chart;
  const hooks = { setCursor: [(u) => u === chart.plot && read(chart, u.cursor.left >= 0 ? u.cursor.idx : null)], draw: [(u) => u === chart.plot && place(chart)] };
  chart.form = JSON.stringify([unitOf(curve), curve.series, curve.unit]);
  chart.plot = new uPlot({ ...size(box), axes: axes(chart), series: series(curve), scales: { x: { time: false, range: (u, min, max) => span(curve, min, max) } }, legend: { show: false }, hooks,
    cursor: { y: false, drag: { setScale: false, x: false, y: false }, points: { size: 7 }, bind: { mousemove: (u, target, moved) => moved } }, padding: [10, 14, 0, 0] }, columns(curve), box);
}

function key(curve) {
  if (curve.series.length < 2) return [];
  return curve.series.map((what, index) => {
    const line = svg("svg", { viewBox: "0 0 18 8", class: index === curve.series.length - 1 ? "key good" : "key" });
    line.append(svg("line", { x1: 0, x2: 18, y1: 4, y2: 4 }));
    return make("span", { class: "soft" }, " ", line, ` ${what}`);
  });
}

function start(curve) {
  const box = make("div", { class: "plot", tabindex: "0", role: "slider", "aria-label": `${curve.name} over ${curve.x}; arrow keys go along it`, "aria-valuemin": "0" });
  const says = make("p", { class: "readout" });
  const figure = make("figure", { class: "chart", "data-curve": curve.name }, make("figcaption", {}, make("b", {}, curve.name), ...key(curve)), box, says);
  const chart = { curve, box, says, figure, marks: [], plot: null, shown: "" };
  box.addEventListener("keydown", (event) => walk(chart, event));
  new ResizeObserver(() => chart.plot && box.clientWidth && chart.plot.width !== size(box).width && chart.plot.setSize(size(box))).observe(box);
  charts.set(curve.name, chart);
  return chart;
}

function update(curve, marks) {
  const chart = charts.get(curve.name);
  const shown = JSON.stringify([curve, marks]);
  if (shown === chart.shown) return;
  Object.assign(chart, { shown, curve, marks });
  if (chart.form !== JSON.stringify([unitOf(curve), curve.series, curve.unit])) draw(chart);
  else chart.plot.setData(columns(curve));
  read(chart, chart.plot.cursor.left >= 0 ? chart.plot.cursor.idx : null);
}

export function curves(all, marks) {
  $("no-curves").hidden = all.some((curve) => curve.x === "step");
  if (all.some((curve) => !charts.has(curve.name))) $("curves").replaceChildren(...all.map((curve) => (charts.get(curve.name) || start(curve)).figure));
  for (const curve of all) update(curve, marks);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.plot.redraw()));
