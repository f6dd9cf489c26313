// The page as a whole: what is known of the model, and where pictures come in.
"use strict";
async function refresh() {
  const { base } = state;
  try {
    const [model, { classes }, map] = await Promise.all(["model", "classes", "map"].map((path) => ask(own(path))));
    const corrections = await listCorrections(model);
    if (base !== state.base) return;  // another one was chosen meanwhile
    Object.assign(state, { model, classes, map, corrections });
    state.corrected = new Set(model.tasks.filter(({ corrected }) => corrected !== null).map(({ name }) => name));
    state.tasks = [...new Set(map.tasks.map(called))];
    $("trouble").hidden = true;
  } catch (error) {
    $("trouble").textContent = error.message;
    $("trouble").hidden = false;
    return;
  }
  drawFacts();
  drawClasses();
  drawCorrections();
  state.shots.forEach(fillFix);
  drawMap();
}

/** The model that the address names is shown, or else the first. */
async function listModels() {
  const asked = new URLSearchParams(location.search).get("model");
  if (asked !== null) show(asked);
  const { models } = await ask("models").catch(() => ({ models: [] }));  // other requests report a service that is down
  $("models").replaceChildren(...models.map(({ name }) => el("option", { value: name }, name)));
  $("models").value = asked ?? models[0]?.name;
  $("chooser").hidden = models.length < 2;
}
function show(name) { state.base = `models/${encodeURIComponent(name)}/`; }

function choose() {
  const { value } = $("models");
  show(value);
  state.fresh = null;
  history.replaceState(null, "", `?model=${encodeURIComponent(value)}`);
  changed();
}

/** Classes came or went: show them, and ask again about the pictures that are here. */
async function changed() {
  await refresh();
  await predict(state.shots.filter((shot) => !shot.error || shot.error.status === 0));
}

function drawFacts() {
  const { model, classes } = state, corrected = state.corrected.size;
  const file = model.file.path.split(/[\\/]/).pop();
  document.title = `${file} · protosteer`;
  $("model-name").textContent = file;
  const fact = (number, one, many) => el("span", {}, el("b", {}, number.toLocaleString("en")), ` ${number === 1 ? one : many}`);
  const backbone = el("span", {}, "backbone ", el("b", {}, model.backbone.name)), size = el("span", {}, el("b", {}, bytes(model.file.bytes)));
  $("facts").replaceChildren(fact(classes.length, "class", "classes"), corrected ? fact(corrected, "correction", "corrections") : "", size);
  $("more-facts").replaceChildren(fact(model.tasks.length - corrected, "task", "tasks"), backbone);
  $("teach").hidden = $("teach-link").hidden = !model.teaching;
  $("no-teaching").hidden = model.teaching;
  $("train-choice").hidden = !model.trainable;
  drawReading();
}

function drawReading() {
  drawReliability();
  const { calibrated, reject } = state.model, evidence = byEvidence();
  const explain = (name, word, text) => $(name).replaceChildren(el("b", {}, word), ` ${text}`);
  explain("reading-similarity", "Similarity", evidence
    ? "measures how similar the picture is to the class: 1 is identical, 0 has nothing in common."
    : "compares the picture with the nearest prototype of a class: 1 is the same, 0 has nothing in common. The bars show it.");
  explain("reading-probability", "Probability", evidence
    ? "is how likely the answer is right, if the picture shows one of the classes: of ten answers with 90 %, about nine are right. The bars show it."
    : "is spread over all classes, so it is small if there are many, even for a confident answer.");
  explain("reading-unknown", "Unknown", calibrated
    ? `is a picture that is less similar to every class than ${Number((100 - 100 * reject).toFixed(1))} % of the pictures of known classes are.`
    : `pictures cannot be detected: ${evidence ? "no class has two or more pictures" : "no pictures were held out to set a threshold"}.`);
  explain("reading-tried", evidence ? "Passes" : "Tried", evidence
    ? "are forward passes through the network. One is enough for a confident answer; otherwise the prompts of the most probable tasks are tried."
    : "are the tasks whose prompts were retrieved for this picture.");
}

function picker(button, input, take) {
  $(button).addEventListener("click", () => $(input).click());
  $(input).addEventListener("change", () => {
    take([...$(input).files]);
    $(input).value = "";  // so that the same file can be chosen again
  });
}

const takers = { try: addShots, teach: addExamples };
const zoneOf = (target) => target.closest?.("#teach") ? "teach" : "try";
const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
function dragged(event) {
  if (!carriesFiles(event) || (event.type === "dragleave" && event.relatedTarget)) return;
  event.preventDefault();
  const target = event.type === "dragover" ? zoneOf(event.target) : null;
  for (const zone of document.querySelectorAll("[data-drop]")) zone.classList.toggle("over", zone.dataset.drop === target);
  if (event.type === "drop") takers[zoneOf(event.target)]([...event.dataTransfer.files]);
}
function pasted(event) {
  const files = [...(event.clipboardData?.files ?? [])];
  if (!files.length) return;  // text goes where it was meant to go
  event.preventDefault();
  takers[zoneOf(document.activeElement ?? document.body)](files);
}

/** The column beside the pictures stays in sight; where it is taller than the window, its lower end does. */
function stick() {
  $("side").style.top = `${Math.min(16, innerHeight - $("side").offsetHeight - 16)}px`;
}

function start() {
  picker("choose", "files", addShots);
  $("photo-file").addEventListener("change", () => { addShots([...$("photo-file").files]); $("photo-file").value = ""; });
  picker("choose-examples", "example-files", addExamples);
  for (const kind of ["dragover", "dragleave", "drop"]) document.addEventListener(kind, dragged);
  document.addEventListener("paste", pasted);
  $("more").addEventListener("click", () => { state.all = !state.all; showCards(); });
  $("order").addEventListener("click", reorder);
  $("csv").addEventListener("click", saveCsv);
  $("bulk").addEventListener("submit", correctAll);
  $("bulk-right").addEventListener("click", confirmAll);
  $("rest").addEventListener("click", selectRest);
  $("token-cancel").addEventListener("click", () => $("token-dialog").close());
  $("clear").addEventListener("click", () => { removeShots(state.shots); say("All pictures removed."); });
  $("filter").addEventListener("input", drawClasses);
  $("map-table").addEventListener("toggle", drawTable);
  startCamera();
  $("teach-form").addEventListener("submit", teach);
  $("token").value = sessionStorage.getItem("token") ?? "";
  $("token").addEventListener("input", () => sessionStorage.setItem("token", $("token").value));
  new ResizeObserver(drawMap).observe($("plot"));
  new ResizeObserver(stick).observe($("side"));
  addEventListener("resize", stick);
  $("models").addEventListener("change", choose);
  listModels();
  refresh();
}
start();
