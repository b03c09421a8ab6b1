// Cost against peak: a line of steps and a sign of its own for each method, and where it is proven that no plan is.

if (data.frontier) {
  const { methods, proven, range, this: own } = data.frontier;
  const STROKES = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];
  const DASHES = [[], [8, 4], [2, 3], [8, 3, 2, 3], [12, 3]];
  const SIGNS = ["●", "■", "◆", "▼", "✕", "▲", "✚", "○", "□", "◇"];
  const area = el("div", { id: "frontier-area", class: "picture", role: "img", "aria-label": "Cost against peak",
    "aria-describedby": "frontier-text" });
  const readout = el("p", { id: "frontier-readout", class: "hint", role: "status" });
  const legend = el("ul", { class: "legend", "aria-label": "Signs" });
  const of = (list, m) => list[m % list.length];

  const points = methods.flatMap((method, m) => method.points.map((point) => [...point, m])); // peak, cost, words, method
  const ends = proven.map(([peak]) => peak);
  const rows = [...ends.map((peak) => [peak]), ...points].sort(([a], [b]) => a - b);
  const columns = [rows.map(([peak]) => peak), rows.map(([peak]) => proven.find(([end]) => peak <= end)[1]),
    ...methods.map((_, m) => rows.map(([, cost, , method]) => (method === m ? cost : undefined)))];
  const nowhere = () => ({ fill: colour("shade"), hatch: "/", ink: colour("line") });

  function paintSign(pen, text, x, y) {
    Object.assign(pen, { fillStyle: colour("ink"), textAlign: "center", textBaseline: "middle" });
    pen.fillText(text, x, y);
  }

  function drawLegend() {
    const samples = [...methods, { label: "this plan" }].map(({ label }, m) => [label, swatch((pen) => {
      pen.scale(2, 2);
      pen.font = FONT;
      if (m < methods.length) stroke(pen, of(STROKES, m), 2, of(DASHES, m), [0, 9], [32, 9]);
      paintSign(pen, m < methods.length ? of(SIGNS, m) : "◯", 16, 9);
    })]);
    samples.push(["proven: no schedule is here", filled(nowhere())]);
    legend.replaceChildren(...samples.map(([label, sample]) => el("li", {}, sample, el("span", {}, label))));
  }

  const picture = chart(area, {
    padding: [10, 16, 0, 0], columns,
    scales: { x: { time: false, range: [ends[0], ends.at(-1)] }, y: { range } },
    axes: [{ values: inUnits(BYTE_UNITS), label: "peak" }, { values: inUnits(SECOND_UNITS) }],
    series: [
      {},
      { ...BARE, paths: uPlot.paths.stepped({ align: -1 }), width: 0, fillTo: range[0], fill: (u) => hatch(u.ctx, nowhere(), 1) },
      ...methods.map((_, m) => ({ ...BARE, paths: uPlot.paths.stepped({ align: 1 }), spanGaps: true, width: 2,
        stroke: of(STROKES, m), dash: of(DASHES, m) })),
    ],
    paint(pen) {
      for (const [peak, cost, , m] of points) paintSign(pen, of(SIGNS, m), ...picture.box(peak, peak, cost, cost));
      const [x, y] = picture.box(own[0], own[0], own[1], own[1]);
      Object.assign(pen, { strokeStyle: colour("mark"), lineWidth: 2 });
      pen.beginPath();
      pen.arc(x, y, 10, 0, 7);
      pen.stroke();
      drawLegend();
    },
    point(x, y) {
      const near = [...points, own].filter(([peak, cost]) => Math.hypot(...picture.box(x, peak, y, cost).slice(2)) < 12);
      if (near.length) readout.replaceChildren(...broken(near.map(([, , about]) => about).join("; ")));
    },
  });
  document.getElementById("frontier-picture").append(area, readout, legend,
    sortableTable(data.tables.find((table) => table.id === "table-frontier")));
}

performance.mark("drawn");
