// How far the shown probability can be trusted, by leave-one-out over the learned pictures.
"use strict";
const FEW = 10;  // fewer pictures say nothing about a share

/** The bin of an answer: learned pictures with about the same probability. */
function binOf({ probability }) {
  const { bins } = state.model.reliability;
  return bins[Math.min(bins.length - 1, Math.floor(probability * bins.length))];
}
const rightIn = ({ images, accuracy }) => Math.round((images * accuracy) / 100);

/** One line under an answer. An unknown picture shows none of the classes, so that its probability says nothing. */
function trust(result) {
  if (!state.model.reliability || result.unknown) return null;
  const bin = binOf(result), count = bin.images ? `only ${plural(bin.images, "learned picture")}` : "no learned picture";
  const text = bin.images < FEW ? `Too few to check: ${count} had such a probability`
    : `Such a probability was right for ${rightIn(bin)} of ${plural(bin.images, "learned picture")}`;
  return el("p", { class: "trust" }, text);
}

function drawReliability() {
  const { reliability } = state.model;
  $("reliability").hidden = !reliability;
  if (!reliability) return;
  const { images, bins, calibration_error: error } = reliability, right = bins.reduce((sum, bin) => sum + (bin.images ? rightIn(bin) : 0), 0);
  $("reliability-words").replaceChildren(el("b", {}, "Checked"),
    ` with ${plural(images, "learned picture")}, each predicted as if it had not been learned: ${right} of the answers were right, and probabilities are off by ${error.toFixed(1)} % on average. New pictures may differ more from these than they do from each other.`);
  $("reliability-plot").replaceChildren(diagram(bins, images));
}

/** Accuracy against probability, a dot per bin, larger where more pictures are; on the diagonal both are the same. */
function diagram(bins, images) {
  const side = 150, x0 = 40, y0 = 8, place = (p, a) => [x0 + (side * p) / 100, y0 + side - (side * a) / 100];
  const line = (kind, [x1, y1], [x2, y2]) => svg("line", { class: kind, x1, y1, x2, y2 });
  const words = (text, x, y, anchor) => svg("text", { x, y, "text-anchor": anchor }, text);
  const grid = [0, 50, 100].flatMap((v) => [line("grid", place(v, 0), place(v, 100)), line("grid", place(0, v), place(100, v)),
    words(`${v} %`, place(v, 0)[0], y0 + side + 15, "middle"), words(`${v} %`, x0 - 6, place(0, v)[1] + 4, "end")]);
  const dots = bins.filter((bin) => bin.images).map((bin) => {
    const [cx, cy] = place(bin.confidence, bin.accuracy);
    const said = `${plural(bin.images, "picture")} with about ${bin.confidence.toFixed(0)} %: ${bin.accuracy.toFixed(0)} % right`;
    return svg("circle", { cx, cy, r: (2.5 + 6 * Math.sqrt(bin.images / images)).toFixed(1) }, svg("title", {}, said));
  });
  const said = `Of answers with each probability, how many were right; ${plural(dots.length, "dot")}`;
  return svg("svg", { class: "diagram", viewBox: `0 0 ${x0 + side + 24} ${y0 + side + 36}`, role: "img", "aria-label": said },
    ...grid, line("ideal", place(0, 0), place(100, 100)), ...dots, words("probability →  right ↑", x0 + side / 2, y0 + side + 32, "middle"));
}
