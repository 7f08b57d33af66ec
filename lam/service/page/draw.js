// A canvas to draw on, light on dark like handwritten digits, for runs on small grey images.

const SMALL = 64;
const STROKE = 1 / 10; // width of the pen as a share of the canvas, as in data sets of handwriting
const PIXELS = 1.5; // least width of the pen in pixels of the network's input

/** Whether the images of a run can be drawn. */
export function canBeDrawn(preprocessing) {
  return preprocessing?.mode === "L" && sideOf(preprocessing) <= SMALL;
}

/** The longer side of a network input, in pixels; Infinity if it is not fixed. */
function sideOf({ crop, size }) {
  return Math.max(...[crop ?? size ?? Infinity].flat());
}

/** Let a pointer draw; returns the functions `clear` and `picture`, whose result is null for an empty canvas. */
export function drawnOn(canvas, preprocessing) {
  const pen = canvas.getContext("2d");
  let drawn = false;
  const clear = () => {
    drawn = false;
    pen.fillStyle = "black";
    pen.fillRect(0, 0, canvas.width, canvas.height);
  };
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [((event.clientX - box.left) * canvas.width) / box.width,
      ((event.clientY - box.top) * canvas.height) / box.height];
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pen.strokeStyle = "white";
    pen.lineWidth = canvas.width * Math.max(STROKE, PIXELS / sideOf(preprocessing()));
    pen.lineCap = pen.lineJoin = "round";
    pen.beginPath();
    pen.moveTo(...place(event));
    pen.lineTo(...place(event));
    pen.stroke();
    drawn = true;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (canvas.hasPointerCapture(event.pointerId)) {
      pen.lineTo(...place(event));
      pen.stroke();
    }
  });
  clear();
  const picture = () => (drawn ? new Promise((resolve) => canvas.toBlob(resolve, "image/png")) : null);
  return { clear, picture };
}
