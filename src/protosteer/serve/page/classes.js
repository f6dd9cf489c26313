// The list of classes, and deleting one.
"use strict";
const SHOWN_ROWS = 200;  // drawn before someone filters
const WELL_CHECKED = 8, WELL_RECOGNISED = 0.8;  // pictures, and share of them, from which a class knows enough

function classRow(one) {
  const ask = (event) => askDelete(one, event.target);
  const remove = el("button", { class: "plain word", type: "button", "aria-label": `Delete ${one.name}`, onclick: ask }, "Delete");
  const about = `${called(one.task)} · ${plural(one.images, "image")}`, [checked, enough] = enoughOf(one);
  const show = (event) => showThumbnails(one, event.target);
  const pictures = el("button", { class: "plain word", type: "button", "aria-label": `Pictures of ${one.name}`, onclick: show }, "Pictures");
  return el("li", { class: one.name === state.fresh ? "new" : null }, glyph(one.task),
    el("span", { class: "what" }, el("span", {}, one.name), el("small", {}, about), checked && el("small", { class: enough ? null : "short" }, checked)), one.thumbnails ? pictures : null, state.model.teaching ? remove : null);
}

/** How many of a class's pictures are recognised, by leave-one-out; and whether that is enough. */
function enoughOf({ checked, right, confused_with: other }) {
  if (!checked) return [null, true];
  const enough = checked >= WELL_CHECKED && right >= WELL_RECOGNISED * checked;
  const said = `${right} of ${checked} recognised${other === null ? "" : `, else “${other}”`}`;
  return [enough ? said : `${said}; more pictures would help`, enough];
}

function drawClasses() {
  const filter = $("filter").value.trim().toLowerCase();
  const found = state.classes.filter(({ name, task }) => `${name}\n${task}`.toLowerCase().includes(filter));
  const rows = found.slice(0, SHOWN_ROWS).map(classRow), note = (text) => rows.push(el("li", { class: "muted small" }, text));
  if (found.length > SHOWN_ROWS) note(`and ${found.length - SHOWN_ROWS} more; type in the filter to see them`);
  if (!found.length) note("No class has this in its name.");
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
    fillDialog(`“${name}”`, [`${jpegs.length} of the ${plural(images, "picture")} that it was learned from, stored beside the model.`, "small muted"]);
    const shown = jpegs.map((jpeg, i) => el("li", {}, el("img", { class: "thumb", alt: `Picture ${i + 1}`, src: `data:image/jpeg;base64,${jpeg}` })));
    $("dialog-text").append(el("ul", { class: "examples" }, ...shown));
  } catch (error) {
    fillDialog(`“${name}”`, [error.message, "problem"]);
  }
}

function askDelete({ name, task }, opener) {
  const dialog = $("dialog"), close = $("dialog-close"), remove = $("dialog-delete");
  fillDialog(`Delete “${name}”?`, ["What was learned of it is removed from the model file, and it is not recognised any more. This cannot be undone."], [`Learned with ${called(task)}.`, "small muted"]);
  close.textContent = "Cancel";
  remove.hidden = remove.disabled = false;
  close.onclick = () => dialog.close();
  dialog.onclose = () => (opener.isConnected ? opener : $("classes-title")).focus();
  remove.onclick = async () => {
    if (!(await needToken())) return;
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
      fillDialog(`“${name}” is not deleted`, [error.message, "problem"], ...(error.status === 401 ? [["Try again to enter another."]] : []));
      if (error.status === 401) keepToken("");
      remove.disabled = false;
    }
  };
  dialog.showModal();
  close.focus();
}
