// The page "Will it fit?": the calculator of llmlab's wheel, with llmlab in a worker. Without it, a sentence.
import { calculator } from "./calculator.mjs";

const root = document.getElementById("calculator");
const instead = document.getElementById("calculator-instead");

function stop(reason) {
  root.replaceChildren();
  instead.hidden = false;
  instead.querySelector(".reason").textContent = reason;
}

function stated() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

async function main() {
  if (location.protocol === "file:") return stop("Opened as a file, a page may not start programs: `make read` serves the book.");
  if (typeof WebAssembly !== "object") return stop("This browser has no WebAssembly, which Python needs.");
  const built = await (await fetch(new URL("built.json", import.meta.url))).json();
  if (!built.python) return stop("This book was built without Python for browsers (Pyodide).");
  root.textContent = "Python is starting …";
  const worker = new Worker(new URL("worker.mjs", import.meta.url), { type: "module" });
  const waiting = new Map();
  let number = 0;
  worker.onerror = (event) => stop(`Python did not start: ${event.message ?? "the worker stopped"}.`);
  worker.onmessage = ({ data: { id, got, failed } }) => {
    if (failed) stop(`llmlab stopped: ${failed}`);
    else waiting.get(id)?.(got);
    waiting.delete(id);
  };
  const ask = (state) => new Promise((resolve) => { waiting.set(++number, resolve); worker.postMessage({ id: number, state }); });
  const form = await ask(null);
  const changed = (state) => history.replaceState(null, "", `#${new URLSearchParams(state)}`);
  const open = async () => {
    const address = location.hash;
    await calculator(root, form, ask, { start: stated(), changed, book: "." });
    root.dataset.answers = address;
  };
  window.addEventListener("hashchange", open);
  await open();
}

main().catch((error) => stop(`The calculator did not start: ${error.message}`));
