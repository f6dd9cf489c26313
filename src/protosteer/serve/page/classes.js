// The list of classes, and deleting one.
"use strict";
const SHOWN_ROWS = 200;  // drawn before someone filters

function classRow(one) {
  const ask = (event) => askDelete(one, event.target);
  const remove = el("button", { class: "plain word", type: "button", "aria-label": `Delete ${one.name}`, onclick: ask }, "Delete");
  const about = `${called(one.task)} · ${plural(one.images, "image")} · ${plural(one.centroids, "prototype")}`;
  const show = (event) => showThumbnails(one, event.target);
  const pictures = el("button", { class: "plain word", type: "button", "aria-label": `Pictures of ${one.name}`, onclick: show }, "Pictures");
  return el("li", { class: one.name === state.fresh ? "new" : null }, glyph(one.task),
    el("span", { class: "what" }, el("span", { title: one.name }, one.name), el("small", {}, about)), one.thumbnails ? pictures : null, state.model.teaching ? remove : null);
}

function drawClasses() {
  const filter = $("filter").value.trim().toLowerCase();
  const found = state.classes.filter(({ name, task }) => `${name}\n${task}`.toLowerCase().includes(filter));
  const rows = found.slice(0, SHOWN_ROWS).map(classRow), note = (text) => rows.push(el("li", { class: "muted small" }, text));
  if (found.length > SHOWN_ROWS) note(`and ${found.length - SHOWN_ROWS} more; type in the filter to see them`);
  if (!found.length) note("No class or task has this in its name.");
  $("rows").replaceChildren(...rows);
  const fresh = $("rows").querySelector(".new");
  if (fresh) $("rows").scrollTop = fresh.offsetTop - $("rows").offsetTop - $("rows").clientHeight / 2;
  const all = plural(state.classes.length, "class", "classes");
  $("class-count").textContent = filter ? `${found.length} of ${all}` : all;
}

function fillDialog(title, ...lines) {
  $("dialog-title").textContent = title;
  $("dialog-text").replaceChildren(...lines.map(([text, kind]) => el("p", { class: kind }, text)));
}

/** Images that the class is known by, small, where they were kept. */
async function showThumbnails({ name, images }, opener) {
  const dialog = $("dialog"), close = $("dialog-close");
  fillDialog(`“${name}”`, ["Looking …", "muted"]);
  $("dialog-delete").hidden = true;
  close.textContent = "Close";
  close.onclick = () => dialog.close();
  dialog.onclose = () => (opener.isConnected ? opener : $("classes-title")).focus();
  dialog.showModal();
  close.focus();
  try {
    const { jpegs } = await ask(own(`thumbnails/${encodeURIComponent(name)}`));
    fillDialog(`“${name}”`, [`${jpegs.length} of the ${plural(images, "picture")} that it was taught, kept beside the model.`, "small muted"]);
    const shown = jpegs.map((jpeg, i) => el("li", {}, el("img", { class: "thumb", alt: `Prototype ${i + 1}`, src: `data:image/jpeg;base64,${jpeg}` })));
    $("dialog-text").append(el("ul", { class: "examples" }, ...shown));
  } catch (error) {
    fillDialog(`“${name}”`, [error.message, "problem"]);
  }
}

function askDelete({ name, task }, opener) {
  const dialog = $("dialog"), close = $("dialog-close"), remove = $("dialog-delete");
  fillDialog(`Delete “${name}”?`, ["Its prototypes are removed from the model file, and it is not recognised any more. This cannot be undone."], [`Task: ${called(task)}`, "small muted"]);
  close.textContent = "Cancel";
  remove.hidden = remove.disabled = false;
  close.onclick = () => dialog.close();
  dialog.onclose = () => (opener.isConnected ? opener : $("classes-title")).focus();
  remove.onclick = async () => {
    remove.disabled = true;
    try {
      const gone = await ask(classPath(name), { method: "DELETE", headers: bearer() });
      const worth = gone.guarantee.charAt(0).toUpperCase() + gone.guarantee.slice(1);
      fillDialog(`“${name}” is deleted`, [sentence(worth)], [`${bytes(gone.bytes)} removed from the model.`, "small muted"]);
      remove.hidden = true;
      close.textContent = "Close";
      close.focus();
      await changed();
    } catch (error) {
      fillDialog(`“${name}” is not deleted`, [error.message, "problem"], ...(error.status === 401 ? [["Enter it under “Teach a class”."]] : []));
      remove.disabled = false;
    }
  };
  dialog.showModal();
  close.focus();
}
