// Many images at once: a folder becomes batches for POST /v1/search/batch, a table, and a CSV file.

import { ask, base64Of, Refusal } from "./api.js";
import { percent, plain } from "./numbers.js";
import { tamed } from "./words.js";

const MOST = 10000; // files of a folder
const LONGEST_PATH = 120;
const TRIES = 5;
const BESIDE = 2 ** 16; // bytes of a body without its images
const IMAGES = /\.(jpe?g|png|webp)$/i;
const WORDS = { match: "✓ match", unknown: "✕ unknown", abstain: "? not sure" };

/** The files that are dropped, with their paths; null if it is a single file. */
export function filesOf(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  return entries.length > 1 || entries.some((entry) => entry.isDirectory) ? walk(entries) : null;
}

async function walk(entries) {
  const found = [];
  const left = [...entries];
  while (left.length > 0 && found.length <= MOST) {
    const entry = left.shift();
    if (entry.isFile) {
      const file = await new Promise((resolve, reject) => entry.file(resolve, reject)).catch(() => null);
      if (file) {
        found.push({ path: entry.fullPath.replace(/^\//, ""), file });
      }
      continue;
    }
    const reader = entry.createReader();
    let some; // a reader gives some entries at a time, and none at the end
    do {
      some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject)).catch(() => []);
      left.push(...some);
    } while (some.length > 0 && left.length <= MOST);
  }
  return found;
}

/** The images among files, and how many files are left out. */
export function imagesOf(files) {
  const images = files.filter(({ path }) => IMAGES.test(path)).slice(0, MOST);
  images.sort((one, other) => (one.path < other.path ? -1 : 1));
  return [images, files.length - images.length];
}

/** Files in batches that the service takes; a file that is too large alone is a batch of its own. */
export function batchesOf(images, limits) {
  const most = limits.max_bytes - BESIDE;
  const batches = [];
  let size = Infinity;
  for (const image of images) {
    const own = 4 * Math.ceil(image.file.size / 3) + 100;
    if (size + own > most || batches.at(-1).length >= limits.max_batch) {
      batches.push([]);
      size = 0;
    }
    batches.at(-1).push(image);
    size += own;
  }
  return batches;
}

/** Search for all images; `onRow` gets a row of each, in order. */
export async function searchAll(images, limits, onRow, signal) {
  for (const batch of batchesOf(images, limits)) {
    const sent = batch.filter(({ file }) => file.size <= limits.max_bytes * 0.74);
    const answers = sent.length > 0 ? await answersOf(sent, signal) : [];
    for (const image of batch) {
      const large = { error: "the file is larger than this service takes in a batch" };
      onRow(rowOf(image.path, sent.includes(image) ? answers[sent.indexOf(image)] : large));
    }
  }
}

/** The answers to a batch; queries that are refused as busy (503) are sent again. */
async function answersOf(batch, signal) {
  const queries = await Promise.all(batch.map(async ({ file }) =>
    base64Of(file).then((image) => ({ image }), () => ({ image: "unreadable" }))));
  const answers = new Array(batch.length).fill(null);
  for (let attempt = 0; attempt < TRIES; attempt += 1) {
    const left = answers.flatMap((answer, place) => (answer === null || answer.status === 503 ? [place] : []));
    if (left.length === 0) {
      break;
    }
    if (attempt > 0) {
      await new Promise((resolve) => setTimeout(resolve, 1000 * attempt));
    }
    try {
      const body = JSON.stringify({ queries: left.map((place) => queries[place]) });
      const headers = { "Content-Type": "application/json" };
      const response = await ask("/v1/search/batch?k=1", { method: "POST", headers, body, signal });
      const found = await response.json();
      left.forEach((place, at) => (answers[place] = found.answers[at]));
    } catch (error) {
      if (!(error instanceof Refusal) || error.status !== 503 || attempt + 1 === TRIES) {
        throw error;
      }
    }
  }
  return answers;
}

/** A row of the table; only a match has a label. */
export function rowOf(file, answer) {
  if (answer.error !== undefined) {
    return { file, decision: "error", label: "", probability: null, kappa: null, error: answer.error };
  }
  const { decision, probability, kappa, hits } = answer;
  const label = decision === "match" ? hits[0].label || hits[0].id : "";
  return { file, decision: decision ?? "none", label, probability, kappa, error: "" };
}

/** The cells of a row in words. */
export function cellsOf({ file, decision, label, probability, kappa, error }) {
  return [
    tamed(file, LONGEST_PATH),
    error ? tamed(`! ${error}`, LONGEST_PATH) : WORDS[decision] ?? "– no decision",
    tamed(label),
    probability === null ? "" : percent(probability),
    kappa === null ? "" : plain(kappa),
  ];
}

/** Rows as CSV. A spreadsheet runs a text that begins like a formula, so such a text gets an apostrophe. */
export function csvOf(rows) {
  const names = ["file", "decision", "label", "probability", "kappa", "error"];
  const quoted = (value) => {
    const text = typeof value === "string" ? value.replace(/^(?=[\s]*[=+\-@\t\r])/, "'") : String(value ?? "");
    return `"${text.replaceAll('"', '""')}"`;
  };
  const lines = [names, ...rows.map((row) => names.map((name) => row[name]))];
  return `\ufeff${lines.map((line) => line.map(quoted).join(",")).join("\r\n")}\r\n`;
}
