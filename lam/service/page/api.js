// Requests to the service, with its key, and its errors in words.

const STORED = "lam-api-key";
let key = stored();

/** An error of the service, or on the way to it; `message` is a sentence to show. */
export class Refusal extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export function hasKey() {
  return key !== null;
}

/** Keep a key until the tab is closed. */
export function useKey(given) {
  if (!/^[\x21-\x7e]+$/.test(given)) {
    throw new Refusal("A key is made of letters, digits and signs, without spaces.");
  }
  key = given;
  try {
    sessionStorage.setItem(STORED, given);
  } catch {
    // in a browser without storage, the key lasts until the page is left
  }
}

/** The path of this page, below which the routes of its run lie. */
const ROOT = new URL(".", document.baseURI).pathname.slice(0, -1);

/** Send a request; an answer without success is thrown as a `Refusal`. */
export async function ask(path, { headers = {}, ...options } = {}) {
  let response;
  try {
    response = await fetch(ROOT + path, { ...options, headers: key ? { ...headers, "X-API-Key": key } : headers });
  } catch (error) {
    if (error.name === "AbortError") {
      throw error;
    }
    throw new Refusal("The service cannot be reached. Is it still running?");
  }
  if (!response.ok) {
    throw new Refusal(await said(response), response.status);
  }
  return response;
}

/** A file in base64. */
export async function base64Of(file) {
  const address = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
  return address.slice(address.indexOf(",") + 1);
}

async function said(response) {
  let body = {};
  try {
    body = await response.json();
  } catch {
    // an error of a proxy
  }
  const what = body.error ?? `the service answered with status ${response.status}`;
  const allowed = body.allowed ? ` Allowed: ${inWords(body.allowed)}.` : "";
  return `${what[0].toUpperCase()}${what.slice(1)}.${allowed}`;
}

function inWords(allowed) {
  if (Array.isArray(allowed)) {
    return allowed.map(inWords).join(", ");
  }
  if (typeof allowed === "object") {
    return Object.entries(allowed).map(([name, value]) => `${name.replaceAll("_", " ")} ${inWords(value)}`).join(", ");
  }
  return String(allowed);
}

function stored() {
  try {
    return sessionStorage.getItem(STORED);
  } catch {
    return null;
  }
}
