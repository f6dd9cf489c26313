// "No, it is …": one picture told what it is; the log of such corrections, and taking one back.
"use strict";
const OFFERED = 500;  // names of classes that are offered while one is typed

/** Stands under an answer, and keeps what is being typed while answers come and go. */
function makeFix(shot) {
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
    el("span", { class: "muted" }, "No, it is"), second, other, typed);
  shot.fix = { node: el("div", { class: "fix", hidden: true }, row, words), second, name, typed, other, words };
}

function fillFix(shot) {
  const { node, second, words } = shot.fix, { result, error } = shot, made = correctionOf(shot);
  node.hidden = !state.model.teaching || !result || Boolean(error);
  if (node.hidden) return;
  const likely = result.unknown ? result.top[0] : result.top[1];  // one that is called unknown may be what it is closest to
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

async function correct(shot, name) {
  const { fix } = shot;
  if (!$("token").value.trim()) {
    tellFix(shot, "Enter the token under “Teach a class” first.", "problem");
    return $("token").focus();
  }
  if (!name) {
    tellFix(shot, "Say what it is.", "problem");
    return fix.name.focus();
  }
  tellFix(shot, "Correcting …", "muted");
  try {
    const options = { method: "POST", headers: bearer(), body: form([shot.file]) };
    const busy = () => tellFix(shot, "The service is busy; asking again …", "muted");
    const told = await ask(own(`corrections?class=${encodeURIComponent(name)}`), options, busy);
    shot.correction = told.correction;
    if (told.new_class) state.fresh = name;
    fix.name.value = "";
    fix.typed.hidden = true;
    fix.other.setAttribute("aria-expanded", "false");
    await changed();
  } catch (error) {
    tellFix(shot, error.message, "problem");
    if (error.status === 401) $("token").focus();
  }
}

async function undo({ correction }, tell) {
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
      el("small", {}, `${made.date ?? ""} · taken for ${made.taken_for}, is ${made.class}`)), back);
  });
  if ($("log").contains(document.activeElement)) $("corrections-title").focus();
  $("log").replaceChildren(...rows);
  $("log-answer").textContent = "";
  $("corrections").hidden = !rows.length;
  $("class-names").replaceChildren(...state.classes.slice(0, OFFERED).map(({ name }) => el("option", { value: name })));
}
