// A canvas to draw on, light on dark as handwritten digits are; offered where a run reads small grey images.

const SMALL = 64;
const STROKE = 1 / 10; // of the canvas: a pen's width among the data that such runs are trained on

/** Whether a run reads images that can be drawn. */
export function canBeDrawn(preprocessing) {
  const extent = preprocessing?.crop ?? preprocessing?.size;
  return preprocessing?.mode === "L" && extent != null && Math.max(...[extent].flat()) <= SMALL;
}

/** Let a pointer draw; gives `clear`, and `picture`, which is null while nothing was drawn. */
export function drawnOn(canvas) {
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
    pen.lineWidth = canvas.width * STROKE;
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
