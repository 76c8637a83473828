// What ranks print: the end of one process's log, and what is added to it. It stays at the newest line until somebody scrolls up.
import { $, headers, make } from "./parts.js";

const LIST_MS = 4000, TAIL_MS = 1000, MOST = 400_000;
const CODES = new RegExp("\\u001b\\[[0-9;?]*[ -/]*[@-~]|\\u001b\\][^\\u0007\\u001b]*(\\u0007|\\u001b\\\\)|[\\u0000-\\u0008\\u000b\\u000c\\u000e-\\u001f]", "g");
let api = "", going = false, finished = false, current = null, next = null, busy = false, listed = 0, shown = "";

const plain = (text) => text.replace(CODES, "").replace(/\r\n/g, "\n").replace(/[^\n]*\r/g, "");
const log = $("log");
const atEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 24;
const nameOf = ({ slot, incarnation }) => `${slot}.${incarnation}`;

function toEnd() {
  log.scrollTop = log.scrollHeight;
  $("log-end").hidden = true;
}

async function ask(path) {
  try {
    const answer = await fetch(`${api}/logs${path}`, { headers: headers(), cache: "no-store" });
    return answer.ok ? await answer.json() : null;
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    return null; // the server is away; the page says so, and asks again
  }
}

function choose(name) {
  current = name;
  next = null;
  log.replaceChildren();
  $("log-rank").value = name;
  toEnd();
}

function newestOf(files, slot) {
  return files.filter((file) => file.slot === slot).at(-1);
}

function list(files) {
  $("logs").hidden = files.length === 0;
  const names = files.map(nameOf).join(" ");
  if (!files.length || names === shown) return;
  shown = names;
  $("log-rank").replaceChildren(...files.map((file) => make("option", { value: nameOf(file) }, `rank ${file.slot}${file.incarnation ? `, process ${file.incarnation + 1}` : ""}`)));
  const newest = newestOf(files, current === null ? files[0].slot : Number(current.split(".")[0]));
  if (nameOf(newest) !== current && (current === null || atEnd())) return choose(nameOf(newest)); // its replacement goes on
  $("log-rank").value = current;
}

function add(text) {
  if (!text) return;
  const follow = atEnd();
  log.append(text);
  log.normalize();
  if (log.textContent.length > MOST) log.textContent = log.textContent.slice(-MOST / 2);
  if (follow) toEnd();
  else $("log-end").hidden = false;
}

async function tail() {
  const [name, from] = [current, next];
  const piece = await ask(`/${name.replace(".", "/")}${from === null ? "" : `?offset=${from}`}`);
  if (piece === null || name !== current || next !== from) return false; // another one was chosen, or it was read twice at once
  if (from !== null && piece.offset !== from) log.replaceChildren(); // the file was made anew
  next = piece.next;
  add(plain(piece.text));
  return piece.next < piece.bytes && piece.next > piece.offset;
}

async function tick() {
  if (busy || document.hidden || (!going && finished)) return;
  busy = true;
  try {
    finished = !going;
    if (finished || Date.now() - listed >= LIST_MS) {
      listed = Date.now();
      list((await ask(""))?.logs ?? []);
    }
    if (current !== null) while (await tail());
  } finally {
    busy = false;
  }
}

export function logs(of, goesOn) {
  api = of;
  going = goesOn;
  if (listed) return;
  tick();
  setInterval(tick, TAIL_MS);
}

$("log-rank").addEventListener("change", async () => {
  choose($("log-rank").value);
  while (await tail());
});
$("log-end").addEventListener("click", toEnd);
log.addEventListener("scroll", () => {
  if (atEnd()) $("log-end").hidden = true;
});
