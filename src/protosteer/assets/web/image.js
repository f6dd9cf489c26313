// Turn an image file into the numbers that the network expects, with the arithmetic of `protosteer predict`.
const WEIGHT_BITS = 22; // of a kernel weight as an integer
const MOST_PIXELS = 16_777_216; // browsers on phones refuse larger canvases

const KERNELS = {
  bicubic: [2, (x) => (x < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? ((2.5 - 0.5 * x) * x - 4) * x + 2 : 0)],
  bilinear: [1, (x) => Math.max(0, 1 - x)],
};

/** Blob -> normalised Float32Array [3 * size * size]: shorter side to the canvas, then the centre is kept. */
export async function prepare(blob, how) {
  const whole = await decode(blob);
  const longest = 16 * Math.min(whole.width, whole.height);
  const image = crop(whole, Math.min(whole.width, longest), Math.min(whole.height, longest));
  const shorter = Math.min(image.width, image.height);
  const [width, height] = [image.width, image.height].map((side) => Math.floor((how.canvas * side) / shorter));
  const resized = resize(image, width, height, how.interpolation);
  const { data } = crop(crop(resized, how.canvas, how.canvas), how.image_size, how.image_size);
  const area = how.image_size ** 2, pixels = new Float32Array(3 * area);
  for (let c = 0; c < 3; c++) {
    for (let i = 0; i < area; i++) pixels[c * area + i] = (data[3 * i + c] / 255 - how.mean[c]) / how.std[c];
  }
  return pixels;
}

/** Blob -> upright {width, height, data}: bytes R, G, B; transparency lies on white, colour profiles are ignored. */
async function decode(blob) {
  const bitmap = await createImageBitmap(blob, { imageOrientation: "from-image", colorSpaceConversion: "none" });
  const scale = Math.min(1, Math.sqrt(MOST_PIXELS / (bitmap.width * bitmap.height)));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.floor(scale * bitmap.width));
  canvas.height = Math.max(1, Math.floor(scale * bitmap.height));
  const { width, height } = canvas, context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#fff";
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  const rgba = context.getImageData(0, 0, width, height).data, data = new Uint8ClampedArray(3 * width * height);
  for (let i = 0, j = 0; i < rgba.length; i += 4) {
    data[j++] = rgba[i]; data[j++] = rgba[i + 1]; data[j++] = rgba[i + 2];
  }
  return { width, height, data };
}

function crop(image, width, height) {
  if (width === image.width && height === image.height) return image;
  const left = Math.floor((image.width - width) / 2), top = Math.floor((image.height - height) / 2);
  const data = new Uint8ClampedArray(3 * width * height);
  for (let y = 0; y < height; y++) {
    const start = 3 * ((top + y) * image.width + left);
    data.set(image.data.subarray(start, start + 3 * width), 3 * y * width);
  }
  return { width, height, data };
}

/** Resize in two passes with bytes in between, in the order in which Pillow 13 makes them. */
export function resize({ width: w, height: h, data }, width, height, interpolation) {
  if (h > height && h - height > 2 * (w - width)) {
    const columns = along(data, w, h, height, 3 * w, 3, 3, interpolation);
    return { width, height, data: along(columns, height, w, width, 3, 3 * w, 3 * width, interpolation) };
  }
  const rows = along(data, h, w, width, 3, 3 * w, 3 * width, interpolation);
  return { width, height, data: along(rows, width, h, height, 3 * width, 3, 3, interpolation) };
}

/** Resample `lines` lines of `from` pixels to `to`; neighbours are `step` bytes apart, lines `line` and `lineOut`. */
function along(source, lines, from, to, step, line, lineOut, interpolation) {
  if (from === to) return source;
  const data = new Uint8ClampedArray(3 * lines * to);
  const [reach, kernel] = KERNELS[interpolation], scale = from / to, spread = Math.max(1, scale);
  for (let x = 0; x < to; x++) {
    const centre = (x + 0.5) * scale;
    const first = Math.max(0, Math.trunc(centre - reach * spread + 0.5));
    const end = Math.min(from, Math.trunc(centre + reach * spread + 0.5));
    const weights = [];
    for (let i = first; i < end; i++) weights.push(kernel(Math.abs((i - centre + 0.5) / spread)));
    const sum = weights.reduce((a, b) => a + b, 0), whole = new Int32Array(weights.length);
    weights.forEach((weight, i) => {
      const scaled = (weight / sum) * 2 ** WEIGHT_BITS;
      whole[i] = Math.trunc(scaled + (scaled < 0 ? -0.5 : 0.5));
    });
    for (let n = 0; n < lines; n++) {
      const start = n * line + first * step, out = n * lineOut + x * step;
      for (let c = 0; c < 3; c++) {
        let total = 1 << (WEIGHT_BITS - 1);
        for (let i = 0, place = start + c; i < whole.length; i++, place += step) total += source[place] * whole[i];
        data[out + c] = total >> WEIGHT_BITS;
      }
    }
  }
  return data;
}
