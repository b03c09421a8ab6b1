// Bytes at hand over the step as stacked areas (uPlot draws them); the pointer and the keyboard move from op to op.

const memory = (() => {
  const area = el("div", {
    id: "memory-area", class: "picture", role: "slider", tabindex: "0", "aria-label": "Op of the step",
    "aria-describedby": "memory-text memory-keys", "aria-valuemin": "1", "aria-valuemax": String(N),
  });
  const scale = el("select", { id: "memory-scale" }, el("option", { value: "time" }, "by time"),
    el("option", { value: "ops" }, "op by op"));
  const legend = el("ul", { class: "legend", "aria-label": "Bytes by role at the op shown" });
  const numbers = data.roles.map((role) => { // in the legend the top area stands first
    const number = el("span", { class: "number" });
    legend.prepend(el("li", {}, filled(role), el("span", {}, role.name), number, el("span", { class: "about" }, role.about)));
    return number;
  });
  const readout = el("div", { id: "memory-readout", class: "readout", role: "region", tabindex: "0",
    "aria-label": "The op shown" });
  const values = el("div", { class: "values", role: "region", tabindex: "0", "aria-label": "Values alive" });

  const time = data.moments.begin; // where each moment begins, and the last one ends
  const counted = Array.from({ length: N + 1 }, (_, i) => i);
  if (!(time[N] > 0)) scale.value = "ops";
  let xs = time[N] > 0 ? time : counted;
  let current = data.peak.moment;
  const beyond = data.budget.bytes > 1.5 * data.peak.bytes;
  const ceiling = Math.max(1, data.peak.bytes, beyond ? 0 : data.budget.bytes) * 1.3;
  let labels = []; // where words stand in the picture, in pixels of the page

  /** Where moments begin; the tops of the areas, the highest first, so that the lower are drawn upon it; the outline. */
  function columns() {
    const sums = new Array(N + 1).fill(0);
    const tops = data.roles.map((role) => sums.map((_, i) => (sums[i] += role.bytes[Math.min(i, N - 1)])));
    return [xs, ...tops.reverse(), sums];
  }

  const tenth = Math.max(1, Math.round(N / 10));
  const keys = {
    ArrowRight: () => show(current + 1), ArrowUp: () => show(current + 1),
    ArrowLeft: () => show(current - 1), ArrowDown: () => show(current - 1),
    PageUp: () => show(current + tenth), PageDown: () => show(current - tenth),
    Home: () => show(0), End: () => show(N - 1),
    p: () => show(data.peak.moment),
    r: () => again.length && show(again.find((i) => i > current) ?? again[0]),
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => zoom(Infinity),
  };

  const steps = { ...BARE, paths: uPlot.paths.stepped({ align: 1 }) };
  const picture = chart(area, {
    padding: [30, 14, 0, 0], columns: columns(), zooms: true,
    scales: { x: { time: false }, y: { range: [0, ceiling] } },
    axes: [
      {
        label: () => (xs === time ? "time in the step" : "executions, in order"),
        incrs: () => (xs === time ? ROUND : WHOLE),
        values: (...of) => (xs === time ? inUnits(SECOND_UNITS) : countedFrom(1))(...of),
      },
      { values: inUnits(BYTE_UNITS) },
    ],
    series: [
      {},
      ...[...data.roles].reverse().map((role) => ({ ...steps, width: 0, fill: (u) => hatch(u.ctx, role, uPlot.pxRatio) })),
      { ...steps, width: 0.8, stroke: () => colour("ink") },
    ],
    paint, keys,
    point: (x) => show(xs.findLastIndex((begin, i) => i < N && begin <= x)),
  });

  /** Budget, halves and peak. Words stand beside each other: those of the budget at the end away from the peak. */
  function paint(pen, width, height) {
    labels = [];
    const [border, level] = picture.box(xs[data.moments.boundary], xs[N], data.budget.bytes, data.budget.bytes);
    if (data.moments.boundary > 0 && data.moments.boundary < N && border > 0 && border < width) {
      stroke(pen, "ink", 1, [2, 3], [border, -22], [border, height]);
      write(pen, "forward", border - 6 - pen.measureText("forward").width, -18, width);
      write(pen, "backward", border + 6, -18, width);
    }
    const { moment: i, bytes, label } = data.peak;
    const [left, top, wide] = picture.box(xs[i], xs[i + 1], bytes, bytes);
    const at = left + wide / 2;
    const room = width - 12;
    const beside = (words, gap) => { // on the side of the peak where there is more room
      const long = Math.min(pen.measureText(words).width, room);
      return at < width / 2 ? Math.min(at + gap, width - long - 4) : Math.max(6, at - gap - long);
    };
    if (!beyond) stroke(pen, "ink", 2, [9, 4], [0, level], [width, level]);
    const budget = data.budget.label + (beyond ? ", above this picture" : "");
    const long = Math.min(pen.measureText(budget).width, room);
    const from = at < width / 2 ? Math.max(8, width - 8 - long) : 8;
    const meets = from - 3 < at + 9 && at - 9 < from + long + 3; // the mark of the peak, which is 14 high
    write(pen, budget, from, beyond ? 28 : level - 13 - (meets ? Math.max(0, level - top + 14) : 0), room);
    if (at >= 0 && at <= width) {
      paintPeak(pen, at, top - 1);
      write(pen, label, beside(label, 12), 10, room);
      let floor = 0; // what is at hand at the peak, each area by its name where that has room
      for (const role of data.roles) {
        const [, upper, , tall] = picture.box(xs[i], xs[i + 1], floor, floor + role.bytes[i]);
        const words = `${role.name} ${formatBytes(role.bytes[i])}`;
        if (tall >= 18) write(pen, words, beside(words, wide / 2 + 12), Math.min(upper + tall / 2, height - 10), room, true);
        floor += role.bytes[i];
      }
    }
    links?.draw(picture.u.scales.x, xs, current);
  }

  /** A triangle that stands on the peak. */
  function paintPeak(pen, at, foot) {
    stroke(pen, "paper", 1.5, [], [at, foot], [at - 7, foot - 13], [at + 7, foot - 13], [at, foot]);
    pen.fillStyle = colour("mark");
    pen.fill();
  }

  /** Words in the picture; those that may be left out are, where others stand. */
  function write(pen, words, x, y, room, optional = false) {
    const box = { words, left: x - 3, right: x + Math.min(room, pen.measureText(words).width) + 3, top: y - 9, bottom: y + 9 };
    const meets = (one) => one.left < box.right && box.left < one.right && one.top < box.bottom && box.top < one.bottom;
    if (optional && labels.some(meets)) return;
    labels.push(box);
    patch(pen, words, x, y, room);
  }

  function describe(i) {
    const k = data.moments.op[i];
    const times = data.moments.nth[i] ? `, run for the ${data.moments.nth[i]} time` : "";
    return `${data.ops.name[k]}${times}${runsOver(i)}, ${formatBytes(data.moments.bytes[i])} at hand, ${i + 1} of ${N}`;
  }

  function fillReadout(i) {
    const k = data.moments.op[i];
    const here = data.spans.filter(([, , , from, to]) => from <= i && i <= to); // the most bytes first, as all are
    const half = i < data.moments.boundary ? "forward" : "backward";
    const times = data.moments.nth[i] ? `, for the ${data.moments.nth[i]} time` : "";
    const rows = here.slice(0, 100).map(([value, role, copy, , , uses, over]) => {
      const next = uses.find((use) => use > i);
      return [
        data.values.name[value] + (copy ? ` (copy ${copy + 1})` : "") + inPlace(over),
        formatBytes(data.values.bytes[value]),
        data.texts[role],
        next === undefined ? "" : data.ops.name[data.moments.op[next]],
      ].map((text) => [text]);
    });
    readout.replaceChildren(
      el("h3", {}, data.ops.name[k] + (i === data.peak.moment ? " (the peak)" : "")),
      facts([
        ["computes", data.ops.target[k]],
        ["execution", `${i + 1} of ${N}, in the ${half}${times}`],
        ["begins at", data.moments.begins[i]],
        ["takes", data.ops.takes[k]],
        ["at hand", `${formatBytes(data.moments.bytes[i])}, ${here.length} value${here.length === 1 ? "" : "s"}`],
        ["writes over", data.texts[data.moments.over[i]]],
        ["workspace", data.moments.workspace[i] ? formatBytes(data.moments.workspace[i]) : ""],
        ["then waits", data.links?.waits[i] ?? ""],
        ["second memory", data.links?.memory ? formatBytes(data.links.memory.bytes[i]) : ""],
        ["module", data.ops.module[k]],
        ["line", data.ops.line[k]],
        ["must run once", data.pinned[k] ?? ""],
      ]),
      values,
    );
    const heads = [["value"], ["bytes", true], ["role"], ["next read by"]];
    const title = "Values alive" + (here.length > rows.length ? `, the ${rows.length} largest of ${here.length}` : "");
    values.replaceChildren(table(title, heads, el("tbody", {}, ...rows.map((cells) => rowOf(cells, heads)))));
    values.scrollTo(0, 0);
  }

  function show(i) {
    current = Math.max(0, Math.min(N - 1, i));
    const { min, max } = picture.u.scales.x;
    if (max && (xs[current + 1] <= min || xs[current] >= max)) zoom(1); // no scale before the first picture
    area.setAttribute("aria-valuenow", String(current + 1));
    area.setAttribute("aria-valuetext", describe(current));
    data.roles.forEach((role, r) => { numbers[r].textContent = formatBytes(role.bytes[current]); });
    mark();
    fillReadout(current);
  }

  function mark() {
    picture.frame(xs[current], xs[current + 1], 0, data.moments.bytes[current]);
    links?.draw(picture.u.scales.x, xs, current);
  }

  function zoom(factor) {
    const least = Math.max(xs[N] / N / 4, xs[current + 1] - xs[current]); // an op fills the picture at most
    const span = Math.min(xs[N], Math.max(least, (picture.u.scales.x.max - picture.u.scales.x.min) * factor));
    const middle = (xs[current] + xs[current + 1]) / 2;
    const min = Math.max(0, Math.min(xs[N] - span, middle - span / 2));
    picture.u.setScale("x", { min, max: min + span });
  }

  scale.addEventListener("change", () => {
    xs = scale.value === "time" ? time : counted;
    picture.u.setData(columns());
    mark();
  });

  document.getElementById("memory-picture").append(
    area,
    ...(links ? [links.area] : []),
    el("div", { class: "controls" },
      button("Peak", keys.p), button("Previous op", keys.ArrowLeft), button("Next op", keys.ArrowRight),
      ...(again.length ? [button("Next run again", keys.r)] : []),
      button("Zoom in", keys["+"]), button("Zoom out", keys["-"]), button("Whole step", keys[0]),
      el("label", { for: "memory-scale" }, "Along:"), scale),
    el("div", { class: "under" }, legend, readout),
  );
  if (!(time[N] > 0)) scale.firstElementChild.disabled = true;
  show(current);
  return {
    show,
    labels: () => labels,
    /** Shows a moment and brings the picture into sight. */
    go: (i) => {
      show(i);
      area.focus({ preventScroll: true });
      document.getElementById("memory").scrollIntoView();
    },
  };
})();
