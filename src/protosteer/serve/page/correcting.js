// "No, it is …": correct one picture; the log of corrections, and how to undo one.
"use strict";
const OFFERED = 500;  // names of classes that are offered while one is typed

/** Stands under an answer, and keeps what is being typed while answers come and go. */
function makeFix(shot) {
  const yes = el("button", { class: "button small", type: "button", onclick: () => confirmRight(shot) }, "Yes, right");
  const second = el("button", { class: "button small", type: "button", onclick: () => correct(shot, second.value) });
  const name = el("input", { type: "text", list: "class-names", maxlength: 200, autocomplete: "off", placeholder: "known or new class", "aria-label": `What is on ${shot.name}` });
  const typed = el("span", { class: "typed", hidden: true }, name, el("button", { class: "button small", type: "submit" }, "Correct"));
  const other = el("button", { class: "button small", type: "button", "aria-expanded": "false" }, "another …");
  other.addEventListener("click", () => {
    typed.hidden = !typed.hidden;
    other.setAttribute("aria-expanded", String(!typed.hidden));
    if (!typed.hidden) name.focus();
  });
  const send = (event) => { event.preventDefault(); correct(shot, name.value.trim()); };
  const words = el("p", { class: "small", role: "status" });
  const row = el("form", { class: "no-it-is", novalidate: true, "aria-label": `Correct the answer to ${shot.name}`, onsubmit: send },
    yes, el("span", { class: "muted" }, "No, it is"), second, other, typed);
  shot.fix = { node: el("div", { class: "fix", hidden: true }, row, words), yes, second, name, typed, other, words };
}

function fillFix(shot) {
  const { node, yes, second, words } = shot.fix, { result, error } = shot, made = correctionOf(shot);
  shot.pick.hidden = !state.model.teaching;
  node.hidden = !state.model.teaching || !result || Boolean(error);
  if (node.hidden) return;
  const likely = result.unknown ? result.top[0] : result.top[1];  // one that is called unknown may be what it is closest to
  yes.hidden = result.unknown || Boolean(made);
  second.hidden = !likely;
  second.value = second.textContent = likely?.label ?? "";
  if (!made) return;
  const taken = made.class === made.taken_for ? `Told: it is “${made.class}”.` : `Told: not “${made.taken_for}” but “${made.class}”.`;
  const heavier = result.label === made.class ? "" : " One picture does not outweigh the others yet; correct more that are like it.";
  const back = el("button", { class: "plain word", type: "button", onclick: () => undo(made, (text) => tellFix(shot, text, "problem")) }, "Undo");
  words.className = "small good";
  words.replaceChildren(taken + heavier, " ", back);
}
const correctionOf = (shot) => state.corrections.find(({ correction }) => correction === shot.correction);

function tellFix({ fix: { words } }, text, kind) {
  words.className = `small ${kind}`;
  words.textContent = text;
}

/** A class that a name differs from by case, signs or one letter: probably what was meant. */
function similar(name) {
  const shapes = (text) => {
    const plain = [...text.toLowerCase()].filter((c) => /[\p{L}\p{N}]/u.test(c));
    const cut = plain.length < 5 ? [] : plain.flatMap((c, i) => (/\p{N}/u.test(c) ? [] : [plain.toSpliced(i, 1).join("")]));
    return [plain.join(""), ...cut].filter(Boolean);
  };
  const mine = new Set(shapes(name));
  if (state.classes.some((one) => one.name === name)) return null;
  return state.classes.find((one) => shapes(one.name).some((shape) => mine.has(shape)))?.name ?? null;
}

/** Ask in a line of text which of two names is meant, and go on with it. */
function askName(words, name, near, go) {
  const choice = (text, chosen) => el("button", { class: "button small", type: "button", onclick: () => go(chosen) }, text);
  words.className = "small problem";
  words.replaceChildren(`“${name}” would be a new class. `, choice(`It is “${near}”`, near), " ", choice("It is new", name));
}

async function sendCorrection(shot, name, busy) {
  const options = { method: "POST", headers: bearer(), body: form([shot.file]) };
  const told = await ask(own(`corrections?class=${encodeURIComponent(name)}`), options, busy);
  shot.correction = told.correction;
  if (told.new_class) state.fresh = name;
}

const picked = () => state.shots.filter((shot) => shot.pick.checked && shot.result);

/** After a review: all pictures in sight that were neither corrected nor confirmed, so that one click confirms them. */
function selectRest() {
  for (const shot of shownShots()) shot.pick.checked = Boolean(shot.result) && !shot.correction;
  drawBulk();
}

function drawBulk() {
  const { length } = picked();
  $("bulk").hidden = !length || !state.model.teaching;
  $("bulk-count").textContent = length === 1 ? "1 selected picture is" : `All ${length} selected pictures are`;
}

