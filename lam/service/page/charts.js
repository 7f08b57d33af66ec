// Two charts in SVG, each with words beside it: the query's κ among calibration queries, and the hits by angle.

import { angle, degrees, plain } from "./numbers.js";

const HEIGHT = 210;
const FLOOR = HEIGHT - 34;
const SIDE = 10;
const CEILING = 46;
const DOT = 5;
const DECADES_BEYOND = 3; // a κ further away than this is drawn at the edge

/** κ of the query on the histogram of the calibration; `below` is null where κ alone does not flag. */
export function drawKappa(place, { counts, edges }, kappa, below) {
  const width = breadth(place);
  const picture = svg(width, "κ of this query on the histogram of the calibration");
  const least = Math.max(kappa, edges[0] / 10 ** DECADES_BEYOND);
  const most = Math.min(kappa, edges.at(-1) * 10 ** DECADES_BEYOND);
  const low = Math.log10(Math.min(least, edges[0])) - 0.03;
  const high = Math.log10(Math.max(most, edges.at(-1))) + 0.03;
  const across = (value) =>
    SIDE + Math.min(1, Math.max(0, (Math.log10(value) - low) / (high - low))) * (width - 2 * SIDE);
  const tallest = Math.max(...counts);
  counts.forEach((count, bin) => {
    const [left, right] = [across(edges[bin]), across(edges[bin + 1])];
    const tall = (count / tallest) * (FLOOR - CEILING);
    const flagged = below !== null && Math.sqrt(edges[bin] * edges[bin + 1]) < below;
    const [kind, wide] = [flagged ? "bar below" : "bar", Math.max(0.5, right - left - 1)];
    add(picture, "rect", { class: kind, x: left, y: FLOOR - tall, width: wide, height: tall });
  });
  axis(picture, width, ticks(low, high).map((value) => [across(value), plain(value)]), "κ (higher: surer)");
  const at = across(kappa);
  add(picture, "line", { class: "query-line", x1: at, x2: at, y1: 20, y2: FLOOR });
  add(picture, "path", { class: "query-mark", d: `M${at - 6} 18 h12 l-6 9 z` });
  beside(picture, at, width, 13, `this query: ${plain(kappa)}`, "strong");
  if (below !== null) {
    limit(picture, across(below), width, `“not sure” below ${plain(below)}`);
  }
  place.replaceChildren(picture);
}

/** The hits by their angle to the query, the credible cap, and the accept threshold; null leaves one out. */
export function drawAngles(place, hits, cap, accept) {
  const width = breadth(place);
  const picture = svg(width, "The hits by their angle to this query");
  const angles = hits.map((hit) => angle(hit.score));
  const furthest = Math.max(...angles, accept === null ? 0 : angle(accept), 1e-3) * 1.06;
  const across = (value) => SIDE + Math.min(1, value / furthest) * (width - 2 * SIDE);
  if (cap !== null) {
    const capped = across(angle(cap));
    add(picture, "rect", { class: "cap", x: SIDE, y: CEILING, width: capped - SIDE, height: FLOOR - CEILING });
    const beyond = angle(cap) > furthest ? ", beyond this picture" : "";
    beside(picture, SIDE, width, 13, `shaded: credible cap, ${degrees(angle(cap))}${beyond}`, "strong");
  }
  if (accept !== null) {
    limit(picture, across(angle(accept)), width, `accepted within ${degrees(angle(accept))}`);
  }
  const lanes = [];
  angles.forEach((value, number) => {
    const x = across(value);
    let lane = lanes.findIndex((last) => x - last > 2 * DOT + 1);
    lane = lane < 0 ? lanes.length : lane;
    lanes[lane] = x;
    const y = FLOOR - 10 - ((lane * (2 * DOT + 1)) % (FLOOR - CEILING - 16));
    const rejected = accept !== null && hits[number].score <= accept;
    add(picture, "circle", { class: rejected ? "hit rejected" : "hit", cx: x, cy: y, r: DOT });
  });
  const marks = even(0, furthest).map((value) => [across(value), degrees(value)]);
  axis(picture, width, marks, "angle to this query");
  place.replaceChildren(picture);
}

function limit(picture, x, width, words) {
  add(picture, "line", { class: "limit", x1: x, x2: x, y1: 34, y2: FLOOR });
  beside(picture, x, width, 31, words, "");
}

function axis(picture, width, marks, words) {
  add(picture, "line", { class: "axis", x1: SIDE, x2: width - SIDE, y1: FLOOR, y2: FLOOR });
  for (const [x, text] of marks) {
    add(picture, "line", { class: "axis", x1: x, x2: x, y1: FLOOR, y2: FLOOR + 4 });
    add(picture, "text", { x, y: FLOOR + 16, "text-anchor": "middle" }).textContent = text;
  }
  add(picture, "text", { x: width - SIDE, y: HEIGHT - 3, "text-anchor": "end" }).textContent = words;
}

/** Text at a line, on the side with room. */
function beside(picture, x, width, y, words, kind) {
  const left = x > width / 2;
  const attributes = { class: kind, x: left ? x - 6 : x + 6, y, "text-anchor": left ? "end" : "start" };
  add(picture, "text", attributes).textContent = words;
}

/** Powers of ten; up to 2.2 decades also twos and fives; below 0.7 decades even steps. */
function ticks(low, high) {
  if (high - low < 0.7) {
    return even(10 ** low, 10 ** high);
  }
  const parts = high - low > 2.2 ? [1] : [1, 2, 5];
  const found = [];
  for (let power = Math.floor(low); power <= high; power += 1) {
    found.push(...parts.map((part) => part * 10 ** power));
  }
  return found.filter((value) => Math.log10(value) >= low && Math.log10(value) <= high);
}

/** About five round numbers. */
function even(least, most) {
  const rough = (most - least) / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((part) => part * power).find((size) => size >= rough);
  const first = Math.ceil(least / step);
  return Array.from({ length: Math.floor(most / step) - first + 1 }, (_, number) => (first + number) * step);
}

function breadth(place) {
  return Math.max(240, place.clientWidth);
}

function svg(width, label) {
  return element("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label });
}

function add(parent, name, attributes) {
  return parent.appendChild(element(name, attributes));
}

function element(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [attribute, value] of Object.entries(attributes)) {
    made.setAttribute(attribute, typeof value === "number" ? value.toFixed(1) : value);
  }
  return made;
}
