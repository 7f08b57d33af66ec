// The page sends a query to POST /v1/search and shows the answer. Texts of the service are inserted as text, never as HTML.
// A query is one of { file }, { text } and { item }, a hit of the gallery.

import { ask, base64Of, hasKey, Refusal, useKey } from "./api.js";
import { cellsOf, csvOf, filesOf, imagesOf, searchAll } from "./bulk.js";
import { drawAngles, drawKappa } from "./charts.js";
import { canBeDrawn, drawnOn } from "./draw.js";
import { angle, cosine, degrees, percent, plain } from "./numbers.js";
import { Thresholds } from "./thresholds.js";
import {
  aboutAgreement, aboutAngles, aboutCut, aboutImages, aboutInterval, aboutKappa, aboutPair, aboutSet, aboutStale,
  aboutUnseen, aboutWatch, doubtOf, facts, judgementsOf, LONGEST_TEXT, metadataOf, named, probabilityOf, promiseOf,
  questionOf, reason, repeatsText, shown, statisticOf, tamed, textOf, verdictOf,
} from "./words.js";

const SHOWN = 12;
const TINY = 64;
const MANY_LETTERS = 60; // too many to be large
const IN_FORCE = ["kappa_below", "far", "ood", "conformal_miss", "wrong"];
// a search by an item has no features, so another score may decide and flag
const IN_FORCE_OF_INPUTS = [...IN_FORCE, "accept", "accept_above", "flag", "flag_above"];
const SAID = ["probability", "doubt", "promise", "what-if", "judging", "judged"];
const JSON_TYPE = { "Content-Type": "application/json" };
const $ = (id) => document.getElementById(id);

let model = null;
let calibration = null;
let thresholds = null;
let query = null;
let answer = null;
let asking = null;
let comparing = null;
let searching = null;
let rows = [];
const pictures = new Map();

async function open() {
  let samples;
  try {
    model = await (await ask("/v1/model")).json();
    const current = model.calibration === "none" ? null : await (await ask("/v1/calibration")).json();
    ({ samples } = await (await ask("/v1/samples")).json());
    goBy(current);
  } catch (error) {
    complain(error);
    return;
  }
  say("error", "");
  $("key-form").hidden = true;
  if ($("key-form").contains(document.activeElement)) {
    $("answer").focus();
  }
  $("question").textContent = questionOf(model.gallery);
  document.title = `${questionOf(model.gallery)} – lam`;
  $("desk").hidden = false;
  $("drawing").hidden = !canBeDrawn(model.preprocessing);
  for (const id of ["asking", "other-asking"]) {
    $(id).hidden = !takesTexts();
  }
  for (const id of ["drop", "other-choosing"]) {
    $(id).hidden = takesTexts();
  }
  if (takesTexts()) {
    $("query-title").textContent = model.answers ? "Question" : "Question or text";
    $("reason").textContent = "Type a text to see what the gallery says.";
  }
  if (model.answers) {
    $("comparing-title").textContent = "Compare it with an answer";
    $("other-title").textContent = "The answer";
  }
  $("accepted").textContent = `JPEG, PNG or WebP, at most ${plain(model.limits.max_bytes / 2 ** 20)}\u00a0MiB`;
  showSamples(samples);
  showState(model.calibration, model.gallery_size);
  showWatch(model.promise?.state);
}

function takesTexts() {
  return "max_bytes" in (model.preprocessing ?? {});
}

/** Use a calibration, or none (null). */
function goBy(current) {
  calibration = current;
  thresholds = calibration && new Thresholds(calibration);
  $("uncalibrated").hidden = calibration !== null;
  $("thresholds").hidden = calibration === null;
  if (thresholds) {
    openSliders();
  }
}

