// Decisions at thresholds that the user moves, from the rates of the calibration.

const HIGHEST = 0.5; // beyond this rate nobody would set a threshold

/** A slider over the rows of a calibration's table; one row is in force. */
class Steps {
  constructor(rows, inForce) {
    this.all = rows;
    this.rows = rows.filter((row) => row.rate <= HIGHEST || inForce(row));
    this.inForce = Math.max(0, this.rows.findIndex(inForce));
    this.position = this.inForce;
  }

  get row() {
    return this.rows[this.position];
  }

  get moved() {
    return this.position !== this.inForce;
  }
}

/** The two thresholds of a calibration. If another score than κ flags, the slider goes over rates. */
export class Thresholds {
  constructor(calibration) {
    const { threshold, false_accept: accepts, false_flag: flags } = calibration;
    this.byKappa = threshold.flag === "kappa";
    this.by = threshold.accept;
    this.name = calibration.accept_name;
    this.acceptAbove = threshold.accept_above;
    this.accept = new Steps(accepts, (row) => row.threshold === threshold.accept_above);
    if (this.byKappa) {
      this.flag = new Steps(flags, (row) => row.kappa === threshold.kappa_below);
    } else {
      const rates = [...new Set([...flags.map((row) => row.rate), threshold.ood])].sort((a, b) => a - b);
      this.flag = new Steps(rates.map((rate) => ({ rate })), (row) => row.rate === threshold.ood);
    }
  }

  get moved() {
    return this.accept.moved || this.flag.moved;
  }

  reset() {
    this.accept.position = this.accept.inForce;
    this.flag.position = this.flag.inForce;
  }

  /** The limit on an answer's statistic; null if the slider was moved and is for another statistic. */
  limitOf({ threshold: { accept, accept_above: above } }) {
    const isSame = accept === this.by && above === this.acceptAbove;
    return isSame ? this.accept.row.threshold : this.accept.moved ? null : above;
  }

  /** Whether the first hit of an answer is accepted; another statistic is compared at the rate of the slider. */
  accepts(answer) {
    const limit = this.limitOf(answer);
    return limit === null ? answer.false_accept <= this.accept.row.rate : answer.statistic > limit;
  }

  decide(answer) {
    if (!this.moved || answer.decision === null) {
      return answer.decision;
    }
    if (this.byKappa ? answer.kappa < this.flag.row.kappa : answer.p_value <= this.flag.row.rate) {
      return "abstain";
    }
    return answer.hits.length > 0 && this.accepts(answer) ? "match" : "unknown";
  }
}
