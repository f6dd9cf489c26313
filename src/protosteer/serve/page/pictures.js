// Pictures that someone asks about, as cards, and their answers.
"use strict";
const BATCH = 16, BATCH_BYTES = 8e6;  // pictures and bytes of one request
const TOP = 3;  // classes shown for a picture
const SHOWN_CARDS = 6;  // drawn before someone asks for more

async function thumbnail(file, side = 192) {
  try {
    const picture = await createImageBitmap(file);
    const canvas = el("canvas", { width: side, height: side });
    const pen = canvas.getContext("2d");
    const cut = Math.min(picture.width, picture.height);
    pen.imageSmoothingEnabled = cut > side / 2;  // very small pictures look better as squares than blurred
    pen.imageSmoothingQuality = "high";
    pen.drawImage(picture, (picture.width - cut) / 2, (picture.height - cut) / 2, cut, cut, 0, 0, side, side);
    picture.close();
    const blob = await new Promise((done) => canvas.toBlob(done));
    return URL.createObjectURL(blob);
  } catch {
    return null;  // not every format that the service reads can be shown by the browser
  }
}

function addShots(files) {
  const added = files.map((file) => ({ id: `shot-${++state.counted}`, file, name: file.name || "pasted picture", turn: 0 }));
  if (!state.shots.length) $("reading").open = false;  // it made way for the answers it explains
  state.shots.unshift(...added);
  for (const shot of added) {
    makeCard(shot);
    thumbnail(shot.file).then((url) => {
      shot.thumb = url;
      if (url) shot.image.src = url;
      drawMap();
    });
  }
  showCards();
  return predict(added);
}

function makeCard(shot) {
  const active = () => highlight(shot.id), calm = () => highlight(null);
  shot.image = el("img", { class: "thumb", alt: "", src: NOTHING, onclick: () => { if (!shot.pick.hidden) shot.pick.click(); } });
  shot.head = el("div", {}, el("h3", { id: shot.id }));
  shot.answer = el("div", { class: "answer" });
  const gone = () => removeShots([shot]);
  const remove = el("button", { class: "plain cross", type: "button", "aria-label": `Remove ${shot.name}`, onclick: gone }, "×");
  const events = { onmouseenter: active, onmouseleave: calm, onfocusin: active, onfocusout: calm };
  makeFix(shot);
  shot.pick = el("input", { class: "pick", type: "checkbox", "aria-label": `Select ${shot.name}`, onchange: drawBulk });
  shot.card = el("li", { class: "card", "aria-labelledby": shot.id, ...events }, shot.pick, shot.image, shot.head, remove, shot.answer, shot.fix.node);
  fillCard(shot);
}

function removeShots(gone) {
  const place = state.shots.indexOf(gone[0]);
  for (const { thumb } of gone) if (thumb) URL.revokeObjectURL(thumb);
  state.shots = state.shots.filter((shot) => !gone.includes(shot));
  showCards();
  drawMap();
  const next = state.shots[Math.min(place, state.shots.length - 1)];
  (next?.card.isConnected ? next.card.querySelector(".cross") : $("choose")).focus();
}

const shownShots = () => (state.all ? state.shots : state.shots.slice(0, SHOWN_CARDS));

function showCards() {
  const shown = shownShots();
  $("cards").replaceChildren(...shown.map((shot) => shot.card));
  $("more").hidden = state.shots.length <= SHOWN_CARDS;
  $("more").textContent = state.all ? "Show fewer" : `Show all ${state.shots.length} pictures`;
  $("clear").hidden = $("csv").hidden = !state.shots.length;
  $("order").hidden = state.shots.length < 2;
  $("rest").hidden = $("order").hidden || !state.model?.teaching;
  drawBulk();
  $("try").classList.toggle("empty", !state.shots.length);
  $("work").classList.toggle("many", shown.length > SHOWN_CARDS);
}

/** The least certain first, or the newest; pictures without an answer come last. */
function reorder() {
  state.byDoubt = !state.byDoubt;
  const number = ({ id }) => Number(id.split("-")[1]);
  const doubt = ({ result }) => (result ? (byEvidence() ? result.probability : result.similarity) : Infinity);
  state.shots.sort((a, b) => (state.byDoubt ? doubt(a) - doubt(b) : 0) || number(b) - number(a));
  $("order").textContent = state.byDoubt ? "Newest first" : "Least certain first";
  $("cards").setAttribute("aria-label", state.byDoubt ? "Answers, least certain first" : "Answers, newest first");
  showCards();
}