function tellBulk(text, kind) {
  $("bulk-answer").className = `small ${kind}`;
  $("bulk-answer").textContent = text;
}

async function correctAll(event, chosen) {
  event.preventDefault();
  const name = chosen ?? $("bulk-name").value.trim(), near = chosen ? null : similar(name), shots = picked();
  if (!name) {
    tellBulk("Say what they are.", "problem");
    return $("bulk-name").focus();
  }
  if (near) return askName($("bulk-answer"), name, near, (meant) => correctAll(event, meant));
  await inBulk(shots.map((shot) => [shot]), "corrected", ([shot], busy) => sendCorrection(shot, name, busy));
}

/** The answers to all selected pictures are right, but for those that are called unknown, or were corrected. */
const confirmAll = () => inBulk(batches(picked().filter((shot) => !shot.result.unknown && !correctionOf(shot))), "confirmed", sendRight);

async function inBulk(parts, done, send) {
  if (!(await needToken())) return;
  const all = parts.flat();
  try {
    for (const [i, part] of parts.entries()) {
      tellBulk(`${i + 1} of ${parts.length} …`, "muted");
      await send(part, () => tellBulk("The service is busy; asking again …", "muted"));
      for (const shot of part) shot.pick.checked = false;
    }
    $("bulk-name").value = "";
    tellBulk(all.length ? "" : "All of these are called unknown, or corrected: say what they are.", all.length ? "muted" : "problem");
    say(`${plural(all.length, "picture")} ${done}.`);
  } catch (error) {
    tellBulk(error.message, "problem");
    if (error.status === 401) keepToken("");
  }
  drawBulk();
  await changed();
}

/** Confirmed answers are learned, and tell the model how often it is right. */
async function sendRight(shots, busy) {
  const options = { method: "POST", headers: bearer(), body: form(shots.map((shot) => shot.file)) };
  const { corrections } = await ask(own("confirmations"), options, busy);
  if (corrections.length < shots.length) return;  // some were corrected before: which ones is not said
  shots.forEach((shot, i) => { shot.correction = corrections[i].correction; });
}

async function confirmRight(shot) {
  if (!(await needToken())) return;
  tellFix(shot, "Noting …", "muted");
  await settleFix(shot, sendRight([shot], () => tellFix(shot, "The service is busy; asking again …", "muted")));
}

async function settleFix(shot, sent) {
  try {
    await sent;
    shot.fix.name.value = "";
    shot.fix.typed.hidden = true;
    shot.fix.other.setAttribute("aria-expanded", "false");
    await changed();
  } catch (error) {
    tellFix(shot, error.message, "problem");
    if (error.status === 401) keepToken("");
  }
}

async function correct(shot, name, sure = false) {
  const { fix } = shot;
  if (!name) {
    tellFix(shot, "Say what it is.", "problem");
    return fix.name.focus();
  }
  const near = sure ? null : similar(name);
  if (near) return askName(fix.words, name, near, (chosen) => correct(shot, chosen, true));
  if (!(await needToken())) return;
  tellFix(shot, "Correcting …", "muted");
  await settleFix(shot, sendCorrection(shot, name, () => tellFix(shot, "The service is busy; asking again …", "muted")));
}

async function undo({ correction }, tell) {
  if (!(await needToken())) return;
  try {
    await ask(own(`corrections/${encodeURIComponent(correction)}`), { method: "DELETE", headers: bearer() });
    for (const shot of state.shots.filter((shot) => shot.correction === correction)) tellFix(shot, "Taken back.", "muted");
    await changed();
    say("The correction is taken back.");
  } catch (error) {
    tell(error.message);
  }
}

/** The log names files, and needs the token for that; who has none sees none. */
async function listCorrections({ teaching }) {
  if (!teaching || !$("token").value.trim()) return [];
  return ask(own("corrections"), { headers: bearer() }).then(({ corrections }) => corrections, () => []);
}

function drawCorrections() {
  const rows = state.corrections.toReversed().map((made) => {
    const tell = (text) => { $("log-answer").textContent = text; };
    const back = el("button", { class: "plain word", type: "button", "aria-label": `Undo ${made.image ?? "correction"}`, onclick: () => undo(made, tell) }, "Undo");
    return el("li", {}, el("span", { class: "what" }, el("span", { title: made.image }, made.image ?? "a picture"),
      el("small", {}, `${made.date ?? ""} · ${made.confirmed ? `confirmed: ${made.class}` : `taken for ${made.taken_for}, is ${made.class}`}`)), back);
  });
  if ($("log").contains(document.activeElement)) $("corrections-title").focus();
  $("log").replaceChildren(...rows);
  $("log-answer").textContent = "";
  $("corrections").hidden = !rows.length;
  $("class-names").replaceChildren(...state.classes.slice(0, OFFERED).map(({ name }) => el("option", { value: name })));
}
