// Sentences about an answer. `thresholds` is null for a run without calibration. `kind` is the gallery's kind: `classes`
// or `identities`. `answers` tells whether the items of the gallery answer questions.

import { angle, cosine, degrees, level, percent, plain } from "./numbers.js";

const LONGEST = 40;
const LONGEST_VALUE = 80;
export const LONGEST_TEXT = 200;
const FEW = 4;
const SURE = 0.8; // least probability of a verdict without “probably”
const LIKELY = 0.5;
const NONE = 0.2; // P(known) below which the verdict is “probably none of these”
const COSINES = ["cosine", "mean_cosine"]; // scores for which higher is better
const TURNING = /[\p{Cc}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/gu; // control and direction characters
const QUESTIONS = { classes: "Which is it?", identities: "Is it here?" };
const UNJUDGED = ["?", () => "Not sure"];
const VERDICTS = {
  classes: {
    match: ["✓", (name) => `It is ${name}`],
    likely: ["≈", (name) => `Probably ${name}`],
    perhaps: ["≈", (name) => `Perhaps ${name}, or none of these`],
    unknown: ["✕", () => "Probably none of these"],
    abstain: UNJUDGED,
  },
  identities: {
    match: ["✓", (name) => `Yes: ${name}`],
    likely: ["≈", (name) => `Probably: ${name}`],
    perhaps: ["≈", (name) => `Perhaps: ${name}`],
    unknown: ["✕", () => "Not recognised"],
    abstain: UNJUDGED,
  },
};

export function questionOf(kind) {
  return QUESTIONS[kind];
}

/** A decision as a tone, a sign and words. */
export function verdictOf(decision, answer, kind) {
  if (!answer.hits.length) {
    return ["none", "–", "The gallery is empty"];
  }
  const tone = toneOf(decision, answer, kind);
  const [sign, words] = VERDICTS[kind][tone] ?? ["–", () => (isUnjudged(answer) ? "Items like it" : "No decision")];
  return [tone, sign, words(named(answer.hits[0], repeatsText(answer.hits[0]) ? LONGEST_TEXT : LONGEST))];
}

/** The tone of a verdict: the more probable a match is, the surer it sounds. */
function toneOf(decision, { probability, known }, kind) {
  if (decision === "match") {
    return probability < LIKELY ? "perhaps" : probability >= SURE ? "match" : "likely";
  }
  return decision === "unknown" && kind === "classes" && known >= NONE ? "perhaps" : decision ?? "none";
}

/** Whether an answer of a calibrated run has no decision; a search by an answer to questions has none. */
function isUnjudged(answer) {
  return answer.decision === null && answer.calibration !== "none";
}

/** The probability that the first hit is right, and words for it; null without a hit or a verdict. */
export function probabilityOf(decision, answer, calibration) {
  if (decision === null || decision === "abstain" || !answer.hits.length) {
    return null;
  }
  return [percent(answer.probability), `that ${named(answer.hits[0])} is right${condition(calibration)}`];
}

/** The share of queries without a match that a probability assumes, in words. */
function condition({ share_without_match: share }) {
  return share === null ? "" : `, where ${share === 0.5 ? "half" : percent(share)} of all queries have no match`;
}

/** The deciding statistic: its name, a value in words, and the side of a limit (above or below) that is accepted. */
export function statisticOf(by, value, name = by.replaceAll("_", " ")) {
  return by === "probability" ? ["the probability", level(value), "above"]
    : COSINES.includes(by) ? [`the ${name}`, cosine(value), "above"] : [`the ${name}`, plain(-value), "below"];
}

/** A text from clients, shortened, and without characters that change the direction of writing. */
export function tamed(text, longest = LONGEST) {
  const signs = [...text.replace(TURNING, "\ufffd")];
  return signs.length > longest ? `${signs.slice(0, longest - 1).join("")}…` : signs.join("");
}

/** The name of a hit: its label or id, or its text if the label repeats it. */
export function shown(hit, longest = LONGEST) {
  return tamed(repeatsText(hit) ? textOf(hit) : hit.label || hit.id, longest);
}

/** The content of a text item; null for an image, which has a thumbnail. */
export function textOf({ thumbnail, metadata: { text } }) {
  return typeof text === "string" && !thumbnail ? text : null;
}

/** Whether the label repeats the text or its beginning, as labels of text classes do. */
export function repeatsText(hit) {
  const { label } = hit, text = textOf(hit);
  const [beginning, ...cut] = label.split(/… \([0-9a-f]{8}\)$/u);
  return text !== null && (cut.length ? text.startsWith(beginning) : text === label);
}

/** The name of a hit within a sentence, isolated from its direction of writing. */
export function named(hit, longest = LONGEST) {
  const name = `\u2068${shown(hit, longest)}\u2069`;
  return hit.label ? `“${name}”` : `item ${name}`;
}

/** The reason of a decision. */
export function reason(decision, answer, thresholds) {
  const best = answer.hits[0];
  if (!best) {
    return "There is no item to compare the query with.";
  }
  const nearest = `the nearest item, ${named(best)}, has a cosine of ${cosine(best.score)}`;
  if (decision === null) {
    return isUnjudged(answer) ? "It is an answer, not a question, so there is no decision."
      : `The run is not calibrated: ${nearest}.`;
  }
  const { accept, flag, byKappa } = thresholds;
  if (decision === "abstain") {
    const why = byKappa ? `its κ, ${plain(answer.kappa)}, is below ${plain(flag.row.kappa)}`
      : `of ordinary queries, ${percent(answer.p_value)} are as unusual as this one`;
    return `This is too unusual to be judged: ${why}. At most ${percent(flag.row.rate)} of ordinary queries are left ` +
      "undecided like this.";
  }
  const limit = thresholds.limitOf(answer);
  const others = "Of searches with no match in the gallery";
  const { name } = thresholds;
  const [what, value] = statisticOf(answer.accept, answer.statistic, answer.accept === thresholds.by ? name : undefined);
  const stands = answer.accept === "probability" ? "this probability" : `${what}, ${value},`;
  const [, edge, side] = limit === null ? [] : statisticOf(answer.accept, limit);
  if (decision === "match") {
    const why = limit === null ? "" : `It is answered because ${stands} is ${side} ${edge}. `;
    return `${why}${others} at most ${percent(accept.row.rate)} look that good.`;
  }
  const why = limit === null ? "" : `It would be answered if ${stands} were ${side} ${edge}. `;
  return `${why}${others} ${percent(answer.false_accept)} look as good as this one.`;
}

/** For which queries the rates of a decision hold; empty without a verdict. */
export function promiseOf(decision, { facts: { false_accepts: whom, answers_wrong: stream }, threshold: { wrong } }, moved) {
  if (decision !== "match" && decision !== "unknown") {
    return "";
  }
  const answers = decision === "match" && wrong !== null && !moved
    ? ` Of the answered queries, at most ${percent(wrong)} are wrong, with a confidence of 95 %: ${stream}.` : "";
  return `This rate holds ${whom}.${answers}`;
}

/** The assumption behind the p-values of an answer, if it has any. */
export function aboutUnseen({ unseen }) {
  return unseen === null ? "" : "Both p-values assume that the calibrated gallery is a random sample of incoming items, in " +
    "random order. A gallery that somebody composed is no such sample.";
}

/** Why the query is uncertain, if the encoder has learnt it. */
export function doubtOf(answer) {
  return answer.doubt ? `“${capital(answer.doubt)}.”` : "";
}

/** A note if only a part of the query was read. */
export function aboutCut(answer) {
  return answer.text_cut ? " Only the beginning of the text was read." : "";
}

/** The numbers of an answer: name, value and meaning. */
export function facts(decision, answer, calibration) {
  const meaning = `concentration: higher is surer${answer.p_known === null ? "" : "; the next three explain it"}`;
  const numbers = [];
  if (probabilityOf(decision, answer, calibration)) {
    const right = `that ${named(answer.hits[0])} is right, if the gallery holds it`;
    numbers.push(["P(right | known)", percent(answer.right_if_known), right]);
    numbers.push(["P(known)", percent(answer.known), `that the gallery holds it at all${condition(calibration)}`]);
    if (answer.accept !== "probability") {
      const [what, value] = statisticOf(answer.accept, answer.statistic, calibration.accept_name);
      numbers.push(["Decides", value, what]);
    }
    numbers.push(["As good by chance", percent(answer.false_accept), "of searches with no match in the gallery"]);
  }
  if (answer.unseen) {
    numbers.push(["New class", plain(answer.unseen.p_new), "p-value: small means that its class is in the gallery"]);
    numbers.push(["Class here", plain(answer.unseen.p_in_gallery), "p-value: small means that its class is not there"]);
  }
  const bound = answer.kappa_capped ? (answer.kappa > 1 ? "≥ " : "≤ ") : ""; // both ends of the range are bounds
  numbers.push(["κ", `${bound}${plain(answer.kappa)}`, meaning]);
  if (answer.p_known !== null) {
    numbers.push(["κ of the posterior", plain(answer.kappa_epistemic), "small: training leaves the embedding open"]);
    numbers.push(["Seen before", percent(answer.p_known), "small: I have not seen such a thing"]);
    numbers.push(["κ of ambiguity", plain(answer.kappa_aleatoric), "small: this could be several things"]);
  }
  if (answer.hits.length > 0) {
    const { score } = answer.hits[0];
    numbers.push(["Best cosine", cosine(score), `an angle of ${degrees(angle(score))}`]);
  }
  if (within(answer)) {
    const cap = degrees(angle(answer.credible_cosine));
    numbers.push(["Credible cap", cap, `holds ${within(answer)} of the nearest ${answer.hits.length}`]);
  }
  return numbers;
}

export function aboutKappa(answer, histogram, thresholds) {
  const { counts, edges } = histogram;
  const total = counts.reduce((sum, count) => sum + count, 0);
  const below = counts.reduce((sum, count, bin) => sum + (edges[bin + 1] <= answer.kappa ? count : 0), 0);
  const flag = thresholds.byKappa ? `; below ${plain(thresholds.flag.row.kappa)} the answer is “not sure”` : "";
  return `κ of this query is ${plain(answer.kappa)}. Of ${total} queries of the calibration about ${below || "none"} ` +
    `${below === 1 ? "has" : "have"} a lower κ${flag}.`;
}

/** `limit`: the accept threshold if it is on the cosine, else null. */
export function aboutAngles(answer, limit) {
  const accepted = answer.hits.filter((hit) => hit.score > limit).length;
  const counts = [
    ...(within(answer) ? [`${within(answer)} within the credible cap`] : []),
    ...(limit !== null ? [`${accepted || "none"} above the accept threshold (filled)`] : []),
  ];
  return (counts.length ? `Of the ${answer.hits.length} nearest items there are ${counts.join(", and ")}. ` : "") +
    (within(answer) ? "By κ, what this query shows lies within the cap with probability 95 %." : "");
}

/** A note behind the κ of a hit: how many images or texts it has, and whether it is uncertain. */
export function aboutImages(hit) {
  const { images, uncertain } = hit, what = textOf(hit) === null ? "images" : "texts";
  return `${images > 1 ? ` of ${images} ${what}` : ""}${uncertain ? " (uncertain: below the flag)" : ""}`;
}

/** Id and metadata of a hit, without the content of a text item: shortened names and values. */
export function metadataOf(hit) {
  const { id, metadata } = hit;
  const rows = Object.entries(metadata).filter(([name]) => name !== "text" || textOf(hit) === null);
  const few = rows.slice(0, FEW).map(([name, value]) =>
    [tamed(name), tamed(typeof value === "string" ? value : JSON.stringify(value), LONGEST_VALUE)]);
  return [["id", tamed(id)], ...few, ...(rows.length > FEW ? [["and", `${rows.length - FEW} more`]] : [])];
}

/** How many hits have the class of the first. */
export function aboutAgreement(hits) {
  const agreeing = hits.filter((hit) => hit.label === hits[0].label).length;
  if (!hits[0].label || hits.length < 2) {
    return "";
  }
  return `${agreeing === hits.length ? "All" : agreeing} of the ${hits.length} nearest items are ${named(hits[0])}.`;
}

/** How many of the first hits contain a match, if the calibration promises it and that many are shown. */
export function aboutSet(decision, answer, { depth, threshold }) {
  if (decision !== "match" || depth === null || depth > answer.hits.length) {
    return "";
  }
  const where = depth === 1 ? "as the first item" : `among the first ${depth} items`;
  return ` Of queries with a match that are like the calibration queries, at least ${percent(1 - threshold.conformal_miss)} have ` +
    `one ${where}.`;
}

/** The decision on a pair: a tone, a sign, words and the reason. */
export function aboutPair({ decision, probability, score, threshold, far, kappa }, answers) {
  const close = `the cosine is ${cosine(score)}`;
  if (decision === null) {
    return ["none", "–", "No decision", `No rate is promised for pairs; ${close}.`];
  }
  if (decision === "abstain") {
    const why = `κ of one is ${plain(Math.min(...kappa))}, below ${plain(threshold.kappa_below)}.`;
    return ["abstain", "?", "Not sure", why];
  }
  const [same, others] = answers ? ["the answer", "questions with another's answer"]
    : ["the same", "pairs that are not the same"];
  const isSure = decision === "match" && probability >= SURE;
  const [tone, sign, word] = isSure ? ["match", "✓", capital(same)]
    : decision === "match" || probability > LIKELY ? ["perhaps", "≈", `Perhaps ${same}`] : ["unknown", "✕", `Not ${same}`];
  const side = decision === "match" ? "above" : "not above";
  return [tone, sign, word, `${capital(same)} with probability ${percent(probability)}, if half of all pairs are. ` +
    `${capital(close)}, ${side} ${cosine(threshold.accept_above)}; at most ${percent(far)} of ${others} are above that.`];
}

/** Whether the promises hold, in words; `state` is null without calibration. A stale calibration promises nothing. */
export function aboutWatch(state, isStale) {
  return {
    holds: isStale ? "" : "The promise holds.",
    "in doubt": "The promise is in doubt: queries are no longer like the calibration queries. Calibrate it " +
      "on fresh ones.",
    broken: "The promise is broken: judged answers have more errors than promised. Calibrate it again.",
  }[state] ?? "";
}

/** How an answer can be judged: words for each choice, and the feedback to send. */
export function judgementsOf({ decision }) {
  const stranger = { label: "" };
  return decision !== "match" ? [["The gallery does not hold it", stranger]] : [
    ["Right", { correct: true }], ["Wrong: the gallery holds another", { correct: false }],
    ["Wrong: the gallery does not hold it", stranger],
  ];
}

export function aboutStale(size, calibration) {
  return `The gallery has ${size} items and had ${calibration.gallery_size} when the run was calibrated: the error ` +
    "rates stated here no longer hold. Run “lam calibrate RUN”, send the service a SIGHUP, and " +
    "reload this page; nothing needs a restart.";
}

function capital(sentence) {
  return `${sentence[0].toUpperCase()}${sentence.slice(1)}`;
}

function within(answer) {
  return answer.hits.filter((hit) => hit.credible).length;
}

/** The ends of a hit's interval. */
export function aboutInterval([low, high]) {
  return `90\u00a0% of the query's class: ${low.toFixed(2)} to ${high.toFixed(2)}`;
}
