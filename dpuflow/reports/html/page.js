"use strict";
// What the page does beyond being read: filters are copied, and cells of the heat map are told in words.
for (const button of document.querySelectorAll("button[data-copy]")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const text = button.dataset.copy;
    let copied = false;
    try {
      await navigator.clipboard.writeText(text);
      copied = true;
    } catch { // a page opened from a file may not use the clipboard: then the filter is selected
      const range = document.createRange();
      range.selectNodeContents(button.previousElementSibling);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      copied = document.execCommand("copy");
    }
    button.textContent = copied ? "Copied" : "Selected";
    setTimeout(() => { button.textContent = "Copy filter"; }, 1500);
  });
}

const heat = document.querySelector("svg.heat");
const held = document.getElementById("heat-data");
if (heat && held) {
  const data = JSON.parse(held.textContent);
  const columns = data.columns.length, rows = data.rows.length;
  const said = document.querySelector(".readout");
  const bounds = ["", "at most ", "at least "];
  const units = [["s", 1e9], ["ms", 1e6], ["us", 1e3], ["ns", 1]];
  const time = (ns) => {
    const [unit, scale] = units.find(([, each]) => ns >= each) || units[3];
    return `${Number((ns / scale).toPrecision(3))} ${unit}`;
  };
  let row = 0, column = 0;
  const tell = () => {
    const cell = row * columns + column, value = data.values[cell];
    const late = value < 0 ? "not known" : `${bounds[data.bounds[cell]]}${time(value)} late`;
    said.textContent = `${data.rows[row]}, ${data.columns[column]}: ${late}`;
  };
  heat.addEventListener("pointermove", (event) => {
    const box = heat.getBoundingClientRect();
    column = Math.min(columns - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * columns)));
    row = Math.min(rows - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * rows)));
    tell();
  });
  heat.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    row = Math.min(rows - 1, Math.max(0, row + step[0]));
    column = Math.min(columns - 1, Math.max(0, column + step[1]));
    tell();
  });
}
