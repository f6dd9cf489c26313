// The page: pictures in, answers out. Nothing leaves the device.
import { prepare } from "./image.js";
import { loadModel } from "./model.js";

const $ = (id) => document.getElementById(id);
const percent = (share) => (share > 0.995 ? "> 99 %" : share < 0.005 ? "< 1 %" : `${Math.round(100 * share)} %`);
const answers = [];
let queue = Promise.resolve();

/** Wait until the service worker answers requests, so that the model is stored for use without a network. */
async function offline() {
  if (!("serviceWorker" in navigator)) return;
  try {
    await navigator.serviceWorker.register("sw.js");
    if (navigator.serviceWorker.controller) return;
    const controlled = new Promise((done) => navigator.serviceWorker.addEventListener("controllerchange", done, { once: true }));
    await Promise.race([controlled, new Promise((done) => setTimeout(done, 3000))]);
  } catch { /* private windows and plain HTTP have none: the page works while there is a network */ }
}

const model = offline().then(loadModel);
// For other programs on this page: protosteer.predict(blob) -> {label, probability, similarity, unknown, top}
globalThis.protosteer = { predict: async (blob) => { const ready = await model; return ready.predict(await prepare(blob, ready.about.preprocessing)); } };
model.then(
  (ready) => {
    const where = ready.device === "webgpu" ? "on the graphics processor" : "on the processor";
    $("state").textContent = `Ready. ${ready.labels.length} classes; runs ${where} of this device.`;
    $("classes").textContent = ready.labels.join(", ");
  },
  (error) => {
    $("state").textContent = `The model cannot be started: ${error.message}. Reload the page; if that does not help, try another browser.`;
    $("state").className = "bad";
  },
);

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function give(files) {
  for (const file of files) {
    const picture = element("img", { src: URL.createObjectURL(file), alt: "" });
    const text = element("div", { className: "text" }, element("p", { className: "muted", textContent: "Waiting …" }));
    const card = element("li", {}, picture, text);
    $("answers").prepend(card);
    queue = queue.then(() => answer(file, text));
  }
}

async function answer(file, text) {
  const name = element("p", { className: "muted name", textContent: file.name });
  try {
    const found = await globalThis.protosteer.predict(file);
    answers.push({ file: file.name, ...found });
    $("download").hidden = false;
    text.replaceChildren(
      element("h2", { textContent: found.label }),
      ...(found.unknown ? [element("p", { className: "unknown", textContent: "unlike everything it knows" })] : []),
      element("ul", { className: "bars" }, ...found.top.map(([label, share]) => bar(label, share))), name,
    );
  } catch (error) {
    const reason = error instanceof DOMException ? "This browser cannot read the picture. Save it as JPEG or PNG." : error.message;
    text.replaceChildren(element("p", { className: "bad", textContent: reason }), name);
  }
}

function bar(label, share) {
  const meter = element("span", { className: "meter" }, element("span"));
  meter.firstChild.style.width = `${100 * share}%`;
  return element("li", {}, element("span", { textContent: label }), element("b", { textContent: percent(share) }), meter);
}

function download() {
  const quoted = (value) => `"${String(value).replaceAll('"', '""')}"`;
  const lines = answers.map((row) => [quoted(row.file), quoted(row.label), row.probability, row.unknown].join(","));
  const blob = new Blob([["file,label,probability,unknown", ...lines, ""].join("\r\n")], { type: "text/csv" });
  const link = element("a", { href: URL.createObjectURL(blob), download: "answers.csv" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

for (const id of ["files", "camera"]) {
  $(id).addEventListener("change", (event) => { give([...event.target.files]); event.target.value = ""; });
}
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => { event.preventDefault(); give([...event.dataTransfer.files]); });
document.addEventListener("paste", (event) => give([...event.clipboardData.files]));
$("download").addEventListener("click", download);
