"use strict";

// What all pictures and tables of the page use. Text from the plan enters the page as text nodes only, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const N = data.moments.op.length; // executions, in order: "moments"
const T = data.ops.name.length;
for (const column of [data.values.name, ...["name", "target", "module", "line", "where"].map((name) => data.ops[name])]) {
  column.forEach((i, k) => {
    column[k] = data.texts[i];
  });
}
for (const table of data.tables) { // of each cell its text, and what it sorts by where that is no text
  table.rows = table.rows.map((row) => row.map((cell) => [cell].flat()).map(([i, ...key]) => [data.texts[i], ...key]));
}
const again = data.moments.nth.flatMap((nth, i) => (nth ? [i] : [])); // moments at which an op runs again

/** That a moment writes over a value; empty where it writes over none. */
function runsOver(i) {
  const over = data.texts[data.moments.over[i]];
  return over ? `, over ${over}` : "";
}

/** Whose place something is in, by the index of that name. */
function inPlace(text) {
  return data.texts[text] ? `, in place of ${data.texts[text]}` : "";
}

/** A text in parts between which a line may end: long names have no spaces, but underscores. */
function broken(text) {
  const parts = text.split(/(?<=\w_)(?=[^_])/);
  return parts.flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part]));
}

function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flatMap((child) => (typeof child === "string" ? broken(child) : [child])));
  return element;
}

function button(text, act) {
  return el("button", { type: "button", onclick: act }, text);
}

/** A list of facts; those without words are left out. */
function facts(pairs) {
  const known = pairs.filter(([, text]) => text !== "");
  return el("dl", { class: "facts" }, ...known.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text))));
}

/** A colour by its name in the style, or as it is written. */
function colour(name) {
  return name[0] === "#" ? name : getComputedStyle(root).getPropertyValue("--" + name).trim();
}

function formatBytes(count) {
  return data.written[count];
}
