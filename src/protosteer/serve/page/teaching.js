// Adding a class from examples.
"use strict";
function addExamples(files) {
  for (const file of files) {
    const example = { file }, name = file.name || "pasted picture", image = el("img", { class: "thumb", alt: name, title: name, src: NOTHING });
    example.item = el("li", {}, image, el("button", { type: "button", "aria-label": `Remove ${name}`, onclick: () => removeExample(example) }, "×"));
    state.examples.push(example);
    $("examples").append(example.item);
    thumbnail(file).then((url) => {
      if (!url) return;
      image.src = url;
      image.decode().catch(() => {}).finally(() => URL.revokeObjectURL(url));
    });
  }
  answer(`${plural(state.examples.length, "picture")} chosen.`, "muted");
}

function removeExample(example) {
  state.examples = state.examples.filter((other) => other !== example);
  example.item.remove();
  $("choose-examples").focus();
  answer(`${plural(state.examples.length, "picture")} chosen.`, "muted");
}

function answer(text, kind) {
  $("teach-answer").textContent = text;
  $("teach-answer").className = `small ${kind}`;
}

/** What is missing, and the control where it can be put right. */
function missing(name) {
  if (!name) return ["Give the class a name.", "class-name"];
  if (/^\.+$/.test(name)) return ["A name needs more than dots.", "class-name"];
  if (!state.examples.length) return ["Choose some pictures of it; five are a good start.", "choose-examples"];
  return null;
}

async function teach(event, chosen) {
  event.preventDefault();
  const name = chosen ?? $("class-name").value.trim(), gap = missing(name), near = chosen ? null : similar(name);
  if (gap) {
    answer(gap[0], "problem");
    $(gap[1]).focus();
    return;
  }
  if (near) return askName($("teach-answer"), name, near, (meant) => teach(event, meant));
  if (!(await needToken())) return;
  $("teach-button").disabled = true;
  answer("Learning …", "muted");
  try {
    const options = { method: "POST", headers: bearer(), body: form(state.examples.map((example) => example.file)) };
    const busy = () => answer("The service is busy; asking again …", "muted");
    const learned = await ask(`${classPath(name)}?train=${$("train").checked}`, options, busy);
    state.examples = [];
    state.fresh = name;
    $("examples").replaceChildren();
    $("class-name").value = "";
    await changed();
    answer(`“${name}” was learned from ${plural(learned.images, "picture")} and is recognised from now on.`, "good");
    if (learned.job) follow(learned.job, name);
  } catch (error) {
    answer(error.message, "problem");
    if (error.status === 401) $("token").focus();
  }
  $("teach-button").disabled = false;
}

async function follow(job, name) {
  const route = own(`jobs/${encodeURIComponent(job)}`);  // of this model, whichever is shown by then
  const words = el("span", { role: "status" }, `Training for “${name}” …`);
  const bar = el("progress", { "aria-label": `Training for ${name}` }), rest = el("small", { class: "muted" });
  const item = el("li", {}, words, bar, rest);
  $("jobs").prepend(item);
  for (;;) {
    // a service that does not answer may come back; a job that it does not know will not
    const now = await ask(route).catch((error) => (error.status ? { state: "failed", message: error.message } : {}));
    if (now.total) Object.assign(bar, { max: now.total, value: now.done });
    rest.textContent = now.seconds_left == null ? "" : `about ${left(now.seconds_left)} left`;
    if (now.state === "done" || now.state === "failed") {
      const done = now.state === "done";
      item.replaceChildren(words);
      words.className = done ? "good" : "problem";
      words.textContent = done ? `Training for “${name}” is done.` : `Training for “${name}” failed: ${now.message}`;
      return done ? changed() : null;
    }
    await sleep(1);
  }
}
const left = (seconds) => (seconds < 90 ? plural(Math.ceil(seconds), "second") : plural(Math.round(seconds / 60), "minute"));
