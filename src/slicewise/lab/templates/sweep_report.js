"use strict";

// Every heading of a sortable table becomes a button. Cells with a data-value are compared as
// numbers; unknown values stay at the end in both directions.
const compared = new Intl.Collator("en", { numeric: true });

function sort(table, heading) {
  const headings = [...heading.parentElement.cells];
  const column = headings.indexOf(heading);
  const way = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  const turned = way === "ascending" ? 1 : -1;
  for (const other of headings) other.setAttribute("aria-sort", other === heading ? way : "none");
  const keyed = [...table.tBodies[0].rows].map((row) => {
    const cell = row.cells[column];
    const number = cell.dataset.value;
    return { row, text: cell.textContent, number: number ? Number(number) : NaN, known: number !== "" };
  });
  keyed.sort((a, b) => {
    if (a.known !== b.known) return a.known ? -1 : 1;
    const numbers = a.number - b.number;
    return turned * (Number.isNaN(numbers) ? compared.compare(a.text, b.text) : numbers);
  });
  table.tBodies[0].append(...keyed.map((entry) => entry.row));
}

for (const table of document.querySelectorAll("table.sortable")) {
  for (const heading of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    heading.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => sort(table, heading));
  }
}

for (const box of document.querySelectorAll(".filter")) {
  const field = box.querySelector("input");
  const count = box.querySelector("output");
  const rows = [...document.getElementById(box.dataset.table).tBodies[0].rows];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, index) => {
      row.hidden = !words.every((word) => texts[index].includes(word));
      shown += row.hidden ? 0 : 1;
    });
    count.textContent = `${shown} of ${rows.length} rows`;
  };
  field.addEventListener("input", show);
  box.hidden = false;
  show();
}
