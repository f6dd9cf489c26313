// The map of the classes, with the pictures on it.
"use strict";
const LABELLED = 40;      // classes up to which the map tries to show every name
const SHOWN_DOTS = 2000;  // classes on the map, about; more are a blot that takes seconds to draw

let spots = new Map();  // id of a point -> where it is, in pixels, and what
let here = null;        // the one point that Tab reaches; arrow keys go on from there
let over = null;        // the layer on top, for what is highlighted

function scaleFor(points, width, height, margin) {
  const side = (axis) => points.reduce(([low, high], p) => [Math.min(low, p[axis]), Math.max(high, p[axis])], [Infinity, -Infinity]);
  const [left, right] = side(0), [low, high] = side(1);
  const zoom = Math.min((width - 2 * margin) / Math.max(right - left, 0.5), (height - 2 * margin) / Math.max(high - low, 0.5));
  return ([x, y]) => [width / 2 + zoom * (x - (left + right) / 2), height / 2 - zoom * (y - (low + high) / 2)];
}

let planned = false;
function drawMap() {
  if (!planned) requestAnimationFrame(drawNow);  // however many pictures arrive, once per frame
  planned = true;
}

/** All classes, or some of very many, evenly spread, and those that were just added or predicted. */
function mapped() {
  const { classes } = state.map, step = classes.length / SHOWN_DOTS;
  if (step <= 1) return classes;
  const wanted = new Set([state.fresh, ...state.shots.map((shot) => shot.result?.label)]);
  return classes.filter(({ name }, i) => Math.floor(i / step) !== Math.floor((i - 1) / step) || wanted.has(name));
}

function drawNow() {
  planned = false;
  const plot = $("plot"), width = plot.clientWidth, height = Math.round(Math.min(440, Math.max(260, width * 0.8)));
  if (!width || !state.map.classes.length) return;
  const focused = plot.contains(document.activeElement);
  const shots = state.shots.filter((shot) => shot.result && !shot.error).slice(0, 200).reverse();
  const classes = mapped();
  const scale = scaleFor([...classes.map(({ x, y }) => [x, y]), ...shots.map((shot) => shot.result.position)], width, height, 36);
  spots = new Map();
  for (const { name, task, x, y } of classes) addDot(name, task, ...scale([x, y]));
  for (const shot of shots) addPicture(shot, shots.length > 40 ? 8 : 16, ...scale(shot.result.position));
  const points = [...spots.values()];
  over = svg("g", { class: "over", "aria-hidden": "true" });
  const events = { onpointermove: hover, onpointerdown: hover, onpointerleave: () => highlight(null), onclick: press, onkeydown: walk };
  plot.replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "presentation", ...events },
    ...points.filter((spot) => !spot.shot).map((spot) => spot.node),
    svg("g", { "aria-hidden": "true" }, ...labels(points, width, height)),
    ...points.filter((spot) => spot.shot).map((spot) => spot.node), over));
  if (!spots.has(here)) here = points[0].id;
  spots.get(here).node.setAttribute("tabindex", 0);
  if (focused) spots.get(here).node.focus({ preventScroll: true });
  drawLegend(shots, classes.length);
  if ($("map-table").open) drawTable();
}