function showSamples(samples) {
  $("samples").hidden = samples.length === 0;
  $("samples-list").classList.toggle("texts", samples.some(({ text }) => text !== null));
  let known = 0;
  $("samples-list").replaceChildren(...samples.map((sample) => {
    const name = sample.stranger ? "A stranger" : `Sample ${(known += 1)}`;
    const button = made("button", "sample");
    button.type = "button";
    if (sample.text !== null) {
      button.append(made("bdi", "", tamed(sample.text, LONGEST_TEXT)));
      button.addEventListener("click", () => search({ text: sample.text }));
    } else {
      const file = ask(sample.image).then((response) => response.blob());
      button.append(pictureOf(file.then(URL.createObjectURL), name));
      button.addEventListener("click", () => file.then((loaded) => search({ file: loaded }), complain));
    }
    return made("li", "", button, sample.stranger ? made("span", "muted small", "stranger") : null);
  }));
}

function showState(state, size) {
  const rates = { none: "not calibrated", current: "calibrated", stale: "calibration is stale" }[state];
  $("served").textContent = `Run ${model.run}: ${size.toLocaleString("en")} items in the gallery, ${rates}.`;
  say("stale", state === "stale" ? aboutStale(size, calibration) : "");
}

/** Show whether the promises hold. */
function showWatch(state) {
  say("watch", aboutWatch(state, !$("stale").hidden));
  $("watch").className = `badge ${(state ?? "").replace(" ", "-")}`;
}

/** Offer to judge an answer that counts. */
function offerJudging(answered) {
  say("judged", "");
  $("judging").hidden = answered.answer_id === null;
  $("judging").replaceChildren(...judgementsOf(answered).map(([words, told]) => {
    const button = made("button", "quiet", words);
    button.type = "button";
    button.addEventListener("click", () => judge(answered, told));
    return button;
  }));
}

async function judge({ answer_id }, told) {
  $("judging").hidden = true;
  try {
    const body = JSON.stringify({ answer_id, ...told });
    showWatch((await (await ask("/v1/feedback", { method: "POST", body, headers: JSON_TYPE })).json()).promise);
    say("judged", "Thank you: the answer is judged.");
  } catch (error) {
    complain(error);
  }
}

function openSliders() {
  for (const name of ["accept", "flag"]) {
    $(name).max = thresholds[name].rows.length - 1;
    $(name).value = thresholds[name].position;
  }
  const [what, , side] = statisticOf(thresholds.by, 0, thresholds.name);
  $("accept-label").textContent = `Answer where ${what} is ${side}`;
  $("accept-promise").textContent = calibration.facts.false_accepts;
  $("flag-label").textContent =
    `Say “not sure” where ${thresholds.byKappa ? "κ is below" : "so few ordinary queries are as unusual"}`;
  showThresholds();
}

function showThresholds() {
  const [accept, flag] = [thresholds.accept.row, thresholds.flag.row];
  const [what, limit, side] = statisticOf(thresholds.by, accept.threshold, thresholds.name);
  $("accept-value").textContent = limit + (thresholds.by === "cosine" ? ` (${degrees(angle(accept.threshold))})` : "");
  $("accept-rate").textContent = `At most ${percent(accept.rate)}`;
  $("accept-recall").textContent = percent(accept.recall);
  $("flag-value").textContent = thresholds.byKappa ? plain(flag.kappa) : percent(flag.rate);
  $("flag-rate").textContent = `At most ${percent(flag.rate)}`;
  $("accept").setAttribute("aria-valuetext",
    `${what} ${side} ${limit}, false accepts at most ${percent(accept.rate)}, ` +
      `recall ${percent(accept.recall)}`);
  $("flag").setAttribute("aria-valuetext", `${thresholds.byKappa ? `κ below ${plain(flag.kappa)}, ` : ""}` +
    `false flags at most ${percent(flag.rate)}`);
  $("reset").disabled = !thresholds.moved;
}

