// What every part of the page uses: its state, small tools, and how the service is asked.
"use strict";
const RETRIES = 6;                         // how often a busy service is asked again
const NO_TOKEN = "This is not the service's token. It was shown where the service was started.";
const NOTHING = "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg'/%3E";  // until there is a thumbnail
const COLOURS = 8;
const SHAPES = [                           // 7 and 8 have no common divisor: 56 looks before one comes again
  "M5 0A5 5 0 1 1-5 0A5 5 0 1 1 5 0Z", "M-4.4-4.400H4.400V4.400H-4.400Z", "M0-5.6 5.2 4H-5.200Z", "M0-6 6 0 0 6-6 0Z",
  "M0 5.6-5.2-4H5.200Z", "M-2-5.500H2V-2H5.500V2H2V5.500H-2V2H-5.500V-2H-2Z", "M0-5.8 5-2.900V2.900L0 5.8-5 2.900V-2.900Z",
];
const state = { base: "", model: {}, classes: [], corrections: [], corrected: new Set(), tasks: [], map: { classes: [], tasks: [] }, shots: [], examples: [], all: false, fresh: null, counted: 0 };

const $ = (id) => document.getElementById(id);
const sleep = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));
const plural = (n, one, many = one + "s") => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
const percent = (p) => `${(100 * p).toFixed(1)} %`;
const bytes = (n) => (n < 1000 ? plural(n, "byte") : n < 1e6 ? `${(n / 1e3).toFixed(1)} kB` : `${(n / 1e6).toFixed(1)} MB`);
const sentence = (text) => text + (/[.!?]$/.test(text) ? "" : ".");
const say = (text) => { $("status").textContent = text; };

function build(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key.startsWith("--")) node.style.setProperty(key, value);
    else if (value !== false && value != null) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child != null));  // strings become text, never markup
  return node;
}
const el = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/** What a task is called here: each correction is one, and all of them look alike. */
const called = (task) => (state.corrected.has(task) ? "correction" : task);

function look(task) {
  const number = Math.max(0, state.tasks.indexOf(called(task)));
  return { colour: `var(--t${number % COLOURS})`, shape: SHAPES[number % SHAPES.length] };
}
function glyph(task) {
  const { colour, shape } = look(task);
  return icon(svg("path", { d: shape, fill: colour }));
}
const icon = (drawing) => svg("svg", { class: "glyph", viewBox: "-7 -7 14 14", "aria-hidden": "true" }, drawing);
const named = (name, task) => el("span", { class: "named" }, glyph(task), el("span", {}, name));

class Failure extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function ask(path, options = {}, onWait = () => {}) {
  for (let attempt = 0; ; attempt++) {
    let response;
    try {
      response = await fetch(path, options);
    } catch {
      throw new Failure(0, "The service does not answer. Is it still running?");
    }
    if (response.ok) return response.json();
    if (response.status !== 503 || attempt === RETRIES) throw new Failure(response.status, await reason(response));
    const seconds = Math.min(30, Math.max(0.2, Number(response.headers.get("Retry-After")) || 1));
    onWait(seconds);
    await sleep(seconds);
  }
}

async function reason(response) {
  if (response.status === 401) return NO_TOKEN;
  const { detail } = await response.json().catch(() => ({}));
  return detail ? sentence(String(detail)) : `The service answered with error ${response.status}.`;
}

function form(files) {
  const data = new FormData();
  for (const file of files) data.append("images", file, file.name || "pasted picture");
  return data;
}
function bearer() {
  const token = $("token").value.trim();
  if (!/^[ -~]*$/.test(token)) throw new Failure(401, NO_TOKEN);  // no header can carry it
  return { Authorization: `Bearer ${token}` };
}
function keepToken(token) {
  $("token").value = token;
  sessionStorage.setItem("token", token);
}

/** Ask for the token where it is needed and not known; false if none is given. */
function needToken() {
  if ($("token").value.trim()) return Promise.resolve(true);
  const dialog = $("token-dialog");
  $("token-asked").value = dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => {
    dialog.onclose = () => {
      const token = $("token-asked").value.trim(), given = dialog.returnValue === "ok" && token;
      if (given) keepToken(token);
      done(Boolean(given));
    };
  });
}
const own = (path) => `${state.base}${path}`;  // of the model that is shown
const classPath = (name) => own(`classes/${encodeURIComponent(name)}`);
