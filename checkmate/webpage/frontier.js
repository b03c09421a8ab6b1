// Cost against peak: a line of steps and a marker of its own for each method, and where it is proven that no plan is.

if (data.frontier) {
  const place = document.getElementById("frontier-picture");
  const { methods, shade, base } = data.frontier;
  const STROKES = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];
  const DASHES = ["", "8 4", "2 3", "8 3 2 3", "12 3"];
  const SIGNS = ["●", "■", "◆", "▼", "✕", "▲", "✚", "○", "□", "◇"];

  const svg = (tag, attributes, ...children) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };

  const look = (m) => ({ fill: "none", stroke: STROKES[m % STROKES.length], "stroke-dasharray": DASHES[m % DASHES.length] });

  const points = methods.flatMap((method) => method.points);
  points.push(data.frontier.this);
  const costs = [base, ...points.map(([, cost]) => cost), ...shade.map(([, bound]) => bound).filter((b) => b !== null)];
  const peaks = [...points.map(([peak]) => peak), ...shade.map(([budget]) => budget)];
  const room = 0.08 * (Math.max(...costs) - base) || 0.05 * base || 1;
  const [low, high] = [base - room, Math.max(...costs) + 2 * room];
  const wide = 0.05 * (Math.max(...peaks) - Math.min(...peaks)) || 0.05 * Math.max(...peaks) || 1;
  const [left, right] = [Math.min(...peaks) - wide, Math.max(...peaks) + wide];

  function draw() {
    const width = Math.max(240, Math.min(832, place.clientWidth));
    const height = Math.max(260, Math.min(460, 0.65 * width));
    const margin = { left: 74, right: 16, top: 10, bottom: 46 };
    const x = (peak) => margin.left + (peak - left) / (right - left) * (width - margin.left - margin.right);
    const y = (cost) => height - margin.bottom - (cost - low) / (high - low) * (height - margin.top - margin.bottom);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Cost against peak", "aria-describedby": "frontier-text" });
    picture.append(svg("defs", {}, svg("pattern", { id: "lines", width: 8, height: 8, patternUnits: "userSpaceOnUse" },
      svg("path", { d: "M-2 2 L2 -2 M-2 10 L10 -2 M6 10 L10 6", stroke: colour("line"), "stroke-width": 1 }))));

    const ends = [...shade.map(([budget]) => budget), right];
    const heights = [...shade.map(([, bound]) => (bound === null ? high : bound)), base];
    let path = `M${x(left)} ${y(low)}`;
    ends.forEach((end, i) => {
      path += ` L${x(i ? ends[i - 1] : left)} ${y(heights[i])} L${x(end)} ${y(heights[i])}`;
    });
    path += ` L${x(right)} ${y(low)} Z`;
    for (const fill of [colour("shade"), "url(#lines)"]) picture.append(svg("path", { d: path, fill }));

    for (const [bytes, text] of labelled(ticks(left, right, Math.max(3, width / 110)), BYTE_UNITS)) {
      picture.append(svg("text", { x: x(bytes), y: height - margin.bottom + 18, "text-anchor": "middle" }, text));
    }
    for (const [cost, text] of labelled(ticks(low, high, 6), SECOND_UNITS)) {
      picture.append(svg("line", { x1: margin.left, x2: width - margin.right, y1: y(cost), y2: y(cost), stroke: colour("faint") }));
      picture.append(svg("text", { x: margin.left - 6, y: y(cost) + 4, "text-anchor": "end" }, text));
    }
    picture.append(svg("text", { x: (margin.left + width) / 2, y: height - 8, "text-anchor": "middle" }, "peak"));
    methods.forEach((method, m) => {
      const line = method.points.map(([peak, cost], i) => `${i ? `H${x(peak)} V` : `M${x(peak)} `}${y(cost)}`).join(" ");
      if (line) picture.append(svg("path", { d: line, "stroke-width": 2, ...look(m) }));
      for (const [peak, cost, about] of method.points) {
        picture.append(svg("text", { x: x(peak), y: y(cost) + 5, "text-anchor": "middle" },
          svg("title", {}, about), SIGNS[m % SIGNS.length]));
      }
    });
    const [peak, cost, about] = data.frontier.this;
    picture.append(svg("circle", { cx: x(peak), cy: y(cost), r: 10, fill: "none", stroke: colour("mark"), "stroke-width": 2 },
      svg("title", {}, about)));
    place.replaceChildren(picture);
  }

  const swatch = (...parts) => svg("svg", { viewBox: "0 0 48 18", "aria-hidden": "true" }, ...parts);
  const line = (m) => svg("path", { d: "M0 9 H48", "stroke-width": 2, ...look(m) });
  const sign = (text) => svg("text", { x: 24, y: 14, "text-anchor": "middle" }, text);
  const names = methods.map((method, m) => [swatch(line(m), sign(SIGNS[m % SIGNS.length])), method.label]);
  names.push([swatch(sign("◯")), "this plan"]);
  names.push([swatch(svg("rect", { width: 48, height: 18, fill: "url(#lines)" })), "proven: no schedule is here"]);
  place.after(
    el("ul", { class: "signs" }, ...names.map(([sign, text]) => el("li", {}, sign, el("span", {}, text)))),
    sortableTable(data.tables.find((table) => table.id === "table-frontier")));
  kept(place, draw);
}

performance.mark("drawn");
