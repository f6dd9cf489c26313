// The model: a network that embeds images, and the arrays with which `protosteer predict` scores embeddings.
const TYPES = { f4: Float32Array, f8: Float64Array, i4: Int32Array, u1: Uint8Array };
const REJECT = "0.05"; // images less similar than all but this fraction of known ones are unknown; see model.json

export async function loadModel() {
  const [about, bytes, network] = await Promise.all([
    get("model.json").then((answer) => answer.json()),
    get("arrays.bin").then((answer) => answer.arrayBuffer()),
    get("embedding.onnx").then((answer) => answer.arrayBuffer()),
  ]);
  const arrays = {};
  for (const [name, { type, shape, offset }] of Object.entries(about.arrays)) {
    const length = shape.reduce((a, b) => a * b, 1);
    arrays[name] = Object.assign(new TYPES[type](bytes, offset, length), { shape });
  }
  const { ort, session, device } = await start(network, about.runtime);
  return new Model(about, arrays, ort, session, device);
}

async function get(file) {
  const answer = await fetch(file);
  if (!answer.ok) throw new Error(`${file} cannot be loaded (HTTP ${answer.status})`);
  return answer;
}

/** Run on the graphics processor if the browser offers one and the network runs there, else by WebAssembly. */
async function start(network, runtime) {
  const base = new URL(runtime, location.href).href;
  const open = async (device) => {
    const ort = await import(`${base}ort.${device}.bundle.min.mjs`);
    ort.env.logLevel = "error";
    if (!globalThis.crossOriginIsolated) ort.env.wasm.numThreads = 1;
    return { ort, device, session: await ort.InferenceSession.create(network, { executionProviders: [device] }) };
  };
  try {
    if (!(await navigator.gpu?.requestAdapter())) throw new Error("no graphics processor");
    return await open("webgpu");
  } catch {
    return open("wasm");
  }
}

class Model {
  constructor(about, arrays, ort, session, device) {
    Object.assign(this, { about, arrays, ort, session, device, labels: about.labels });
    this.dim = arrays.values.shape[1];
    this.tasks = arrays.task_prompts.length;
  }

  /** Normalised pixels -> {label, probability, similarity, unknown, top}; `top` has [label, probability], best first. */
  async predict(pixels) {
    const { scores, similarities } = this.about.rule === "evidence" ? await this.byEvidence(pixels) : await this.byCentroids(pixels);
    const probabilities = softmax(scores.map((score) => score / this.about.temperature));
    const order = [...probabilities.keys()].sort((a, b) => scores[b] - scores[a]), best = order[0], label = this.labels[best];
    const limit = this.about.thresholds[REJECT] ?? -Infinity, own = this.about.own_thresholds;
    const lowest = Object.hasOwn(own, label) ? Math.min(limit, own[label]) : limit;
    return {
      label, probability: probabilities[best], similarity: similarities[best], unknown: Math.max(...similarities) < lowest,
      top: order.slice(0, 3).map((place) => [this.labels[place], probabilities[place]]),
    };
  }

  /** First feature space; the second if uncertain; then the prompts of the most probable tasks. */
  async byEvidence(pixels) {
    const { views, sure, open, most, fine } = this.about, [first, ...others] = views, embedded = new Map();
    const embed = async (prompt) => embedded.get(prompt) ?? embedded.set(prompt, await this.embed(pixels, prompt)).get(prompt);
    const coarse = this.coarse(0, await embed(first.prompt)), similarities = coarse.similarities;
    let logits = coarse.scores.map((score) => first.alone * score);
    const unsure = () => Math.max(...softmax(logits)) < sure;
    for (const [number, view] of others.entries()) {
      if (!unsure()) break;
      const other = this.coarse(number + 1, await embed(view.prompt)).scores;
      logits = coarse.scores.map((score, c) => first.weight * score + view.weight * other[c]);
    }
    if (!unsure()) return { scores: logits, similarities };
    const { record_tasks: tasks, record_classes: classes, task_prompts: prompts } = this.arrays;
    const posterior = new Float64Array(this.tasks), probabilities = softmax(logits);
    tasks.forEach((task, record) => { posterior[task] += probabilities[classes[record]]; });
    const tried = [...posterior.keys()].filter((task) => prompts[task] > 0 && posterior[task] >= open)
      .sort((a, b) => posterior[b] - posterior[a]).slice(0, most);
    if (!tried.length) return { scores: logits, similarities };
    const greatest = new Float64Array(logits.length).fill(-Infinity);
    for (const task of tried) this.toValues(await embed(prompts[task]), greatest, task);
    const usual = Math.max(...greatest), weight = fine * views.reduce((sum, view) => sum + view.weight, 0);
    const scores = logits.map((logit, c) => logit + weight * (greatest[c] === -Infinity ? usual : greatest[c]));
    return { scores, similarities };
  }