async function search(asked) {
  say("error", "");
  if (isTooLarge(asked.file)) {
    return;
  }
  asking?.abort();
  const mine = (asking = new AbortController());
  $("answer").setAttribute("aria-busy", "true");
  try {
    const [path, options] = request(asked);
    const { signal } = mine;
    const answered = await (await ask(`${path}?k=${model.limits.max_k}`, { ...options, signal })).json();
    await keepUp(answered.threshold, asked.item ? IN_FORCE : IN_FORCE_OF_INPUTS, signal);
    answer = answered;
    query = asked;
    dropPictures();
    showAsked($("asked"), asked);
    $("compared").hidden = true;
    showState(answer.calibration, answer.gallery_size);
    if (answer.promise) {
      showWatch(answer.promise);
    }
    offerJudging(answer);
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

/** Load the calibration of an answer, if it has changed since the last answer. */
async function keepUp(inForce, names, signal) {
  if (names.every((name) => inForce?.[name] === calibration?.threshold[name])) {
    return;
  }
  goBy(inForce && await (await ask("/v1/calibration", { signal })).json());
}

function isTooLarge(file) {
  if (file === undefined || file.size <= model.limits.max_bytes) {
    return false;
  }
  complain(new Refusal(`The image has ${plain(file.size / 2 ** 20)} MiB, more than this service takes.`));
  return true;
}

function request({ file, text, item }) {
  if (item) {
    return [`/v1/items/${encodeURIComponent(item.id)}/search`, {}];
  }
  const [headers, body] = file ? [{ "Content-Type": file.type }, file] : [JSON_TYPE, JSON.stringify({ text })];
  return ["/v1/search", { method: "POST", headers, body }];
}

/** Show the query beside its answer. */
function showAsked(place, { file, text, item }) {
  const part = item ? picture(item)
    : file ? pictureOf(Promise.resolve(URL.createObjectURL(file)), "the image that is looked for", URL.revokeObjectURL)
      : made("bdi", "", tamed(text, LONGEST_TEXT));
  place.classList.toggle("text", (text ?? (item ? textOf(item) : null)) !== null);
  place.replaceChildren(part);
  place.hidden = false;
}

function forget() {
  answer = query = null;
  showDecision("decision", "none", "–", "No answer", "The query was not searched; see the message above.");
  for (const id of [...SAID, "asked", "numbers", "comparing", "found"]) {
    $(id).hidden = true;
  }
}

/** Show the answer at the thresholds of the sliders; `anew` for a new answer. */
function show(anew) {
  const decision = thresholds ? thresholds.decide(answer) : null;
  const [tone, sign, word] = verdictOf(decision, answer, model.gallery);
  // a moving slider is read aloud only if the decision changes
  $("decision").setAttribute("aria-live", anew || word !== $("word").textContent ? "polite" : "off");
  const why = reason(decision, answer, thresholds) + aboutCut(answer);
  showDecision("decision", tone, sign, word, why);
  const [value, meaning] = probabilityOf(decision, answer, calibration) ?? ["", ""];
  $("probability").hidden = !value;
  $("probability-value").textContent = value;
  $("probability-meaning").textContent = meaning;
  say("doubt", doubtOf(answer));
  say("promise", calibration ? promiseOf(decision, calibration, thresholds.moved) : "");
  say("unseen", aboutUnseen(answer));
  const [, , inForce] = verdictOf(answer.decision, answer, model.gallery);
  say("what-if", thresholds?.moved && decision ? `What if: under the thresholds in force the answer is: ${inForce}.` : "");
  $("facts").replaceChildren(...facts(decision, answer, calibration).map(([name, number, about]) =>
    made("div", "", made("dt", "", name), made("dd", "", number), made("dd", "", about))));
  $("numbers").hidden = false;
  $("comparing").hidden = query.item !== undefined;
  drawCharts();
  showHits(decision);
  const { top, bottom } = $("decision").getBoundingClientRect();
  if (anew && (top < 0 || bottom > window.innerHeight)) {
    $("answer").scrollIntoView();
  }
}

/** Show the decision on a query or a pair: a sign, words and the reason. */
function showDecision(place, tone, symbol, word, why) {
  $(place).className = `decision ${tone}`;
  $(place).classList.toggle("lengthy", word.length > MANY_LETTERS);
  for (const [name, text] of Object.entries({ symbol, word, why })) {
    $(place).querySelector(`.${name}`).textContent = text;
  }
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
    const accept = answer.accept === "cosine" ? thresholds.limitOf(answer) : null;
    const cap = answer.hits.some((hit) => hit.credible) ? answer.credible_cosine : null;
    drawAngles($("angle-chart"), answer.hits, cap, accept);
    $("angle-text").textContent = aboutAngles(answer, accept);
  }
}

function showHits(decision) {
  const hits = answer.hits.slice(0, SHOWN);
  $("found").hidden = hits.length === 0;
  const agreement = model.gallery === "classes" ? aboutAgreement(hits) : "";
  $("hits-text").textContent = agreement + (calibration ? aboutSet(decision, answer, calibration) : "");
  $("hits").replaceChildren(...hits.map((hit, place) => card(hit, place, place === 0 ? tagOf(decision) : null)));
}

/** Drop the pictures of the last answer, because items may have new ones. */
function dropPictures() {
  for (const url of pictures.values()) {
    url.then(URL.revokeObjectURL, () => {});
  }
  pictures.clear();
}

/** A hit; only the first is tagged as accepted or not, because it alone decides the answer. */
function card(hit, place, tag) {
  const name = repeatsText(hit) ? null : made("bdi", "", shown(hit));
  const open = made("button", "open", picture(hit));
  open.type = "button";
  open.setAttribute("aria-label", `Search by ${named(hit)}, hit ${place + 1}`);
  open.addEventListener("click", () => search({ item: hit }));
  return made("li", "", open, made("span", "label", name, made("span", "rank", `#${place + 1}`)), tag,
    made("span", "number", `cosine ${cosine(hit.score)} (${degrees(angle(hit.score))})`),
    hit.interval ? made("span", "number", aboutInterval(hit.interval)) : null,
    made("span", "number", `κ ${plain(hit.kappa)}${aboutImages(hit)}`),
    made("dl", "facts", ...metadataOf(hit).map(([key, value]) =>
      made("div", "", made("dt", "", key), " ", made("dd", "", made("bdi", "", value))))));
}

function tagOf(decision) {
  if (decision === "match") {
    return made("span", "tag accepted", "✓ accepted");
  }
  return decision === "unknown" ? made("span", "tag", "✕ not accepted") : null;
}

/** The picture of a hit, or its text. */
function picture(hit) {
  if (textOf(hit) !== null) {
    return made("span", "picture text", made("bdi", "", textOf(hit)));
  }
  if (!hit.thumbnail) {
    return made("span", "picture", "no picture");
  }
  if (!pictures.has(hit.thumbnail)) {
    pictures.set(hit.thumbnail, ask(hit.thumbnail).then((response) => response.blob()).then(URL.createObjectURL));
  }
  return pictureOf(pictures.get(hit.thumbnail), "");
}

/** A picture from an address; `done` is called with it once it is drawn. */
function pictureOf(address, name, done = () => {}) {
  const frame = made("span", "picture");
  const image = made("img");
  image.alt = name;
  image.onload = () => {
    image.classList.toggle("tiny", image.naturalWidth < TINY);
    done(image.src);
  };
  image.onerror = () => frame.replaceChildren("no picture");
  address.then((url) => {
    image.src = url;
    frame.append(image);
  }, () => frame.append("no picture"));
  return frame;
}

async function compare(other) {
  say("error", "");
  if (isTooLarge(other.file)) {
    return;
  }
  comparing?.abort();
  const { signal } = (comparing = new AbortController());
  const [mine, first] = [query, answer];
  try {
    const body = JSON.stringify({ first: await partOf(mine), second: await partOf(other) });
    const pair = await (await ask("/v1/verify", { method: "POST", body, headers: JSON_TYPE, signal })).json();
    if (answer !== first) {
      return;
    }
    showDecision("compared", ...aboutPair(pair, model.answers));
    showAsked($("other-asked"), other);
    $("compared").hidden = false;
  } catch (error) {
    if (error.name !== "AbortError") {
      $("compared").hidden = true;
      complain(error);
    }
  }
}

/** One part of a pair as JSON. */
async function partOf({ file, text }) {
  if (!file) {
    return { text };
  }
  return { image: await base64Of(file) };
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
  say("error", error.status === 401 ? "That is not the key of this service." : error.message);
  $("error").scrollIntoView({ block: "nearest" });
}

/** Show a sentence in its place, or hide the place. */
function say(place, sentence) {
  $(place).textContent = sentence;
  $(place).hidden = !sentence;
}

/** Call a function at the submission of a form, and stay on the page. */
function onSubmit(form, act) {
  $(form).addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });
}

