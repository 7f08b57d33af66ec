// The page: an image goes to POST /v1/search, and its answer is shown. What the service says is put in as text only.

import { ask, hasKey, Refusal, useKey } from "./api.js";
import { drawAngles, drawKappa } from "./charts.js";
import { canBeDrawn, drawnOn } from "./draw.js";
import { angle, cosine, degrees, percent, plain } from "./numbers.js";
import { Thresholds } from "./thresholds.js";
import {
  aboutAngles, aboutImages, aboutKappa, aboutRejected, aboutSet, aboutStale, facts, reason, repeatsText, shown, wordOf,
} from "./words.js";

const SHOWN = 12;
const TINY = 64;
const $ = (id) => document.getElementById(id);

let model = null;
let calibration = null;
let thresholds = null;
let answer = null;
let asking = null;
let pictures = new Map();

async function open() {
  try {
    model = await (await ask("/v1/model")).json();
    calibration = model.calibration === "none" ? null : await (await ask("/v1/calibration")).json();
  } catch (error) {
    complain(error);
    return;
  }
  thresholds = calibration && new Thresholds(calibration);
  hush();
  $("key-form").hidden = true;
  if ($("key-form").contains(document.activeElement)) {
    $("answer").focus();
  }
  $("desk").hidden = false;
  $("uncalibrated").hidden = calibration !== null;
  $("drawing").hidden = !canBeDrawn(model.preprocessing);
  const takesTexts = "max_bytes" in (model.preprocessing ?? {});
  $("asking").hidden = !takesTexts;
  $("drop").hidden = takesTexts;
  if (takesTexts) {
    $("query-title").textContent = "Question or text";
    $("reason").textContent = "Type a text to see whether it is in the gallery.";
  }
  $("accepted").textContent = `JPEG, PNG or WebP, at most ${plain(model.limits.max_bytes / 2 ** 20)}\u00a0MiB`;
  showState(model.calibration, model.gallery_size);
  if (thresholds) {
    openSliders();
  }
}

function showState(state, size) {
  const rates = { none: "not calibrated", current: "calibrated", stale: "calibration is stale" }[state];
  $("served").textContent = `Run ${model.run}: ${size.toLocaleString("en")} items in the gallery, ${rates}.`;
  $("stale").hidden = state !== "stale";
  if (state === "stale") {
    $("stale").textContent = aboutStale(size, calibration);
  }
}

function openSliders() {
  $("thresholds").hidden = false;
  for (const name of ["accept", "flag"]) {
    $(name).max = thresholds[name].rows.length - 1;
    $(name).value = thresholds[name].position;
  }
  $("accept-promise").textContent = calibration.facts.false_accepts;
  if (!thresholds.byKappa) {
    $("flag-label").textContent = "Say “not sure” where so few ordinary queries are as unusual";
  }
  showThresholds();
}

function showThresholds() {
  const [accept, flag] = [thresholds.accept.row, thresholds.flag.row];
  $("accept-value").textContent = `${cosine(accept.cosine)} (${degrees(angle(accept.cosine))})`;
  $("accept-rate").textContent = `At most ${percent(accept.rate)}`;
  $("accept-recall").textContent = percent(accept.recall);
  $("flag-value").textContent = thresholds.byKappa ? plain(flag.kappa) : percent(flag.rate);
  $("flag-rate").textContent = `At most ${percent(flag.rate)}`;
  $("accept").setAttribute("aria-valuetext",
    `cosine above ${cosine(accept.cosine)}, false accepts at most ${percent(accept.rate)}, ` +
      `recall ${percent(accept.recall)}`);
  $("flag").setAttribute("aria-valuetext", `${thresholds.byKappa ? `κ below ${plain(flag.kappa)}, ` : ""}` +
    `false flags at most ${percent(flag.rate)}`);
  $("reset").disabled = !thresholds.moved;
}

