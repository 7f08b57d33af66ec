// How numbers are written.

const SIGNIFICANT = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const SMALL = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });

export const plain = (value) => (Math.abs(value) < 1e5 ? SIGNIFICANT.format(value) : value.toExponential(1));
/** A cosine with four decimals, or with more if it would round to 1. */
export function cosine(value) {
  const gap = 1 - Math.abs(value);
  const decimals = gap > 0 && gap < 1e-4 ? Math.min(8, 1 - Math.floor(Math.log10(gap))) : 4;
  return value.toFixed(decimals).replace("-", "−");
}

export const degrees = (value) => `${value < 10 ? SMALL.format(value) : value.toFixed(0)}°`;
export const angle = (value) => (Math.acos(Math.min(1, Math.max(-1, value))) * 180) / Math.PI;

/** A threshold on a probability in percent, with enough decimals to differ from 0 and 1. */
export function level(share) {
  const gap = Math.min(share, 1 - share);
  const decimals = gap > 0 && gap < 0.001 ? Math.min(6, -1 - Math.floor(Math.log10(gap))) : 1;
  return `${(100 * share).toFixed(decimals)}\u00a0%`;
}

/** A share in percent; only 0 and 1 are shown as certain. */
export function percent(share) {
  if (share > 0.999 && share < 1) {
    return "above 99.9\u00a0%";
  }
  if (share > 0 && share < 0.0001) {
    return "below 0.01\u00a0%";
  }
  return `${share < 0.1 ? SMALL.format(100 * share) : (100 * share).toFixed(1)}\u00a0%`;
}