/** Call a function with the chosen files; the same file can be chosen again. */
function onChoice(input, act) {
  $(input).addEventListener("change", ({ target }) => {
    act([...target.files]);
    target.value = "";
  });
}

function take([file]) {
  if (model && file) {
    search({ file });
  }
}

/** Search for the images of a folder, and show a row of each. */
async function takeAll(files) {
  const [images, others] = imagesOf(files);
  say("error", "");
  if (images.length === 0) {
    complain(new Refusal("There is no JPEG, PNG or WebP file in this folder."));
    return;
  }
  searching?.abort();
  const { signal } = (searching = new AbortController());
  rows = [];
  $("bulk-rows").replaceChildren();
  $("bulk").hidden = $("bulk-stop").hidden = false;
  $("bulk-csv").disabled = true;
  const progress = (end) => {
    const left = others ? `; left out: ${others.toLocaleString("en")} other ${others === 1 ? "file" : "files"}` : "";
    const counts = `${rows.length.toLocaleString("en")} of ${images.length.toLocaleString("en")} images`;
    $("bulk-progress").textContent = `${counts}${end}${left}.`;
  };
  progress("");
  $("bulk").scrollIntoView({ block: "nearest" });
  try {
    await searchAll(images, model.limits, (row) => {
      if (signal.aborted) {
        return;
      }
      rows.push(row);
      $("bulk-rows").append(made("tr", row.decision, ...cellsOf(row).map((cell) => made("td", "", made("bdi", "", cell)))));
      progress("");
    }, signal);
    progress(", done");
  } catch (error) {
    if (searching.signal !== signal) {
      return; // another folder was dropped
    }
    progress(", stopped");
    if (error.name !== "AbortError") {
      complain(error);
    }
  }
  $("bulk-stop").hidden = true;
  $("bulk-csv").disabled = rows.length === 0;
}