async function search(image) {
  hush();
  asking?.abort();
  const mine = (asking = new AbortController());
  if (typeof image !== "string" && image.size > model.limits.max_bytes) {
    complain(new Refusal(`The image has ${plain(image.size / 2 ** 20)} MiB, more than this service takes.`));
    return;
  }
  if (typeof image !== "string") {
    showQuery(image);
  }
  $("answer").setAttribute("aria-busy", "true");
  try {
    const [type, body] = typeof image === "string" ? ["application/json", JSON.stringify({ text: image })]
      : [image.type, image];
    const options = { method: "POST", body, headers: { "Content-Type": type }, signal: mine.signal };
    answer = await (await ask(`/v1/search?k=${model.limits.max_k}`, options)).json();
    pictures.forEach((url) => url.then(URL.revokeObjectURL, () => {}));
    pictures = new Map();
    showState(answer.calibration, answer.gallery_size);
    show(true);
  } catch (error) {
    if (error.name !== "AbortError") {
      forget();
      complain(error);
    }
  } finally {
    if (asking === mine) {
      $("answer").removeAttribute("aria-busy");
    }
  }
}

function showQuery(image) {
  const shown = $("query");
  URL.revokeObjectURL(shown.src);
  shown.onload = () => {
    shown.hidden = false;
    shown.classList.toggle("tiny", shown.naturalWidth < TINY);
  };
  shown.onerror = () => (shown.hidden = true);
  shown.alt = "the image that is looked for";
  shown.src = URL.createObjectURL(image);
  $("drop-text").textContent = "Drop or paste another, or";
}

function forget() {
  answer = null;
  showDecision(null, ["–", "No answer"], "The image was not searched; see the message above.");
  for (const id of ["facts", "charts", "found", "what-if"]) {
    $(id).hidden = true;
  }
}

/** Show the answer under the thresholds of the sliders; `anew` where it has just come. */
function show(anew) {
  const decision = thresholds ? thresholds.decide(answer) : null;
  const words = wordOf(decision);
  // where a slider moves, the region speaks only of another decision, not of every step
  $("decision").setAttribute("aria-live", anew || words[1] !== $("word").textContent ? "polite" : "off");
  showDecision(decision, words, reason(decision, answer, thresholds));
  $("what-if").hidden = !thresholds?.moved;
  if (thresholds?.moved) {
    $("what-if").textContent = `What if: under the thresholds in force the answer is “${wordOf(answer.decision)[1]}”.`;
  }
  showFacts(decision);
  $("charts").hidden = false;
  drawCharts();
  showHits();
  if (anew) {
    $("answer").scrollIntoView({ block: "nearest" });
  }
}

function showDecision(decision, [symbol, word], why) {
  $("decision").className = `decision ${decision ?? "none"}`;
  $("symbol").textContent = symbol;
  $("word").textContent = word;
  $("reason").textContent = why;
}

function showFacts(decision) {
  $("facts").replaceChildren(...facts(decision, answer).map(([name, value, meaning]) =>
    made("div", "", made("dt", "", name), made("dd", "", value), made("dd", "", meaning))));
  $("facts").hidden = false;
}

function nearestRejected() {
  return thresholds ? answer.hits.findIndex((hit) => !thresholds.accepts(hit)) : -1;
}

function drawCharts() {
  $("kappa-figure").hidden = calibration === null;
  if (calibration) {
    const below = thresholds.byKappa ? thresholds.flag.row.kappa : null;
    drawKappa($("kappa-chart"), calibration.kappa, answer.kappa, below);
    $("kappa-text").textContent = aboutKappa(answer, calibration.kappa, thresholds);
  }
  $("angle-figure").hidden = answer.hits.length === 0;
  if (answer.hits.length > 0) {
    const accept = thresholds ? thresholds.accept.row.cosine : null;
    drawAngles($("angle-chart"), answer.hits, answer.credible_cosine, accept, nearestRejected());
    $("angle-text").textContent = aboutAngles(answer, thresholds);
  }
}

function showHits() {
  const nearest = nearestRejected();
  const last = nearest >= SHOWN ? SHOWN - 1 : SHOWN;
  const rows = answer.hits.map((hit, place) => [hit, place]).filter(([, place]) => place < last || place === nearest);
  $("found").hidden = rows.length === 0;
  $("rejected-text").textContent = thresholds ? aboutRejected(answer, nearest) + aboutSet(answer, calibration) : "";
  $("hits").replaceChildren(...rows.map(([hit, place]) => card(hit, place, place === nearest)));
}

