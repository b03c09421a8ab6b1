// Where in one arena each copy of a value lies: bytes over the executions of the plan.

{
  const area = el("div", { id: "addresses-area", class: "picture", role: "img", "aria-label": "Addresses",
    "aria-describedby": "addresses-text" });
  const readout = el("p", { id: "addresses-readout", class: "hint", role: "status" });
  const { height: arena, boxes } = data.arena; // [role, first moment, last moment, offset, bytes, name, over]
  const ends = ([, first, last, offset, bytes]) => [first - 0.5, last + 0.5, offset, offset + bytes];
  let shown;

  const picture = chart(area, {
    padding: [8, 14, 0, 0], columns: [[-0.5, N - 0.5], [0, 0]],
    scales: { x: { time: false, range: [-0.5, N - 0.5] }, y: { range: [0, arena || 1] } },
    axes: [{ incrs: WHOLE, values: countedFrom(1), label: "executions, in order" }, { values: inUnits(BYTE_UNITS) }],
    paint(pen) {
      const fills = data.roles.map((role) => hatch(pen, role, 1));
      Object.assign(pen, { strokeStyle: colour("ink"), lineWidth: 0.4 });
      for (const one of boxes) {
        pen.fillStyle = fills[one[0]];
        pen.fillRect(...picture.box(...ends(one)));
        pen.strokeRect(...picture.box(...ends(one)));
      }
    },
    point(x, y) {
      shown = boxes.find((one) => {
        const [left, right, low, high] = ends(one);
        return left <= x && x < right && low <= y && y < high;
      });
      if (!shown) return;
      const [role, first, last, offset, bytes, name, over] = shown;
      picture.frame(...ends(shown));
      const during = first === last ? `execution ${first + 1}` : `executions ${first + 1} to ${last + 1}`;
      readout.replaceChildren(...broken(
        `${data.texts[name]}${inPlace(over)} (${data.roles[role].name}): ${formatBytes(bytes)} from byte ${offset} on, ${during}`));
    },
  });
  picture.u.over.addEventListener("click", () => shown && memory.go(shown[1]));
  document.getElementById("addresses-picture").append(area, readout);
}
