// How numbers are written.

const SIGNIFICANT = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const SMALL = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });

export const plain = (value) => (Math.abs(value) < 1e5 ? SIGNIFICANT.format(value) : value.toExponential(1));
export const cosine = (value) => value.toFixed(4).replace("-", "−");
export const degrees = (value) => `${value < 10 ? SMALL.format(value) : value.toFixed(0)}°`;
export const angle = (value) => (Math.acos(Math.min(1, Math.max(-1, value))) * 180) / Math.PI;

/** A share in percent: never a certainty that it is not. */
export function percent(share) {
  if (share > 0.999 && share < 1) {
    return "above 99.9\u00a0%";
  }
  if (share > 0 && share < 0.0001) {
    return "below 0.01\u00a0%";
  }
  return `${share < 0.1 ? SMALL.format(100 * share) : (100 * share).toFixed(1)}\u00a0%`;
}
