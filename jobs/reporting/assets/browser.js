"use strict";
// The samples: filtered lists of which only the rows in sight are in the document. All data is put in as text.
(async () => {
  const element = (id) => document.getElementById(id);
  const figures = JSON.parse(element("figures").textContent);
  const rows = await unpacked(element("packed-samples").textContent);
  const HEIGHT = 58;
  const [list, space, detail] = [element("list"), element("space"), element("detail")];
  const inputs = Object.fromEntries(["search", "finish", "error", "against", "least", "most", "order"].map((id) => [id, element(id)]));
  let shown = rows;
  let chosen = null;

  async function unpacked(text) {
    const binary = atob(text.trim());
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  const rate = (row) => (row.steps ? row.out / row.steps : 0);
  const haystack = (row) => {
    row.hay ??= [row.id, ...row.prompt.map((m) => m[1]), row.text || "", row.error || "", ...Object.values(row.columns)].join("\n").toLowerCase();
    return row.hay;
  };
  const make = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };

  function choices(select, values, label) {
    const counts = new Map();
    for (const value of values) if (value !== undefined) counts.set(value, (counts.get(value) || 0) + 1);
    for (const [value, count] of [...counts].sort((a, b) => b[1] - a[1])) {
      const option = make("option", "", `${value} (${count.toLocaleString("en")})`);
      option.value = value;
      select.append(option);
    }
    if (label) label.hidden = counts.size === 0;
  }

  function filter() {
    const words = inputs.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const [least, most] = [parseFloat(inputs.least.value), parseFloat(inputs.most.value)];
    const same = (input, value) => !input.value || input.value === value;
    shown = rows.filter((row) =>
      same(inputs.finish, row.finish) && same(inputs.error, row.error_type) && same(inputs.against, row.against) &&
      (isNaN(least) || (row.steps && rate(row) >= least)) && (isNaN(most) || (row.steps && rate(row) <= most)) &&
      words.every((word) => haystack(row).includes(word)));
    const key = inputs.order.value.replace("-", "");
    const sign = inputs.order.value.startsWith("-") ? -1 : 1;
    const value = key === "rate" ? rate : (row) => row[key];
    if (key) shown.sort((a, b) => sign * (value(a) - value(b)));
    element("count").textContent = shown.length === rows.length ? "" : `${shown.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} samples match`;
    space.style.height = shown.length * HEIGHT + "px";
    list.scrollTop = 0;
    draw();
  }

  function draw() {
    const first = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - 4);
    const last = Math.min(shown.length, Math.ceil((list.scrollTop + list.clientHeight) / HEIGHT) + 4);
    space.replaceChildren(...shown.slice(first, last).map((row, i) => entry(row, first + i)));
  }

  function entry(row, index) {
    const node = make("div", "row" + (row.finish === "error" ? " error" : "") + (row === chosen ? " chosen" : ""));
    node.style.top = index * HEIGHT + "px";
    node.setAttribute("role", "option");
    node.setAttribute("aria-selected", row === chosen);
    const said = row.finish === "error" ? `${row.error_type}: ${row.error}` : (row.text || "").slice(0, 200).replace(/\s+/g, " ") || "(empty)";
    node.append(make("div", "what", said), make("div", "about", about(row, false)));
    node.addEventListener("click", () => choose(index));
    return node;
  }

  function about(row, whole) {
    const parts = [row.id + (row.n ? ` #${row.n}` : ""), ...Object.values(row.columns).map((v) => v.slice(0, 40)), row.finish];
    if (row.steps) parts.push(`${row.out} tokens`, `${rate(row).toFixed(2)} per step`);
    if (row.against) parts.push(row.against);
    if (whole) parts.push(`${row.in} prompt tokens`, `${row.steps} steps`, `${row.accepted} of ${row.drafted} drafts accepted`, `${row.s} s`, `shard ${row.shard}`);
    return parts.slice(whole ? 1 : 0).join(" · ");
  }

  function choose(index) {
    chosen = shown[index];
    if (!chosen) return;
    const [top, bottom] = [index * HEIGHT, (index + 1) * HEIGHT];
    if (top < list.scrollTop) list.scrollTop = top;
    if (bottom > list.scrollTop + list.clientHeight) list.scrollTop = bottom - list.clientHeight;
    draw();
    show(chosen);
  }

  function show(row) {
    const close = make("button", "close", "Close");
    close.addEventListener("click", () => detail.classList.remove("open"));
    const nodes = [close, make("h3", "", row.id + (row.n ? ` #${row.n}` : "")), make("div", "about", about(row, true))];
    if (row.error_type) nodes.push(make("h4", "", row.error_type), make("div", "text", row.error));
    for (const [role, content] of row.prompt) nodes.push(make("h4", "", role || "prompt"), make("div", "text prompt", content));
    if (row.text !== null) nodes.push(make("h4", "", "generation"), shaded(row));
    if (row.spans) nodes.push(legend(row));
    if (row.other !== undefined) nodes.push(make("h4", "", "generation of the other output"), make("div", "text", row.other));
    detail.replaceChildren(...nodes);
    detail.classList.add("open");
    detail.scrollTop = 0;
  }

  const hue = (drafter) => `var(--c${Math.max(0, figures.drafters.indexOf(drafter)) % 7})`;

  // Spans count characters as Python does, by code point.
  function shaded(row) {
    const node = make("div", "text generation");
    const points = [...row.text];
    let at = 0;
    for (const [start, length, drafter] of row.spans || []) {
      if (!length || start >= points.length) continue;
      node.append(points.slice(at, start).join(""));
      const mark = make("mark", "", points.slice(start, start + length).join(""));
      mark.style.setProperty("--hue", hue(drafter));
      mark.title = drafter;
      node.append(mark);
      at = start + length;
    }
    node.append(points.slice(at).join(""));
    return node;
  }

  function legend(row) {
    const node = make("div", "key");
    node.style.marginTop = "10px";
    for (const drafter of new Set(row.spans.map((s) => s[2]))) {
      const item = make("span");
      const swatch = make("i");
      swatch.style.background = `color-mix(in srgb, ${hue(drafter)} 40%, transparent)`;
      item.append(swatch, drafter);
      node.append(item);
    }
    node.append(make("span", "", "unshaded: the model itself"));
    return node;
  }

  choices(inputs.finish, rows.map((row) => row.finish));
  choices(inputs.error, rows.map((row) => row.error_type), element("error-label"));
  choices(inputs.against, rows.map((row) => row.against), element("against-label"));
  for (const input of Object.values(inputs)) input.addEventListener("input", filter);
  list.addEventListener("scroll", draw, { passive: true });
  new ResizeObserver(draw).observe(list);
  list.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    choose(Math.min(shown.length - 1, Math.max(0, shown.indexOf(chosen) + move)));
  });
  addEventListener("keydown", (event) => { if (event.key === "Escape") detail.classList.remove("open"); });
  filter();
  if (rows.length && matchMedia("(min-width: 761px)").matches) choose(0);
  document.body.dataset.ready = "samples";
})();
