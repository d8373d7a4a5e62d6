// llmlab itself, in Pyodide: typing on the page never waits for it.
const runtime = new URL("../pyodide/", import.meta.url).href;
const archive = new URL("../llmlab.zip", import.meta.url).href;

async function started() {
  const { loadPyodide } = await import(`${runtime}pyodide.mjs`);
  const [python, packed] = await Promise.all([loadPyodide({ indexURL: runtime }), bytes(archive)]);
  python.unpackArchive(packed, "zip");
  python.runPython("import json; from llmlab.notebook import calculator");
  return python;
}

async function bytes(address) {
  const response = await fetch(address);
  if (!response.ok) throw new Error(`${address}: ${response.status}`);
  return new Uint8Array(await response.arrayBuffer());
}

const python = started();
self.onmessage = async ({ data: { id, state } }) => {
  try {
    const { globals, runPython } = await python;
    globals.set("said", JSON.stringify(state ?? null));
    const call = state ? "calculator.answer(json.loads(said))" : "calculator.form()";
    self.postMessage({ id, got: JSON.parse(runPython(`json.dumps(${call})`)) });
  } catch (error) {
    self.postMessage({ id, failed: String(error.message ?? error) });
  }
};