/** A file with one line per picture, as `protosteer predict --csv` has it. */
function saveCsv() {
  const quoted = (value) => (/[",\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  const columns = ["label", "probability", "similarity", "unknown"];
  const line = ({ name, result, error }) => [name, ...columns.map((column) => result?.[column] ?? ""), error?.message ?? ""].map(quoted).join(",");
  const text = [["path", ...columns, "error"].join(","), ...state.shots.map(line), ""].join("\n");
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  el("a", { href: url, download: "answers.csv" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function fillCard(shot) {
  const { result, error } = shot;
  shot.card.classList.toggle("failed", Boolean(error));
  shot.card.classList.toggle("stale", Boolean(result && shot.waiting));
  const title = el("h3", { id: shot.id });
  const file = el("p", { class: "file" }, shot.name);
  if (error) title.append("No answer");
  else if (!result) title.append(el("span", { class: "waiting small" }, shot.waiting || "Looking …"));
  else if (result.unknown) title.append(el("span", { class: "badge" }, "unknown"), el("span", { class: "muted" }, byEvidence() ? "if known: " : "closest: "));
  if (result && !error) title.append(el("span", { class: "label" }, result.label));
  shot.head.replaceChildren(title, file);
  if (error) {
    const again = el("button", { class: "button small", type: "button", onclick: () => predict([shot]) }, "Try again");
    shot.answer.replaceChildren(el("p", { class: "problem" }, error.message), ...(error.status ? [] : [again]));
  } else shot.answer.replaceChildren(...(result ? [scores(result), tried(result), trust(result)].filter(Boolean) : []));
  fillFix(shot);
}

/** Bars show what decides: probabilities by evidence, which are calibrated, similarities by the paper's rule. */
const byEvidence = () => state.model.rule === "evidence";

function scores({ top }) {
  const kinds = [["Similarity", ({ similarity }) => similarity.toFixed(2)], ["Probability", ({ probability }) => percent(probability)]];
  if (byEvidence()) kinds.reverse();
  const rows = top.map((one, i) => {
    const share = 100 * Math.min(1, Math.max(0, byEvidence() ? one.probability : one.similarity));
    return el("tr", { class: i ? null : "first" },
      el("th", { scope: "row" }, named(one.label, one.task)),
      el("td", {}, el("span", { class: "track", "aria-hidden": "true" }, el("i", { "--share": `${share}%` }))),
      ...kinds.map(([, figure], j) => el("td", { class: j ? "number muted" : "number" }, figure(one))));
  });
  const heads = el("tr", {}, el("th", { scope: "col" }, "Class"), el("td"), ...kinds.map(([name]) => el("th", { scope: "col", class: "number" }, name)));
  return el("table", { class: "scores" }, el("thead", {}, heads), el("tbody", {}, ...rows));
}
function tried({ candidates, passes }) {
  const parts = [byEvidence() && plural(passes, "forward pass", "forward passes"), candidates.length && `tried: ${candidates.join(", ")}`];
  const text = parts.filter(Boolean).join(" · ");
  return text ? el("details", { class: "tried" }, el("summary", {}, "Details"), el("p", {}, text)) : null;
}

async function predict(shots) {
  for (const shot of shots) {
    shot.turn++;  // an answer to an earlier question is dropped
    shot.error = null;
    shot.waiting = "Looking …";
    fillCard(shot);
  }
  const turns = new Map(shots.map((shot) => [shot, shot.turn]));
  const wanted = (shot) => state.shots.includes(shot) && turns.get(shot) === shot.turn;
  for (const batch of batches(shots)) await predictBatch(batch, wanted);
  const mine = shots.filter(wanted);
  tellAnswers(mine);
  if (mine.some((shot) => shot.result && !state.classes.some(({ name }) => name === shot.result.label))) await refresh();
}

function tellAnswers(shots) {
  const answered = shots.filter((shot) => !shot.error), unknown = answered.filter((shot) => shot.result.unknown);
  const known = answered.filter((shot) => !shot.result.unknown).map((shot) => `${shot.name}: ${shot.result.label}`);
  const parts = [...known.slice(0, 5), known.length > 5 && `${known.length - 5} more`, unknown.length && `${unknown.length} unknown`,
    shots.length > answered.length && `${shots.length - answered.length} without an answer`];
  say(`${plural(shots.length, "picture")}. ${parts.filter(Boolean).join(", ")}.`);
}

function batches(shots) {
  const made = [];
  let size = Infinity;
  for (const shot of shots) {
    if (size + shot.file.size > BATCH_BYTES || made.at(-1).length === BATCH) { made.push([]); size = 0; }
    made.at(-1).push(shot);
    size += shot.file.size;
  }
  return made;
}

/** A batch is refused as a whole. Halving finds the pictures at fault, and the others get their answers. */
async function predictBatch(batch, wanted) {
  const shots = batch.filter(wanted);
  if (!shots.length) return;
  const tell = (text) => shots.filter(wanted).forEach((shot) => { shot.waiting = text; fillCard(shot); });
  try {
    const options = { method: "POST", body: form(shots.map((shot) => shot.file)) };
    const { predictions } = await ask(own(`predict?top=${TOP}`), options, (s) => tell(`Busy; asking again in ${plural(Math.ceil(s), "second")} …`));
    shots.forEach((shot, i) => settle(shot, predictions[i], null, wanted));
  } catch (error) {
    if (shots.length > 1 && [400, 413, 422].includes(error.status)) {
      const half = Math.ceil(shots.length / 2);
      await predictBatch(shots.slice(0, half), wanted);
      await predictBatch(shots.slice(half), wanted);
    } else shots.forEach((shot) => settle(shot, null, error, wanted));
  }
  drawMap();
}

function settle(shot, result, error, wanted) {
  if (!wanted(shot)) return;
  Object.assign(shot, { result, error, waiting: null });
  fillCard(shot);
}