function card(hit, place, nearest) {
  const accepted = thresholds?.accepts(hit);
  const tag = thresholds && tagOf(accepted, nearest);
  const kind = accepted === false ? (nearest ? "rejected nearest" : "rejected") : "";
  const name = repeatsText(hit) ? null : made("bdi", "", shown(hit));
  const label = made("span", "label", name, made("span", "rank", `#${place + 1}`));
  return made("li", kind, picture(hit), label, tag,
    made("span", "number", `cosine ${cosine(hit.score)} (${degrees(angle(hit.score))})`),
    made("span", "number", `κ ${plain(hit.kappa)}${aboutImages(hit)}`),
    made("span", "number", hit.credible ? "in the credible cap" : "outside the cap"));
}

function tagOf(accepted, nearest) {
  if (!accepted) {
    return nearest ? made("span", "tag nearest", "✕ nearest rejected") : made("span", "tag", "✕ rejected");
  }
  const undecided = thresholds.decide(answer) === "abstain";
  return undecided ? made("span", "tag", "? close, not judged") : made("span", "tag accepted", "✓ accepted");
}

/** The picture of a hit, fetched with the key, which an address alone would not carry. */
function picture(hit) {
  const frame = made("div", "picture");
  if (typeof hit.metadata.text === "string") {
    frame.classList.add("text");
    frame.append(made("bdi", "", hit.metadata.text));
    return frame;
  }
  if (!hit.thumbnail) {
    frame.append("no picture");
    return frame;
  }
  const address = hit.thumbnail;
  if (!pictures.has(address)) {
    pictures.set(address, ask(address).then((response) => response.blob()).then(URL.createObjectURL));
  }
  const image = made("img");
  image.alt = "";
  image.onload = () => image.classList.toggle("tiny", image.naturalWidth < TINY);
  pictures.get(address).then((url) => {
    image.src = url;
    frame.append(image);
  }, () => frame.append("no picture"));
  return frame;
}

function made(name, kind = "", ...parts) {
  const element = document.createElement(name);
  if (kind) {
    element.className = kind;
  }
  element.append(...parts.filter((part) => part !== null));
  return element;
}

function complain(error) {
  if (!(error instanceof Refusal)) {
    throw error;
  }
  if (error.status === 401) {
    $("key-form").hidden = false;
    $("key").focus();
    if (!hasKey()) {
      return; // the form says what is missing
    }
  }
  $("error").textContent = error.message;
  $("error").hidden = false;
}

function hush() {
  $("error").hidden = true;
}

function take(files) {
  if (model && files.length > 0) {
    search(files[0]);
  }
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  try {
    useKey($("key").value);
  } catch (error) {
    complain(error);
    return;
  }
  open();
});
$("asking").addEventListener("submit", (event) => {
  event.preventDefault();
  search($("text").value);
});
$("file").addEventListener("change", (event) => {
  take([...event.target.files]);
  event.target.value = ""; // so that the same file can be chosen again
});
document.addEventListener("paste", (event) => take([...event.clipboardData.files]));
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dragging");
});
document.addEventListener("dragleave", () => document.body.classList.remove("dragging"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dragging");
  if (event.dataTransfer.files.length === 0) {
    complain(new Refusal("No file was dropped: save the image first, then drop its file."));
  }
  take([...event.dataTransfer.files]);
});
for (const name of ["accept", "flag"]) {
  $(name).addEventListener("input", (event) => {
    thresholds[name].position = Number(event.target.value);
    showThresholds();
    if (answer) {
      show(false);
    }
  });
}
$("reset").addEventListener("click", () => {
  thresholds.reset();
  openSliders();
  if (answer) {
    show(false);
  }
});
const drawing = drawnOn($("canvas"));
$("draw-clear").addEventListener("click", drawing.clear);
$("draw-search").addEventListener("click", async () => {
  const drawn = await drawing.picture();
  if (drawn === null) {
    complain(new Refusal("Nothing is drawn yet."));
  } else {
    search(drawn);
  }
});
new ResizeObserver(() => {
  if (answer && !$("charts").hidden) {
    drawCharts();
  }
}).observe($("charts"));
open();
