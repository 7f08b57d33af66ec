// What is said of an answer, in sentences. `thresholds` is null where the run is not calibrated.

import { angle, cosine, degrees, percent, plain } from "./numbers.js";

const LONGEST = 40;
const TURNING = /[\p{Cc}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/gu; // signs of control and of direction
const WORDS = { match: ["✓", "Match"], unknown: ["✕", "No match"], abstain: ["?", "Not sure"] };

/** A decision as a sign and a word. */
export function wordOf(decision) {
  return WORDS[decision] ?? ["–", "No decision"];
}

/** A label or id as it is shown: not all of a long one, and nothing that turns the text around it. */
export function shown(hit) {
  const signs = [...(hit.label || hit.id).replace(TURNING, "\ufffd")];
  return signs.length > LONGEST ? `${signs.slice(0, LONGEST - 1).join("")}…` : signs.join("");
}

/** Whether the label of a text is that text, or its beginning as classes are called after long ones. */
export function repeatsText({ label, metadata: { text } }) {
  const [beginning, ...cut] = label.split(/… \([0-9a-f]{8}\)$/u);
  return typeof text === "string" && (cut.length ? text.startsWith(beginning) : text === label);
}

/** The same within a sentence, whose direction is its own. */
export function named(hit) {
  const name = `\u2068${shown(hit)}\u2069`;
  return hit.label ? `“${name}”` : `item ${name}`;
}

/** Why the answer is what it is. */
export function reason(decision, answer, thresholds) {
  const best = answer.hits[0];
  if (!best) {
    return "The gallery is empty.";
  }
  const nearest = `the nearest item, ${named(best)}, has a cosine of ${cosine(best.score)}`;
  if (decision === null) {
    return `The run is not calibrated: ${nearest}.`;
  }
  const { accept, flag, byKappa } = thresholds;
  if (decision === "abstain") {
    const why = byKappa
      ? `κ is ${plain(answer.kappa)}, below ${plain(flag.row.kappa)}`
      : `only ${percent(answer.p_value)} of ordinary queries are as unusual`;
    return `This query cannot be judged: ${why}. That happens to at most ${percent(flag.row.rate)} of ordinary queries.`;
  }
  if (decision === "match") {
    return `It is ${named(best)}: the cosine is ${cosine(best.score)}, above ${cosine(accept.row.cosine)}. Of queries ` +
      "like those it was calibrated on, with no match in the gallery, at most " +
      `${percent(accept.row.rate)} come that close.`;
  }
  return `It is not in the gallery: ${nearest}, which is not above ${cosine(accept.row.cosine)}.`;
}

/** The numbers of an answer: name, value and meaning. */
export function facts(decision, answer) {
  const found = [];
  if (decision === "match") {
    found.push(["Probability", percent(answer.probability), "that the first hit is right, if it has a match"]);
  }
  found.push(["κ", `${answer.kappa_capped ? "≤ " : ""}${plain(answer.kappa)}`, "concentration: higher is surer"]);
  if (answer.hits.length > 0) {
    const { score } = answer.hits[0];
    found.push(["Best cosine", cosine(score), `an angle of ${degrees(angle(score))}`]);
  }
  const cap = degrees(angle(answer.credible_cosine));
  found.push(["Credible cap", cap, `holds ${within(answer)} of the nearest ${answer.hits.length}`]);
  if (decision !== null && decision !== "match") {
    found.push(["If it were here", percent(answer.probability), "the first hit would be right"]);
  }
  return found;
}

export function aboutKappa(answer, histogram, thresholds) {
  const { counts, edges } = histogram;
  const total = counts.reduce((sum, count) => sum + count, 0);
  const below = counts.reduce((sum, count, bin) => sum + (edges[bin + 1] <= answer.kappa ? count : 0), 0);
  const flag = thresholds.byKappa ? `; below ${plain(thresholds.flag.row.kappa)} the answer is “not sure”` : "";
  return `κ of this query is ${plain(answer.kappa)}. Of ${total} queries of the calibration about ${below || "none"} ` +
    `${below === 1 ? "has" : "have"} a lower κ${flag}.`;
}

export function aboutAngles(answer, thresholds) {
  const accepted = thresholds && answer.hits.filter((hit) => thresholds.accepts(hit)).length;
  const also = thresholds ? `, and ${accepted || "none"} above the accept threshold (filled)` : "";
  return `Of the ${answer.hits.length} nearest items ${within(answer) || "none"} lie within the credible cap${also}. ` +
    "What this query shows lies within the cap with probability 95 %, as far as κ knows.";
}

/** What is known of the images that a hit was made of, said behind its κ. */
export function aboutImages(hit) {
  return `${hit.images > 1 ? ` of ${hit.images} images` : ""}${hit.uncertain ? " (uncertain: below the flag)" : ""}`;
}

export function aboutRejected(answer, nearest) {
  if (nearest < 0) {
    return `All of the ${answer.hits.length} nearest items are above the accept threshold.`;
  }
  const hit = answer.hits[nearest];
  return `The nearest rejected item is number ${nearest + 1}, ${named(hit)}, with a cosine of ${cosine(hit.score)}: ` +
    "the first that is not above the accept threshold.";
}

/** How many hits hold a match, where the calibration could promise that and so many are there. */
export function aboutSet(answer, { depth, threshold }) {
  if (depth === null || depth > answer.hits.length) {
    return "";
  }
  const where = depth === 1 ? "as the first item" : `among the first ${depth} items`;
  return ` Of queries like those it was calibrated on that have a match, at least ${percent(1 - threshold.conformal_miss)} have ` +
    `one ${where}.`;
}

export function aboutStale(size, calibration) {
  return `The gallery has ${size} items and had ${calibration.gallery_size} when the run was calibrated: the error ` +
    "rates stated here no longer hold. Run “lam calibrate RUN”, send the service a SIGHUP, and " +
    "reload this page; nothing needs a restart.";
}

function within(answer) {
  return answer.hits.filter((hit) => hit.credible).length;
}