  /** Key centroids name the tasks whose prompts are tried; then the greatest similarity to value centroids wins. */
  async byCentroids(pixels) {
    const { keys, key_tasks: keyTasks, task_prompts: prompts } = this.arrays, query = await this.embed(pixels, 0);
    const similarity = rows(keys, query);
    const nearest = [...similarity.keys()].sort((a, b) => similarity[b] - similarity[a]).slice(0, this.about.neighbours);
    const scores = new Float64Array(this.labels.length).fill(-Infinity);
    for (const prompt of new Set(nearest.map((key) => prompts[keyTasks[key]]))) {
      this.toValues(prompt ? await this.embed(pixels, prompt) : query, scores);
    }
    return { scores, similarities: scores };
  }

  /** Raise `greatest` [classes] to the similarity with each class's value centroids, of one task or of all. */
  toValues(units, greatest, task = null) {
    const { values, value_records: records, record_classes: classes, record_tasks: tasks } = this.arrays;
    records.forEach((record, place) => {
      if (task !== null && tasks[record] !== task) return;
      const similarity = dot(values, place * this.dim, units, 0, this.dim);
      if (similarity > greatest[classes[record]]) greatest[classes[record]] = similarity;
    });
  }

  /** Scores and similarities [classes]: whitened cosines of each layer and kernel ridge; cosines of the last layer. */
  coarse(view, embedding) {
    const mine = (name) => this.arrays[`view${view}_${name}`], { dim, labels } = this;
    const [centre, precision, whitened, lengths, shares] = ["centre", "precision", "whitened", "lengths", "shares"].map(mine);
    const layers = centre.shape[0], units = normalise(Float64Array.from(embedding.subarray(0, layers * dim)), dim), parts = [];
    for (let layer = 0; layer < layers; layer++) {
      const centred = units.slice(layer * dim, (layer + 1) * dim).map((value, i) => value - centre[layer * dim + i]);
      let own = 0;
      for (let i = 0; i < dim; i++) own += dot(precision, (layer * dim + i) * dim, centred, 0, dim) * centred[i];
      parts.push(Float64Array.from(labels, (_, c) => {
        const at = layer * labels.length + c;
        return dot(whitened, at * dim, centred, 0, dim) / Math.sqrt(Math.max(own * lengths[at], 1e-24));
      }));
    }
    const plain = rows(mine("means"), units.subarray(0, dim));
    if (mine("points")) parts.push(this.ridge(mine, units, layers));
    return {
      scores: labels.map((_, c) => parts.reduce((sum, part, p) => sum + shares[p] * part[c], 0)),
      similarities: plain.map((cosine, c) => (parts[0][c] + cosine) / 2),
    };
  }

  /** [classes]: logarithm of a kernel ridge regression with the arc-cosine kernel of order 1. */
  ridge(mine, units, layers) {
    const centre = mine("ridge_centre"), joint = normalise(units.map((value, i) => value - centre[i]), this.dim);
    const weights = mine("weights"), count = this.labels.length, sums = new Float64Array(count);
    rows(mine("points"), joint).forEach((product, p) => {
      const cosine = Math.min(1, Math.max(-1, product / Math.sqrt(layers))), angle = Math.acos(cosine);
      const kernel = (Math.sin(angle) + (Math.PI - angle) * cosine) / Math.PI;
      for (let c = 0; c < count; c++) sums[c] += kernel * weights[p * count + c];
    });
    return sums.map((sum) => Math.log(Math.max(sum, this.about.ridge_floor)));
  }

  /** Unit vectors of the layers side by side; prompts are known by their rows, row 0 stands for none. */
  async embed(pixels, prompt) {
    const { prompts, enters } = this.arrays, [, depth, length, dim] = prompts.shape, size = this.about.preprocessing.image_size;
    const tokens = prompts.slice(prompt * depth * length * dim, (prompt + 1) * depth * length * dim);
    const entering = enters.slice(prompt * depth * length, (prompt + 1) * depth * length);
    const { Tensor } = this.ort, { embeddings } = await this.session.run({
      images: new Tensor("float32", pixels, [1, 3, size, size]),
      prompts: new Tensor("float32", tokens, [1, depth, length, dim]),
      enters: new Tensor("bool", entering, [1, depth, length]),
    });
    return normalise(Float32Array.from(await embeddings.getData()), dim);
  }
}

function dot(a, i, b, j, length) {
  let sum = 0;
  for (const end = i + length; i < end; i++, j++) sum += a[i] * b[j];
  return sum;
}

/** Products [n] of a matrix [n, d] with a vector [d]. */
function rows(matrix, vector) {
  return Float64Array.from({ length: matrix.shape[0] }, (_, row) => dot(matrix, row * vector.length, vector, 0, vector.length));
}

/** Scale every `dim` numbers to length 1, in place. */
function normalise(vectors, dim) {
  for (let start = 0; start < vectors.length; start += dim) {
    const length = Math.max(Math.sqrt(dot(vectors, start, vectors, start, dim)), 1e-12);
    for (let i = start; i < start + dim; i++) vectors[i] /= length;
  }
  return vectors;
}

function softmax(logits) {
  const most = Math.max(...logits), powers = Array.from(logits, (logit) => Math.exp(logit - most));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((power) => power / sum);
}