function download() {
  const link = made("a");
  link.href = URL.createObjectURL(new Blob([csvOf(rows)], { type: "text/csv" }));
  link.download = "decisions.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

onSubmit("key-form", () => {
  try {
    useKey($("key").value);
  } catch (error) {
    complain(error);
    return;
  }
  open();
});
onSubmit("asking", () => search({ text: $("text").value }));
onSubmit("other-asking", () => compare({ text: $("other-text").value }));
onChoice("file", take);
onChoice("folder", (files) => takeAll(files.map((file) => ({ path: file.webkitRelativePath || file.name, file }))));
$("bulk-stop").addEventListener("click", () => searching.abort());
$("bulk-csv").addEventListener("click", download);
onChoice("other", ([file]) => file && compare({ file }));
document.addEventListener("paste", (event) => take([...event.clipboardData.files]));
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dragging");
});
document.addEventListener("dragleave", () => document.body.classList.remove("dragging"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dragging");
  const folder = model && !takesTexts() && filesOf(event.dataTransfer);
  if (folder) {
    folder.then(takeAll);
    return;
  }
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
const drawing = drawnOn($("canvas"), () => model.preprocessing);
$("draw-clear").addEventListener("click", drawing.clear);
$("draw-search").addEventListener("click", async () => {
  const drawn = await drawing.picture();
  if (drawn === null) {
    complain(new Refusal("Nothing is drawn yet."));
  } else {
    search({ file: drawn });
  }
});
new ResizeObserver(() => {
  if (answer) {
    drawCharts();
  }
}).observe($("charts"));
open();
