// Where in one arena each copy of a value lies: bytes over the executions of the plan.

const addresses = (() => {
  const area = el("div", { id: "addresses-area", class: "picture", role: "img", "aria-label": "Addresses",
    "aria-describedby": "addresses-text" });
  const below = el("canvas", { "aria-hidden": "true" });
  const above = el("canvas", { "aria-hidden": "true" });
  area.append(below, above);
  const readout = el("p", { id: "addresses-readout", class: "hint", role: "status" });
  const margin = { left: 74, right: 14, top: 8, bottom: 38 };
  const { height: arena, boxes } = data.arena; // [role, first moment, last moment, offset, bytes, name, over]

  /** The picture within its margins, in pixels of the page. */
  function scales() {
    const { width, height } = area.getBoundingClientRect();
    const [wide, high] = [width - margin.left - margin.right, height - margin.top - margin.bottom];
    const x = (i) => margin.left + i * wide / N;
    const y = (bytes) => margin.top + high * (1 - bytes / (arena || 1));
    return { wide, high, x, y };
  }

  function axes(pen) {
    const { wide, high, x, y } = scales();
    pen.fillStyle = colour("soft");
    pen.strokeStyle = colour("faint");
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (const [bytes, text] of labelled(ticks(0, arena, 6), BYTE_UNITS)) {
      pen.strokeRect(margin.left, y(bytes), wide, 0);
      pen.fillText(text, margin.left - 6, y(bytes));
    }
    pen.textBaseline = "top";
    pen.textAlign = "center";
    for (const i of ticks(0, N - 1, wide / 110).filter(Number.isInteger)) {
      pen.fillText(String(i + 1), x(i + 0.5), margin.top + high + 4);
    }
    pen.fillText("executions, in order", margin.left + wide / 2, margin.top + high + 20);
  }

  function draw() {
    const { pen } = cleared(below);
    const { x, y } = scales();
    axes(pen);
    const fills = data.roles.map((role) => hatch(pen, role, 1));
    pen.strokeStyle = colour("ink");
    pen.lineWidth = 0.4;
    for (const [role, first, last, offset, bytes] of boxes) {
      const corner = [x(first), y(offset + bytes), x(last + 1) - x(first), y(offset) - y(offset + bytes)];
      pen.fillStyle = fills[role];
      pen.fillRect(...corner);
      pen.strokeRect(...corner);
    }
    cleared(above);
  }

  function show(box) {
    const { pen } = cleared(above);
    const { x, y } = scales();
    const [role, first, last, offset, bytes, name, over] = box;
    pen.strokeStyle = colour("mark");
    pen.lineWidth = 2;
    pen.strokeRect(x(first), y(offset + bytes), x(last + 1) - x(first), y(offset) - y(offset + bytes));
    const during = first === last ? `execution ${first + 1}` : `executions ${first + 1} to ${last + 1}`;
    readout.replaceChildren(...broken(
      `${data.texts[name]}${inPlace(over)} (${data.roles[role].name}): ${formatBytes(bytes)} from byte ${offset} on, ${during}`));
  }

  function at(event) {
    const bounds = area.getBoundingClientRect();
    const { x, y } = scales();
    const [px, py] = [event.clientX - bounds.left, event.clientY - bounds.top];
    return boxes.find(([, first, last, offset, bytes]) =>
      x(first) <= px && px < x(last + 1) && y(offset + bytes) <= py && py < y(offset));
  }

  area.addEventListener("pointermove", (event) => {
    const box = at(event);
    if (box) show(box);
  });
  area.addEventListener("click", (event) => {
    const box = at(event);
    if (box) memory.go(box[1]);
  });
  document.getElementById("addresses-picture").append(area, readout);
  kept(area, draw);
})();
