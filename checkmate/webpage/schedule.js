// The schedule as a triangle, a row for each stage, a column for each op: what runs (R), what is at hand before (S).

const schedule = (() => {
  const area = el("div", {
    id: "schedule-area", class: "picture", role: "application", tabindex: "0",
    "aria-label": "Schedule: stages down, ops across", "aria-describedby": "schedule-text schedule-keys",
  });
  const below = el("canvas", { "aria-hidden": "true" });
  const above = el("canvas", { "aria-hidden": "true" });
  area.append(below, above);
  const readout = el("div", { id: "schedule-readout", class: "readout", role: "status" });
  const margin = { left: 64, right: 22, top: 40, bottom: 8 };

  const cells = new Map(); // of stage and op, the moment that runs it
  for (let i = 0; i < N; i++) cells.set(data.moments.stage[i] * T + data.moments.op[i], i);
  const keptBy = Array.from({ length: T }, () => []); // by op, [value, first stage, last stage] at whose begin it is there
  for (const span of data.kept) keptBy[data.values.producer[span[0]]].push(span);
  const crosses = again.map((i) => data.moments.stage[i] * T + data.moments.op[i]); // ascending, as moments are
  let at = crosses.length ? [Math.floor(crosses[0] / T), crosses[0] % T] : [0, 0];

  function frame(canvas) {
    const { pen, width, height } = cleared(canvas);
    const side = Math.max(1, Math.min(width - margin.left - margin.right, height - margin.top - margin.bottom));
    return { pen, width, side, cell: side / T, x: (k) => margin.left + k * side / T, y: (t) => margin.top + t * side / T };
  }

  function axes({ pen, side, x, y }) {
    pen.fillStyle = colour("soft");
    pen.strokeStyle = colour("line");
    pen.lineWidth = 1;
    pen.strokeRect(margin.left, margin.top, side, side);
    for (const n of ticks(0, T - 1, 5).filter(Number.isInteger)) {
      pen.textAlign = "center";
      pen.textBaseline = "bottom";
      pen.fillText(String(n), x(n + 0.5), margin.top - 3);
      pen.textAlign = "right";
      pen.textBaseline = "middle";
      pen.fillText(String(n), margin.left - 5, y(n + 0.5));
    }
    pen.textAlign = "center";
    pen.textBaseline = "top";
    pen.fillText("op, in the order of first execution", margin.left + side / 2, 2);
    pen.save();
    pen.translate(2, margin.top + side / 2);
    pen.rotate(-Math.PI / 2);
    pen.fillText("stage", 0, 0);
    pen.restore();
  }

  function halves({ pen, side, x, y }) {
    if (!(data.forward > 0 && data.forward < T)) return;
    crossLines("ink", 1, [5, 4], data.forward, data.forward, { pen, side, x, y });
    pen.fillStyle = colour("ink");
    pen.textAlign = "center";
    pen.textBaseline = "top";
    for (const [name, middle] of [["forward", data.forward / 2], ["backward", (data.forward + T) / 2]]) {
      pen.save();
      pen.translate(margin.left + side + 19, y(middle));
      pen.rotate(Math.PI / 2);
      pen.fillText(name, 0, 0);
      pen.restore();
    }
  }

  /** A line across the triangle at a stage, and one down it at an op. */
  function crossLines(ink, wide, dash, t, k, { pen, side, x, y }) {
    stroke(pen, ink, wide, dash, [margin.left, y(t)], [margin.left + side, y(t)]);
    stroke(pen, ink, wide, dash, [x(k), margin.top], [x(k), margin.top + side]);
  }

  function cross(pen, x, y, half) {
    pen.beginPath();
    for (const [dx, dy] of [[1, 1], [1, -1]]) {
      pen.moveTo(x - half * dx, y - half * dy);
      pen.lineTo(x + half * dx, y + half * dy);
    }
    pen.stroke();
  }

  function draw() {
    const box = frame(below);
    const { pen, cell, x, y } = box;
    axes(box);
    pen.fillStyle = colour("kept");
    for (const [value, first, last] of data.kept) {
      pen.fillRect(x(data.values.producer[value]), y(first), cell, cell * (last - first + 1));
    }
    pen.fillStyle = colour("first");
    const dot = Math.max(1.2, 0.8 * cell);
    for (let k = 0; k < T; k++) pen.fillRect(x(k + 0.5) - dot / 2, y(k + 0.5) - dot / 2, dot, dot);
    const half = Math.max(2.2, Math.min(8, 0.4 * cell));
    for (const [ink, wide] of [["paper", 3.5], ["again", 1.8]]) {
      pen.strokeStyle = colour(ink);
      pen.lineWidth = cell < 2 && ink === "paper" ? 0.01 : wide;
      for (const c of crosses) cross(pen, x(c % T + 0.5), y(Math.floor(c / T) + 0.5), half);
    }
    halves(box);
    drawCursor();
  }

  function drawCursor() {
    const { pen, side, cell, x, y } = frame(above);
    const [t, k] = at;
    crossLines("mark", 0.7, [], t + 0.5, k + 0.5, { pen, side, x, y });
    const wide = Math.max(9, cell);
    pen.lineWidth = 2;
    pen.strokeRect(x(k + 0.5) - wide / 2, y(t + 0.5) - wide / 2, wide, wide);
  }

  function show(t, k) {
    at = [Math.max(0, Math.min(T - 1, t)), Math.max(0, Math.min(T - 1, k))];
    [t, k] = at;
    const moment = cells.get(t * T + k);
    const here = keptBy[k].filter(([, first, last]) => first <= t && t <= last);
    const names = here.map(([value]) => `${data.values.name[value]} (${formatBytes(data.values.bytes[value])})`).join(", ");
    let runs = "does not run in this stage";
    if (k === t) runs = "runs for the first time and ends the stage";
    else if (k > t) runs = "cannot run yet: its first execution is later";
    else if (moment !== undefined) runs = `is run again, for the ${data.moments.nth[moment]} time`;
    if (moment !== undefined) runs += runsOver(moment);
    readout.replaceChildren(
      el("h3", {}, `Stage ${t}, op ${k}`),
      facts([
        ["op", `${data.ops.name[k]} ${runs}.`],
        ["at hand", k > t ? "" : names ? `${names}, when the stage begins` : "nothing it made, when the stage begins"],
        ["where", data.ops.where[k]],
        ["stage", `ends with the first execution of ${data.ops.name[t]}, in the ${t < data.forward ? "forward" : "backward"}`],
      ]),
      ...(moment === undefined ? [] : [button("Show it in the memory", () => memory.go(moment))]),
    );
    drawCursor();
  }

  function toAgain(sign) {
    if (!crosses.length) return;
    const here = at[0] * T + at[1];
    const list = sign > 0 ? crosses : [...crosses].reverse();
    const c = list.find((other) => sign * (other - here) > 0) ?? list[0];
    show(Math.floor(c / T), c % T);
  }

  const keys = {
    ArrowRight: () => show(at[0], at[1] + 1), ArrowLeft: () => show(at[0], at[1] - 1),
    ArrowDown: () => show(at[0] + 1, at[1]), ArrowUp: () => show(at[0] - 1, at[1]),
    Home: () => show(at[0], 0), End: () => show(at[0], at[0]),
    r: () => toAgain(1), R: () => toAgain(-1),
  };
  controlled(area, keys, (event) => {
    const bounds = area.getBoundingClientRect();
    const side = Math.min(bounds.width - margin.left - margin.right, bounds.height - margin.top - margin.bottom);
    const [px, py] = [event.clientX - bounds.left - margin.left, event.clientY - bounds.top - margin.top];
    if (px < 0 || py < 0 || px >= side || py >= side) return;
    const cell = side / T;
    let best = [Math.floor(py / cell), Math.floor(px / cell)];
    let nearest = cell < 6 ? 6 : 0; // small crosses are caught from nearby
    for (const c of nearest ? crosses : []) {
      const away = Math.hypot((c % T + 0.5) * cell - px, (Math.floor(c / T) + 0.5) * cell - py);
      if (away < nearest) [nearest, best] = [away, [Math.floor(c / T), c % T]];
    }
    if (best[0] !== at[0] || best[1] !== at[1]) show(...best);
  });

  const signs = [["first", "", "first execution (R)"], ["again", "✕", "run again (R)"],
    ["kept", "", "at hand when the stage begins (S)"]];
  document.getElementById("schedule-picture").append(
    el("div", { class: "controls" }, ...(again.length
      ? [button("Previous run again", () => toAgain(-1)), button("Next run again", () => toAgain(1))] : [])),
    el("div", { class: "beside" }, area,
      el("div", {},
        el("ul", { class: "legend", "aria-label": "Signs" }, ...signs.map(([name, sign, text]) =>
          el("li", {}, el("span", { class: "swatch " + name, "aria-hidden": "true" }, sign), el("span", {}, text)))),
        readout)),
  );
  show(...at);
  kept(area, draw);
  return { show };
})();
