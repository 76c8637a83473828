// What both pages need: elements, units, the token, and a stream that comes back after it broke. Text only ever becomes text.

export const $ = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name === "onclick") element.addEventListener("click", value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

export function svg(tag, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

export function say(id, text) {
  const element = $(id);
  if (element.textContent !== text) element.textContent = text;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (Math.abs(seconds) < 0.9995) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} m ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${String(Math.floor((seconds % 3600) / 60)).padStart(2, "0")} m`;
  return `${(seconds / 86400).toFixed(1)} d`;
}

export const utc = (unix_s) => `${new Date(1000 * unix_s).toISOString().slice(11, 19)}Z`;

export const percent = (share) => (share === null || share === undefined ? "-" : `${(100 * share).toFixed(2)}%`);

// ---- the token -------------------------------------------------------------------------------------------------------

const shown = new URLSearchParams(location.hash.slice(1)).get("token");
if (shown) {
  sessionStorage.setItem("fleet-token", shown);
  history.replaceState(null, "", location.pathname + location.search);
}

export function headers(more = {}) {
  const token = sessionStorage.getItem("fleet-token");
  return token ? { ...more, Authorization: `Bearer ${token}` } : more;
}

export function askForToken() {
  $("door").hidden = false;
  return new Promise((resolve) => {
    $("door").addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem("fleet-token", $("token").value);
      $("door").hidden = true;
      resolve();
    }, { once: true });
  });
}

// ---- server-sent events, with a header that EventSource cannot send ----------------------------------------------------

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    yield* parts;
  }
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export async function follow(url, report, take) {
  for (let wait = 500; ; wait = Math.min(5000, wait * 2)) {
    try {
      const answer = await fetch(url, { headers: headers(), cache: "no-store" });
      if (answer.status === 401) {
        report("a token is needed");
        await askForToken();
        wait = 250;
        continue;
      }
      if (answer.status === 404) return report("there is no such run");
      if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
      report("live");
      wait = 250;
      for await (const line of lines(answer.body)) if (line.startsWith("data: ")) take(JSON.parse(line.slice(6)));
    } catch (error) {
      if (!(error instanceof TypeError) && !/HTTP|network/i.test(String(error))) throw error;
    }
    report("reconnecting");
    await pause(wait);
  }
}
