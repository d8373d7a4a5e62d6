// Will it fit? A form, and the answer to what it says, on the book's page and in a notebook.
// It computes nothing: `ask(state)` is llmlab, in a worker or in a kernel, and resolves to what `answer` returned.

const COLORS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#CCCCCC"];
// The fields that most people change stand open; the others are folded.
const OPEN = ["micro_batch", "seq_len", "precision", "optimizer", "checkpointing", "lora", "quantization", "zero",
  "engine", "weights", "kv", "prompt_len", "output_len", "concurrency", "global_batch", "method", "goal", "tokens"];
const WAIT = 30; // ms without a key before the form asks

const h = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
};
const spaced = (name) => name.replaceAll("_", " ");

export function calculator(root, form, ask, { start = {}, changed = () => {}, book = form.book } = {}) {
  let state = { ...form.defaults, ...start };
  let asked = 0, timer = 0, last = null;
  const result = h("div", { class: "result" });
  const controls = h("form", { class: "controls", onsubmit: (event) => { event.preventDefault(); update(); } });
  root.classList.add("llmlab-calculator");
  root.replaceChildren(controls, result);

  const fieldsOf = (kind) => form[kind] ?? form.training;
  const defaultOf = (name) => form.defaults[name] ?? fieldsOf(state.kind).find((f) => f.name === name)?.default ?? "";
  const valueOf = (name) => state[name] ?? defaultOf(name);

  function set(values) {
    state = { ...state, ...values };
    clearTimeout(timer);
    if (planning()) result.classList.add("stale"); // a search takes seconds: it waits for its button
    else timer = setTimeout(update, WAIT);
  }

  const planning = () => state.kind === "planning";

  async function update() {
    const mine = ++asked, sent = sendable();
    if (planning()) result.prepend(h("p", { class: "searching", role: "status" }, "Searching …"));
    const got = await ask(sent);
    if (mine !== asked) return; // a newer question is on its way
    changed(changes());
    show(got);
  }

  // What is asked: the fields of this kind of run, without those that are empty.
  function sendable() {
    const names = new Set(["kind", "model", "gpu", "gpus", ...fieldsOf(state.kind).map((f) => f.name)]);
    return Object.fromEntries(Object.entries(state).filter(([name, value]) => names.has(name) && value !== ""));
  }

  // What a link must say: all that differs from how the page opens.
  function changes() {
    return Object.fromEntries(Object.entries(sendable()).filter(([name, value]) => value !== defaultOf(name)));
  }

  function field(name, control, help) {
    const id = `llmlab-${name}`;
    control.id = id;
    control.setAttribute("aria-describedby", `${id}-help`);
    return h("div", { class: "field" }, h("label", { for: id, title: help }, form.labels[name] ?? spaced(name)), control,
      h("span", { id: `${id}-help`, hidden: true }, help));
  }

  function options(list, value) {
    const known = list.some((each) => each.value === value);
    return [...(known ? [] : [{ value, text: value }]), ...list].map((each) =>
      Object.assign(h("option", { value: each.value }, each.text), { selected: each.value === value }));
  }

  function choice(name, list, help, then = () => {}) {
    const control = h("select", { onchange: (event) => { set({ [name]: event.target.value }); then(); } },
      ...options(list, valueOf(name)));
    return field(name, control, help);
  }

  function typed(name, help, numeric) {
    const control = h("input", { type: "text", inputmode: numeric ? "numeric" : "text", autocomplete: "off",
      spellcheck: "false", oninput: (event) => set({ [name]: event.target.value.trim() }) });
    control.value = valueOf(name);
    return field(name, control, help);
  }

  function control(f) {
    if (f.kind === "choice") return choice(f.name, f.options.map((value) => ({ value, text: value })), f.help);
    if (f.kind === "flag") return choice(f.name, ["no", "yes"].map((value) => ({ value, text: value })), f.help);
    return typed(f.name, f.help, f.kind === "number");
  }

  function modelField() {
    const pasted = state.model.trim().startsWith("{") || !form.models.some((m) => m.name === state.model);
    const text = h("textarea", { rows: 5, spellcheck: "false", hidden: !pasted, "aria-label": "config.json of the model",
      placeholder: "the model's config.json, as its page on the hub shows it",
      oninput: (event) => set({ model: event.target.value }) });
    text.value = pasted ? state.model : "";
    const select = h("select", {
      onchange: (event) => {
        text.hidden = event.target.value !== "";
        if (event.target.value) set({ model: event.target.value });
        else text.focus();
      } },
    ...options([...form.models.map((m) => ({ value: m.name, text: `${m.name} (${m.says})` })),
      { value: "", text: "another: paste its config.json" }], pasted ? "" : state.model));
    const made = field("model", select, "A model that llmlab knows by name, or any other by its config.json.");
    made.classList.add("wide");
    made.append(text);
    return made;
  }

  function draw() {
    root.classList.toggle("planning", planning());
    const cards = form.gpus.map((card) => ({ value: card.name, text: `${card.name} (${card.says})` }));
    const fields = fieldsOf(state.kind);
    const rest = fields.filter((f) => !OPEN.includes(f.name));
    const folded = rest.some((f) => valueOf(f.name) !== f.default);
    const kinds = ["training", "serving", "planning"].map((kind) => {
      const radio = h("input", { type: "radio", name: "llmlab-kind", value: kind, id: `llmlab-kind-${kind}`,
        onchange: () => { last = null; set({ kind }); draw(); if (planning()) update(); controls.querySelector(`#llmlab-kind-${kind}`).focus(); } });
      radio.checked = state.kind === kind;
      return h("span", {}, radio, h("label", { for: radio.id }, kind));
    });
    controls.replaceChildren(...[
      h("fieldset", { class: "kind" }, h("legend", {}, "What for"), ...kinds),
      modelField(),
      choice("gpu", cards, "The card. Its memory is what a program sees of it."),
      typed("gpus", "How many of these cards share the run.", true),
      ...OPEN.map((name) => fields.find((f) => f.name === name)).filter(Boolean).map(control),
      h("details", { class: "wide", open: folded }, h("summary", {}, "more"),
        h("div", { class: "more" }, ...rest.map(control))),
      planning() ? h("button", { type: "submit" }, "search") : null,
      h("button", { type: "button", onclick: () => { state = { ...form.defaults }; draw(); update(); } }, "start again"),
    ].filter(Boolean));
  }

  function bar(got) {
    const scale = Math.max(got.capacity, got.peak, got.outcome === "fits" ? 0 : got.least) * 1.02;
    const at = (size) => `${(100 * size) / scale}%`;
    let from = 0;
    const pieces = got.parts.map(([part, size, shown]) => {
      const piece = h("span", { class: "piece", title: `${part} ${shown}`,
        style: `left:${at(from)};width:${at(size)};background:${COLORS[form.parts.indexOf(part)]}` });
      from += size;
      return piece;
    });
    const words = got.parts.map(([part, , shown]) => `${part} ${shown}`).join(", ");
    return h("div", { class: `bar ${got.outcome.replaceAll(" ", "-")}`, role: "img",
      "aria-label": `Peak ${got.peak_shown}: ${words}. ${got.headline}` }, ...pieces,
    h("span", { class: "limit", style: `left:${at(got.capacity)}` }));
  }

  const signed = (bytes) => `${bytes < 0 ? "−" : "+"}${(Math.abs(bytes) / 2 ** 30).toFixed(2)} GiB`;

  function partsTable(got) {
    const before = last ? Object.fromEntries(last.parts.map(([part, size]) => [part, size])) : null;
    const row = (name, size, shown, was, color) => h("tr", {},
      h("th", { scope: "row" }, color ? h("span", { class: "key", style: `background:${color}` }) : null, spaced(name)),
      h("td", {}, shown),
      h("td", { class: "delta" }, was != null && was !== size ? signed(size - was) : ""));
    const names = form.parts.filter((part) => got.parts.some((p) => p[0] === part) || before?.[part]);
    return h("table", {}, h("caption", {}, "Peak memory per GPU, and what the last change made of it"),
      h("tbody", {}, ...names.map((part) => {
        const [, size, shown] = got.parts.find((p) => p[0] === part) ?? [part, 0, "0 B"];
        return row(part, size, shown, before ? before[part] ?? 0 : null, COLORS[form.parts.indexOf(part)]);
      }), row("peak", got.peak, got.peak_shown, last?.peak, null)));
  }

  function figuresTable(got) {
    if (!got.figures.length) return null;
    return h("table", {}, h("caption", {}, "Time and price"), h("tbody", {}, ...got.figures.map(([name, value, more]) =>
      h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, value), h("td", { class: "aside" }, more)))));
  }

  function leversTable(got) {
    if (!got.levers?.length) return null;
    return h("table", { class: "levers" }, h("caption", {}, "What would change it, the cheapest GiB first"),
      h("tbody", {}, ...got.levers.map((lever) => h("tr", {},
        h("th", { scope: "row" }, h("button", { type: "button", onclick: () => { set(lever.set); draw(); update(); } }, lever.name)),
        h("td", {}, lever.saves), h("td", { class: "aside" }, `${lever.costs} `,
          h("a", { href: `${book}/${lever.chapter}.html`, "aria-label": `the chapter on ${lever.name}` }, "why"))))));
  }

  // A plan's own table; its first column is a button that shows that run.
  function planTable({ caption, header, rows, footer }) {
    const cell = ({ cells, set: run }, place) => (place === 0 && run
      ? h("th", { scope: "row" }, h("button", { type: "button", onclick: () => { set(run); draw(); update(); } }, cells[0]))
      : h("td", { "data-name": header[place] }, cells[place]));
    return h("div", { class: "plan" }, h("table", {}, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, ...header.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.cells.map((_, place) => cell(row, place)))))),
    h("p", {}, footer));
  }

  function copier(words, text) {
    const button = h("button", { type: "button", onclick: async () => {
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "copied";
      } catch {
        button.textContent = "select and copy it below";
      }
      setTimeout(() => { button.textContent = words; }, 1500);
    } }, words);
    return button;
  }

  function download(name, text) {
    return h("a", { class: "button", download: name, href: `data:application/json;charset=utf-8,${encodeURIComponent(text)}` },
      name);
  }

  function show(got) {
    const problem = h("p", { class: "problem", role: "alert" }, got.error ?? "");
    result.querySelector(".searching")?.remove();
    if (got.error) { // the last good answer stays where it is
      result.querySelector(".problem")?.remove();
      result.classList.add("stale");
      result.prepend(problem);
      return;
    }
    result.classList.remove("stale");
    const fold = result.querySelector("details.lines")?.open;
    result.replaceChildren(
      h("p", { class: `headline ${got.outcome.replaceAll(" ", "-")}`, role: "status" }, got.headline),
      ...(got.plan ? [got.plan.rows.length ? planTable(got.plan) : h("p", {}, got.plan.footer)]
        : [bar(got), partsTable(got), figuresTable(got), leversTable(got)].filter(Boolean)),
      h("div", { class: "buttons" }, copier("copy as Python", got.python), copier("copy as CLI", got.cli),
        ...Object.entries({ ...got.configs, [got.plan ? "plan.json" : "report.json"]: JSON.stringify(got.report, null, 1) })
          .map(([name, text]) => download(name, text))),
      h("details", { class: "lines", open: fold }, h("summary", {}, "the same, as lines to run"),
        h("pre", { tabindex: "0" }, h("code", {}, got.python)), h("pre", { tabindex: "0" }, h("code", {}, got.cli))),
      h("ul", { class: "notes" }, ...got.notes.map((note) => h("li", {}, note))),
    );
    if (!got.plan) last = got;
  }

  draw();
  return update();
}

// The widget: the kernel answers.
export default {
  render({ model, el }) {
    const waiting = new Map();
    let number = 0;
    model.on("msg:custom", ({ id, got }) => { waiting.get(id)?.(got); waiting.delete(id); });
    const ask = (state) => new Promise((resolve) => { waiting.set(++number, resolve); model.send({ id: number, state }); });
    const style = h("style", {});
    style.textContent = model.get("style");
    const root = h("div");
    el.replaceChildren(style, root);
    calculator(root, model.get("form"), ask, { start: model.get("state") });
  },
};