function addSpot(id, kind, said, x, y, more, ...children) {
  const events = { onfocus: () => highlight(id), onblur: () => highlight(null) };
  const place = { class: kind, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` };
  const node = svg("g", { ...place, role: "img", "aria-label": said, tabindex: -1, ...events }, ...children);
  spots.set(id, { id, x, y, node, ...more });
}

function addDot(name, task, x, y) {
  const { colour, shape } = look(task);
  addSpot(`class:${name}`, "dot", `${name}, ${called(task)}`, x, y, { name, radius: 6 }, svg("path", { d: shape, fill: colour }));
}

function addPicture(shot, radius, x, y) {
  const { result, thumb } = shot, said = `picture ${shot.name}: ${result.unknown ? "unknown, closest " : ""}${result.label}`;
  const inner = radius - 3, place = { x: -inner, y: -inner, width: 2 * inner, height: 2 * inner };
  addSpot(shot.id, result.unknown ? "shot unknown" : "shot", said, x, y, { shot, radius, target: `class:${result.label}` },
    svg("circle", { class: "ring", r: radius }), thumb && svg("image", { href: thumb, ...place, "clip-path": `circle(${inner}px)` }));
}

/** Each name goes to the first of eight places around its dot that is free; where none is, it shows on request. */
function labels(points, width, height) {
  const pen = el("canvas").getContext("2d");
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const answers = new Set(points.map((spot) => spot.target));
  const classes = points.filter((spot) => !spot.shot).sort((a, b) => answers.has(b.id) - answers.has(a.id));
  const taken = points.map(({ x, y, radius: r }) => [x - r, y - r, x + r, y + r]);
  const free = ([left, top, right, bottom]) => left > 2 && top > 2 && right < width - 2 && bottom < height - 2
    && !taken.some((box) => left < box[2] && box[0] < right && top < box[3] && box[1] < bottom);
  const made = [];
  for (const { id, x, y, name } of classes.filter((spot) => classes.length <= LABELLED || answers.has(spot.id))) {
    const w = pen.measureText(name).width;
    const places = [[12, 4], [-12 - w, 4], [-w / 2, -13], [-w / 2, 22], [9, -8], [-9 - w, -8], [9, 16], [-9 - w, 16]];
    const box = ([dx, dy]) => [x + dx - 1, y + dy - 10, x + dx + w + 1, y + dy + 3];
    const found = places.find((place) => free(box(place)));
    if (!found) continue;
    taken.push(box(found));
    made.push(svg("text", { x: x + found[0], y: y + found[1], "data-of": id }, name));
  }
  return made;
}

function highlight(id) {
  const spot = spots.get(id), lit = [spots.get(spot?.target), spot].filter(Boolean);
  over?.replaceChildren(...(lit.length === 2 ? [svg("line", { class: "tie", x1: lit[0].x, y1: lit[0].y, x2: spot.x, y2: spot.y })] : []),
    ...lit.flatMap((one) => [one.shot ? raised(one) : tag(one), svg("circle", { cx: one.x, cy: one.y, r: one.radius + (one.shot ? 2 : 5) })]));
  const linked = (shot) => shot.id === id || (shot.result != null && `class:${shot.result.label}` === id);
  for (const shot of state.shots) shot.card.classList.toggle("linked", linked(shot));
}

/** A picture may lie under another. */
function raised({ node }) {
  const copy = node.cloneNode(true);
  copy.removeAttribute("tabindex");
  return copy;
}

function tag({ id, x, y, name }) {
  const drawn = [...$("plot").querySelectorAll("text[data-of]")].find((text) => text.dataset.of === id);
  if (drawn) return svg("text", { x: drawn.getAttribute("x"), y: drawn.getAttribute("y") }, name);
  const left = x > $("plot").clientWidth / 2;
  return svg("text", { x: x + (left ? -15 : 15), y: y + 4, "text-anchor": left ? "end" : "start" }, name);
}

function nearest(event) {
  const box = $("plot").getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  const far = (spot) => Math.hypot(spot.x - x, spot.y - y) - spot.radius;
  const found = [...spots.values()].reduce((best, spot) => (far(spot) < far(best) ? spot : best));
  return far(found) < 12 ? found : null;
}
const hover = (event) => highlight(nearest(event)?.id ?? null);
function press(event) {
  const spot = nearest(event);
  if (spot?.shot) openCard(spot.shot);
}

function openCard(shot) {
  if (!shot.card.isConnected) { state.all = true; showCards(); }
  shot.card.scrollIntoView({ block: "nearest" });
  shot.card.querySelector(".cross").focus({ preventScroll: true });
}

function walk(event) {
  const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key], from = spots.get(here);
  if (event.key === "Enter" && from.shot) openCard(from.shot);
  if (!way) return;
  event.preventDefault();
  const cost = (spot) => {
    const dx = spot.x - from.x, dy = spot.y - from.y, along = dx * way[0] + dy * way[1];
    return along > 0.5 ? along + 2 * Math.abs(dx * way[1] + dy * way[0]) : Infinity;
  };
  const next = [...spots.values()].reduce((best, spot) => (cost(spot) < cost(best) ? spot : best), from);
  if (next === from) return;
  from.node.setAttribute("tabindex", -1);
  here = next.id;
  next.node.setAttribute("tabindex", 0);
  next.node.focus({ preventScroll: true });
}

function drawLegend(shots, shown) {
  const items = [...new Set(state.map.classes.map(({ task }) => called(task)))].map((task) => el("li", {}, glyph(task), el("span", { title: task }, task)));
  const ring = (kind) => icon(svg("g", { class: kind }, svg("circle", { class: "ring", r: 5.5 })));
  if (shots.length) items.push(el("li", {}, ring("shot"), el("span", {}, "your picture")));
  if (shots.some((shot) => shot.result.unknown)) items.push(el("li", {}, ring("shot unknown"), el("span", {}, "unknown picture")));
  $("legend").replaceChildren(...items);
  if ($("legend").scrollHeight > $("legend").clientHeight) $("legend").setAttribute("tabindex", 0);
  else $("legend").removeAttribute("tabindex");
  const all = plural(state.map.classes.length, "class", "classes"), some = shown < state.map.classes.length;
  $("map-about").textContent = `${some ? `${shown.toLocaleString("en")} of ` : ""}${all} · similar ones lie close`;
}

function closest(x, y, self) {
  let best = "none", least = Infinity;
  for (const one of state.map.classes) {
    const far = Math.hypot(one.x - x, one.y - y);
    if (one !== self && far < least) [best, least] = [one.name, far];
  }
  return best;
}

function drawTable() {
  const cell = (text) => el("td", {}, text), point = (x, y) => `${x.toFixed(2)}, ${y.toFixed(2)}`;
  const row = (what, group, near, x, y) => el("tr", {}, el("th", { scope: "row" }, what), cell(group), cell(near), cell(point(x, y)));
  const shown = state.shots.filter((shot) => shot.result && !shot.error);
  const pictures = shown.map(({ name, result: { label, unknown, position: [x, y] } }) =>
    row(`picture ${name}`, unknown ? `unknown, closest ${label}` : `answer ${label}`, closest(x, y), x, y));
  const classes = mapped().map((one) => row(one.name, called(one.task), closest(one.x, one.y, one), one.x, one.y));
  const heads = ["Class or picture", "Task or answer", "Closest class on the map", "Position"].map((text) => el("th", { scope: "col" }, text));
  const table = el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...pictures, ...classes));
  $("map-table").querySelector(".listing").replaceChildren(table);
}
