// Values on hover and touch, and tables that sort by a heading: numbers by size, words by alphabet.
const tip = document.getElementById("tip");
const show = (event) => {
  const text = event.target.closest?.("[data-tip]")?.dataset.tip;
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 4)) + "px";
  tip.style.top = Math.max(4, event.clientY - box.height - 10) + "px";
};
for (const kind of ["mousemove", "touchstart"]) document.addEventListener(kind, show, { passive: true });
const key = (row, i) => {
  const text = row.cells[i]?.textContent.trim() ?? "", number = parseFloat(text.replace(/,/g, "").replace("−", "-"));
  return Number.isNaN(number) ? [1, text.toLowerCase()] : [0, number];
};
for (const head of document.querySelectorAll("th[data-sort]")) {
  const sort = () => {
    const body = head.closest("table").tBodies[0], i = head.cellIndex, up = head.ariaSort !== "ascending";
    for (const other of head.parentElement.cells) other.ariaSort = null;
    head.ariaSort = up ? "ascending" : "descending";
    const order = (a, b) => {
      const [x, y] = [key(a, i), key(b, i)];
      return (x[0] - y[0] || (x[1] < y[1] ? -1 : x[1] > y[1] ? 1 : 0)) * (up ? 1 : -1);
    };
    body.append(...[...body.rows].sort(order));
  };
  head.tabIndex = 0;
  head.addEventListener("click", sort);
  head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
}
