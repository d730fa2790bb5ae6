"use strict";
(() => {
  const box = document.getElementById("read-out");
  const make = (name, className, text) => {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const nearest = (xs, x) => xs.reduce((best, value, i) => (Math.abs(value - x) < Math.abs(xs[best] - x) ? i : best), 0);

  for (const chart of document.querySelectorAll("svg[data-chart]")) {
    const data = JSON.parse(chart.dataset.chart);
    const cursor = chart.querySelector(".cursor");
    const hide = () => { box.hidden = true; cursor.style.visibility = "hidden"; };
    chart.addEventListener("pointerleave", hide);
    chart.addEventListener("pointercancel", hide);
    chart.addEventListener("pointermove", (event) => {
      const frame = chart.getBoundingClientRect();
      const at = ((event.clientX - frame.left) / frame.width) * data.width;
      const wanted = data.first + ((at - data.left) / (data.right - data.left)) * (data.last - data.first);
      const found = data.series.map((line) => line.x[nearest(line.x, wanted)]);
      const x = found[nearest(found, wanted)];
      box.replaceChildren(make("span", "faint", `update ${x}`));
      for (const line of data.series) {
        const i = nearest(line.x, x);
        const row = make("div", `c${line.colour}`);
        const where = line.x[i] === x ? "" : ` (update ${line.x[i]})`;
        row.append(make("i"), make("span", "", line.label + where), make("b", "", String(line.y[i]).replace("-", "\u2212")));
        box.append(row);
      }
      const place = data.left + ((x - data.first) / (data.last - data.first)) * (data.right - data.left);
      cursor.setAttribute("x1", place);
      cursor.setAttribute("x2", place);
      cursor.style.visibility = "visible";
      box.hidden = false;
      const side = event.clientX + 18 + box.offsetWidth < innerWidth ? event.clientX + 18 : event.clientX - box.offsetWidth - 18;
      box.style.left = `${Math.max(6, side)}px`;
      box.style.top = `${Math.max(6, Math.min(event.clientY - box.offsetHeight / 2, innerHeight - box.offsetHeight - 6))}px`;
    });
  }

  for (const button of document.querySelectorAll(".more")) {
    button.addEventListener("click", () => {
      const open = button.parentElement.classList.toggle("open");
      button.textContent = open ? "show less" : "show all";
      button.setAttribute("aria-expanded", String(open));
    });
  }

  // A link to a card inside a closed fold opens the fold first.
  addEventListener("hashchange", () => {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    const fold = target && target.closest("details");
    if (fold) { fold.open = true; target.scrollIntoView(); }
  });
})();
