
"use strict";
// The server draws: this script fetches the sections of each run again, and shows those that have changed.
const EVERY_MS = 3000;

async function read(address) {
  const answer = await fetch(address, { cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.json();
}

function show(place, html) {
  // A parsed document runs no script, and the policy of the page allows none but this one.
  place.replaceChildren(...new DOMParser().parseFromString(html, "text/html").body.childNodes);
}

function placesOf(name) {
  const run = { name, version: "", article: document.createElement("article") };
  run.head = document.createElement("div");
  run.body = document.createElement("div");
  run.article.append(run.head, run.body);
  run.head.addEventListener("click", (event) => {
    if (event.target.localName === "button") save(run);
  });
  return run;
}

async function update(run) {
  const asked = new URLSearchParams({ run: run.name, version: run.version });
  const answer = await read(`api/sections.json?${asked}`);
  const hadFocus = run.head.querySelector("button:focus") !== null;
  show(run.head, answer.header);
  if (hadFocus) run.head.querySelector("button")?.focus();
  if (answer.sections !== null) show(run.body, answer.sections);
  run.version = answer.version;
}

async function save(run) {
  const state = document.getElementById("state");
  try {
    // Pages of other sites cannot set this header.
    const options = { method: "POST", headers: { "X-Hfscale-Action": "save" } };
    const answer = await fetch(`api/save?${new URLSearchParams({ run: run.name })}`, options);
    state.textContent = (await answer.text()).trim();
    if (answer.ok) await update(run);
  } catch (error) {
    state.textContent = `Not asked: ${error.message}.`;
  }
}

async function start() {
  const state = document.getElementById("state");
  let runs = [];
  for (;;) {
    try {
      if (!runs.length) {
        const found = await read("api/runs.json");
        runs = found.runs.map(placesOf);
        const main = document.getElementById("runs");
        main.className = runs.length === 1 ? "one" : "";
        main.replaceChildren(...runs.map((run) => run.article));
        document.title = `${found.runs.join(", ")} · hfscale`;
      }
      for (const run of runs) await update(run);
      state.textContent = `Updated ${new Date().toLocaleTimeString()}.`;
    } catch (error) {
      state.textContent = `Not updated: ${error.message}.`;
    }
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
}

start();
