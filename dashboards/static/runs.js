import { $, askForToken, headers, make, say } from "./parts.js";

async function load() {
  const answer = await fetch("/api/runs", { headers: headers(), cache: "no-store" });
  if (answer.status === 401) {
    await askForToken();
    return load();
  }
  const { runs } = await answer.json();
  say("line", `${runs.length} run${runs.length === 1 ? "" : "s"}`);
  const rows = runs.map((run) => make("tr", {},
    make("td", { class: "l" }, run.status === "queued" ? run.name : make("a", { href: `/runs/${encodeURIComponent(run.name)}` }, run.name)),
    make("td", { class: "l" }, make("span", { class: `badge ${run.status}` }, run.status)),
    make("td", {}, run.world === undefined ? "-" : `${run.world}${run.spares ? ` + ${run.spares}` : ""}`),
    make("td", { class: "l" }, run.started_unix_s === undefined ? "-" : new Date(1000 * run.started_unix_s).toLocaleString()),
    make("td", { class: "l wrap" }, run.reason || "")));
  $("runs").tBodies[0].replaceChildren(...rows);
}

async function again() {
  try {
    await load();
  } catch (error) {
    say("line", "reconnecting");
  }
  setTimeout(again, 3000);
}

again();
