"use strict";
// The report's forms and tables. All text from rows goes in as text nodes, never as markup.
(() => {
  const { make, cellOf, digits, above, same, mib, unique } = elements;
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const ROWS = 50;
  // What goes after the name of a source.
  const TRUST = {
    measured: "on a TPU",
    modelled: "from the compiler's schedule, not timed on a TPU",
    interpreted: "on a CPU: whether the kernel is right, no latency",
  };
  // Failures that are known by name may go into a plot's label, where tags are read.
  const STATUSES = new Set(["vmem_oom", "smem_oom", "compile_error", "invalid", "timeout", "crashed", "wrong_result"]);
  const MARKS = [
    { name: "winner", of: (entry) => entry.winner, symbol: "star", fill: "#ffd43b", dx: -0.3,
      path: "M8 1l2.1 4.6 5 .5-3.8 3.3 1.1 4.9L8 11.8l-4.4 2.5 1.1-4.9L.9 6.1l5-.5z" },
    { name: "JAX's default", of: (entry) => entry.default, symbol: "circle", fill: "#ffffff", dx: 0,
      path: "M8 2a6 6 0 1 0 .01 0z" },
    { name: "published", of: (entry) => entry.published, symbol: "square", fill: "#ffffff", dx: 0.3,
      path: "M2.5 2.5h11v11h-11z" },
  ];

  // ---- keys

  const PARTS = ["q_dtype", "kv_dtype", "q", "kv", "head_dim", "page", "tokens", "length"];
  data.entries.forEach((entry, number) => {
    entry.number = number;
    for (const run of entry.runs) {
      run.cells = run.cells.map(([pages, queries, vmem_bytes, score, us, values, intervals]) =>
        ({ pages, queries, vmem_bytes, score, us, values, intervals }));
    }
    PARTS.forEach((part, i) => { entry[part] = entry.key[i]; });
    entry.heads = `${entry.q}/${entry.kv}`;
    entry.dtypes = entry.q_dtype === entry.kv_dtype ? entry.kv_dtype : `${entry.q_dtype}, ${entry.kv_dtype}`;
    entry.source = entry.runs[0].source;
    // What a look-up hands out today: the published pair, and the default where there is none.
    entry.today = entry.published ?? entry.default;
    entry.today_cost = entry.published ? entry.published_cost : entry.default_cost;
    entry.fails = entry.runs.some((run) => run.cells.some((cell) => cell.values.some((value) => value < 0)));
  });
  const varies = (part) => unique(data.entries.map((entry) => entry[part])).length > 1;
  const named = (entry) =>
    `${entry.target}, q/kv heads ${entry.heads}, page ${entry.page}, tokens ${entry.tokens}, length ${entry.length}` +
    (varies("dtypes") ? `, ${entry.dtypes}` : "") + (varies("head_dim") ? `, head_dim ${entry.head_dim}` : "") +
    (varies("setting") ? `, ${data.settings[entry.setting]}` : "");

  const cellAt = (run, blocks) => run.cells.find((cell) => same([cell.pages, cell.queries], blocks));
  const statusOf = (value) => data.failures[-1 - value][0];
  const failureOf = (cell) => cell.values.find((value) => value !== null && value < 0);

  const costText = (entry, blocks, cost, status) => {
    if (blocks === null) return "not listed";
    if (same(blocks, entry.winner)) return "=";
    if (cost !== null) return `${blocks} ${above(cost)}`;
    if (status !== null) return `${blocks} ${status}`;
    // A key without a winner has no status: its rows do.
    const cell = cellAt(entry.runs[0], blocks);
    const failed = cell ? failureOf(cell) : undefined;
    return `${blocks} ${failed !== undefined ? statusOf(failed) : cell ? "in part" : "not tried"}`;
  };

  // ---- filters

  const select = (label, options, onchange, wide = false) => {
    const control = make("select", {}, ...options.map(([value, text]) => make("option", { value }, text)));
    control.addEventListener("change", onchange);
    return [control, make("label", { className: wide ? "wide" : "" }, label, control)];
  };
  const byNumber = (a, b) => {
    const [x, y] = [a, b].map((value) => String(value).split("/").map(Number));
    return Number.isNaN(x[0]) ? String(a).localeCompare(String(b)) : x[0] - y[0] || (x[1] ?? 0) - (y[1] ?? 0);
  };
  const FILTERS = [
    ["target", "Generation"], ["heads", "q/kv heads"], ["page", "Page size"], ["tokens", "Tokens"],
    ["length", "Length"], ["dtypes", "dtype"], ["head_dim", "head_dim"], ["source", "Source"], ["setting", "Setting"],
  ];
  const ALWAYS = new Set(["target", "heads", "page", "length"]);
  const ONLY = {
    all: ["all keys", () => true],
    other: ["JAX hands out another", (entry) => entry.winner !== null && !same(entry.winner, entry.today)],
    fails: ["with failures", (entry) => entry.fails],
    lost: ["without a winner", (entry) => entry.winner === null],
  };
  const dearest = (part) => (a, b) => (b[part] ?? 0) - (a[part] ?? 0) || a.number - b.number;
  const ORDERS = {
    today: ["JAX's loss", dearest("today_cost")],
    default: ["default's loss", dearest("default_cost")],
    published: ["published's loss", dearest("published_cost")],
    us: ["winner's us", dearest("us")],
    key: ["key", (a, b) => a.number - b.number],
  };

  const filters = new Map();
  const state = { found: [], entry: null, run: 0, workload: -1, shown: ROWS };
  let only, order;

  const buildFilters = () => {
    const form = $("filters");
    form.addEventListener("submit", (event) => event.preventDefault());
    for (const [part, label] of FILTERS) {
      if (!ALWAYS.has(part) && !varies(part)) continue;
      const values = unique(data.entries.map((entry) => entry[part])).sort(byNumber);
      const text = (value) => (part === "setting" ? data.settings[value] : String(value));
      const [control, labelled] = select(label, [["", "all"], ...values.map((v) => [v, text(v)])], filter);
      control.id = `filter-${part}`;
      filters.set(part, control);
      form.append(labelled);
    }
    let labelled;
    [only, labelled] = select("Which", Object.entries(ONLY).map(([value, [text]]) => [value, text]), filter);
    only.id = "filter-only";
    form.append(labelled);
    [order, labelled] = select("Order by", Object.entries(ORDERS).map(([value, [text]]) => [value, text]), filter);
    order.id = "order";
    form.append(labelled);
  };

  const filter = () => {
    const wanted = [...filters].filter(([, control]) => control.value !== "");
    state.found = data.entries
      .filter((entry) => wanted.every(([part, control]) => String(entry[part]) === control.value))
      .filter(ONLY[only.value][1])
      .sort(ORDERS[order.value][1]);
    state.shown = ROWS;
    $("found").textContent = `${state.found.length} of ${data.entries.length} keys`;
    if (!state.found.includes(state.entry)) choose(state.found[0] ?? null);
    drawOverview();
    fillKeys();
    drawScatter();
  };

  // ---- the overview

  const COLUMNS = [
    ["gen", (entry) => entry.target], ["page", (entry) => entry.page], ["tokens", (entry) => entry.tokens],
    ["length", (entry) => entry.length],
    ...(varies("dtypes") ? [["dtype", (entry) => entry.dtypes]] : []),
    ...(varies("head_dim") ? [["head_dim", (entry) => entry.head_dim]] : []),
    ...(varies("setting") ? [["setting", (entry) => data.settings[entry.setting]]] : []),
    ["winner", (entry) => (entry.winner ? String(entry.winner) : "none")],
    [varies("source") ? "us" : `us, ${data.entries[0].source}`, (entry) => (entry.us === null ? "" : digits(entry.us))],
    ...(varies("source") ? [["source", (entry) => entry.source]] : []),
  ];

  const drawOverview = () => {
    const table = $("overview");
    const names = ["q/kv", ...COLUMNS.map(([name]) => name), "default", "published"];
    table.tHead.replaceChildren(make("tr", {}, ...names.map((name) => cellOf("th", name))));
    table.tBodies[0].replaceChildren(...state.found.slice(0, state.shown).map((entry) => {
      const button = make("button", { type: "button" }, entry.heads);
      button.setAttribute("aria-label", `Show ${named(entry)}`);
      button.setAttribute("aria-pressed", String(entry === state.entry));
      button.addEventListener("click", () => choose(entry));
      const row = make("tr", { className: entry === state.entry ? "chosen" : "" });
      row.dataset.number = entry.number;
      const cost = (blocks, ratio, status) => {
        const text = costText(entry, blocks, ratio, status);
        const failed = (status ?? "ok") !== "ok" || text.includes("_");
        return cellOf("td", text, ratio > 1.0995 ? "dear" : failed ? "failed" : "");
      };
      row.append(
        make("th", { scope: "row" }, button),
        ...COLUMNS.map(([, value]) => cellOf("td", value(entry))),
        cost(entry.default, entry.default_cost, entry.default_status),
        cost(entry.published, entry.published_cost, entry.published_status),
      );
      return row;
    }));
    const left = state.found.length - state.shown;
    $("more").hidden = left <= 0;
    $("more").textContent = `Show ${Math.min(left, ROWS)} more of ${left}`;
  };

  const markChosen = () => {
    for (const row of $("overview").tBodies[0].rows) {
      const chosen = state.entry !== null && Number(row.dataset.number) === state.entry.number;
      row.className = chosen ? "chosen" : "";
      row.querySelector("button").setAttribute("aria-pressed", String(chosen));
    }
  };

  // ---- the heat map

  let keys, runs, workloads, previous, next;

  const buildControls = () => {
    const form = $("map-controls");
    form.addEventListener("submit", (event) => event.preventDefault());
    let labelled;
    [keys, labelled] = select("Key", [], () => choose(data.entries[Number(keys.value)]), true);
    keys.id = "key";
    form.append(labelled);
    [workloads, labelled] = select("Workload", [], () => { state.workload = Number(workloads.value); drawMap(); });
    workloads.id = "workload";
    form.append(labelled);
    previous = make("button", { type: "button", id: "previous" }, "Previous");
    next = make("button", { type: "button", id: "next" }, "Next");
    previous.addEventListener("click", () => step(-1));
    next.addEventListener("click", () => step(1));
    form.append(make("div", { className: "buttons" }, previous, next));
    [runs, labelled] = select("Rows", [], () => { state.run = Number(runs.value); fillWorkloads(); drawMap(); }, true);
    runs.id = "run";
    form.append(labelled);
  };

  const step = (by) => choose(state.found[state.found.indexOf(state.entry) + by]);

  const offerSteps = () => {
    const at = state.found.indexOf(state.entry);
    previous.disabled = at <= 0;
    next.disabled = at < 0 || at === state.found.length - 1;
  };

  const fillKeys = () => {
    keys.replaceChildren(...state.found.map((entry) => make("option", { value: entry.number }, named(entry))));
    if (state.entry) keys.value = String(state.entry.number);
    offerSteps();
  };

  const fillWorkloads = () => {
    const names = state.entry.runs[state.run].workloads;
    const wanted = workloads.selectedOptions[0]?.textContent;
    const options = names.map((name, i) => [i, name]);
    options.unshift([-1, names.length > 1 ? "all, geometric mean" : "all"]);
    workloads.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
    state.workload = names.indexOf(wanted);
    workloads.value = String(state.workload);
  };

  const choose = (entry) => {
    state.entry = entry;
    state.run = 0;
    markChosen();
    if (entry !== null) {
      const texts = entry.runs.map((run, i) => `${run.source}, ${data.tools[run.tools]}${i === 0 && entry.winner ? " (decides)" : ""}`);
      runs.replaceChildren(...texts.map((text, value) => make("option", { value }, text)));
      runs.parentElement.hidden = texts.length === 1;
      keys.value = String(entry.number);
      fillWorkloads();
      offerSteps();
    }
    drawMap();
  };

  // What a pair is on the chosen workload: {kind, us, ratio, status, failure}.
  const judge = (run, cell, best) => {
    if (cell === undefined) return { kind: "none", status: "not tried" };
    const one = state.workload < 0 ? undefined : cell.values[state.workload];
    const failed = one === undefined ? failureOf(cell) : one !== null && one < 0 ? one : undefined;
    if (failed !== undefined) return { kind: "failed", status: statusOf(failed), failure: data.failures[-1 - failed] };
    if (run.source === "interpreted" && one !== null) return { kind: "ran", status: "ok" };
    const us = one === undefined ? cell.us : one;
    if (us === null || us === 0) return { kind: "none", status: one === undefined ? "not on every workload" : "not tried" };
    return { kind: "us", status: "ok", us, ratio: (one === undefined ? cell.score : us) / best };
  };

  const bestOf = (run) => {
    const values = run.cells.map((cell) => (state.workload < 0 ? cell.score : cell.values[state.workload]));
    return Math.min(...values.filter((value) => value !== null && value > 0));
  };

  const why = (failure) => {
    if (!failure) return "";
    const [status, needed, limit, error] = failure;
    // In bytes where the sizes would look the same.
    const [first, second] = mib(needed) === mib(limit) ? [`${needed} bytes`, `${limit} bytes`]
      : [`${mib(needed)} MiB`, `${mib(limit)} MiB`];
    const bytes = needed !== null && limit !== null ? `needs ${first}, limit ${second}` : "";
    return [bytes, error ?? ""].filter(Boolean).join("; ") || status;
  };

  const marksOf = (entry, blocks) => MARKS.filter((mark) => same(mark.of(entry), blocks)).map((mark) => mark.name);

  const drawMap = () => {
    const entry = state.entry;
    if (entry === null) {
      $("map-title").textContent = "No key is left by these filters";
      for (const id of ["map-key", "legend", "map-note"]) $(id).replaceChildren();
      for (const part of [$("pairs").tHead, $("pairs").tBodies[0]]) part.replaceChildren();
      Plotly.purge($("map"));
      $("map").removeAttribute("aria-label");
      return;
    }
    const run = entry.runs[state.run];
    const best = bestOf(run);
    const wanted = MARKS.map((mark) => mark.of(entry)).filter(Boolean);
    const axis = (i, own) => unique([...run.cells.map(own), ...wanted.map((pair) => pair[i])]).sort((a, b) => a - b);
    const pages = axis(0, (cell) => cell.pages), queries = axis(1, (cell) => cell.queries);
    const timed = run.source !== "interpreted";
    $("map-title").textContent = timed
      ? `Latency by block sizes, ${run.source}, us`
      : "Interpreted: which block sizes give the right output";
    $("map-key").replaceChildren(
      make("span", { className: "tag" }, run.source), ` ${TRUST[run.source]}; ${data.tools[run.tools]}`);
    const judged = new Map();
    const grid = pages.map((page) => queries.map((query) => {
      const cell = cellAt(run, [page, query]);
      const found = judge(run, cell, best);
      judged.set(`${page},${query}`, found);
      const percent = found.kind === "us" ? (found.ratio - 1) * 100 : 0;
      const said = found.kind === "us" ? `${digits(found.us)} us, ${run.source}, ${above(found.ratio)} of the best`
        : found.kind === "failed" ? `${found.status}: ${why(found.failure)}` : found.status;
      const lines = found.kind === "us" ? [digits(found.us), found.ratio < 1.0005 ? "best" : above(found.ratio)]
        : found.kind === "failed" ? (STATUSES.has(found.status) ? found.status.split("_") : ["failed"])
          : found.status === "not on every workload" ? ["in part"] : found.status.split(" ");
      return { kind: found.kind, z: found.kind === "us" ? percent : 0, lines, hover: `${page},${query}: ${said}` };
    }));
    const percents = grid.flat().filter((cell) => cell.kind === "us").map((cell) => cell.z);
    const most = Math.min(100, Math.max(10, Math.ceil(Math.max(0, ...percents) / 10) * 10));
    const marks = MARKS.filter((mark) => mark.of(entry)).map((mark) => ({
      ...mark, x: queries.indexOf(mark.of(entry)[1]), y: pages.indexOf(mark.of(entry)[0]),
    }));
    plots.map($("map"), { pages, queries, grid, marks, most, unit: `above the best pair (${run.source})` });
    const counted = [...judged.values()].filter((found) => found.kind === "us").length;
    $("map").setAttribute("aria-label",
      `Heat map of ${counted} pairs with a latency. ${MARKS.map((mark) => `${mark.name}: ${mark.of(entry) ?? "none"}`).join("; ")}. ` +
      "The table below says the same.");
    drawLegend(entry);
    const noise = entry.tied ? ` ${entry.tied} more ${entry.tied === 1 ? "pair is" : "pairs are"} as fast, but for noise.` : "";
    $("map-note").textContent = entry.winner
      ? `Winner and costs are those of all workloads, by the ${entry.source} rows.${noise}`
      : "No pair is ok on every workload: nothing can win.";
    drawPairs(entry, run, judged);
  };

  const drawLegend = (entry) => {
    const items = MARKS.map((mark) => {
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      svg.setAttribute("viewBox", "0 0 16 16");
      svg.setAttribute("aria-hidden", "true");
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      for (const [name, value] of Object.entries({ d: mark.path, fill: mark.fill, stroke: "#10161d", "stroke-width": "1.3" })) {
        path.setAttribute(name, value);
      }
      svg.append(path);
      const text = mark.name === "winner" ? String(entry.winner ?? "none")
        : mark.name === "published" ? costText(entry, entry.published, entry.published_cost, entry.published_status)
          : costText(entry, entry.default, entry.default_cost, entry.default_status);
      return make("span", {}, svg, `${mark.name}${entry.winner ? ` (${entry.source})` : ""}: ${text === "=" ? "the winner" : text}`);
    });
    $("legend").replaceChildren(...items);
  };

  const drawPairs = (entry, run, judged) => {
    const timed = run.source !== "interpreted";
    const measured = run.cells.some((cell) => cell.intervals);
    const failing = run.cells.some((cell) => cell.values.some((value) => value < 0));
    const heads = ["pages", "queries", "mark", "status"];
    if (timed) heads.push(`us, ${run.source}`, "above best");
    if (measured && state.workload >= 0) heads.push("interval, us");
    heads.push("VMEM, MiB");
    if (failing) heads.push("what went wrong");
    const table = $("pairs");
    const left = new Set(["status", "mark", "what went wrong"]);
    table.tHead.replaceChildren(make("tr", {}, ...heads.map((name) => cellOf("th", name, left.has(name) ? "text" : ""))));
    const lines = run.cells
      .map((cell) => [cell, judged.get(`${cell.pages},${cell.queries}`)])
      .sort(([, a], [, b]) => (a.ratio ?? Infinity) - (b.ratio ?? Infinity) || 0);
    table.tBodies[0].replaceChildren(...lines.map(([cell, found]) => {
      const row = make("tr", {}, cellOf("td", cell.pages), cellOf("td", cell.queries),
        cellOf("td", marksOf(entry, [cell.pages, cell.queries]).join(", "), "text dear"),
        cellOf("td", found.status, found.kind === "failed" ? "text failed" : "text"));
      if (timed) row.append(cellOf("td", found.us ? digits(found.us) : ""), cellOf("td", found.ratio ? above(found.ratio) : ""));
      if (measured && state.workload >= 0) {
        const interval = cell.intervals?.[state.workload];
        row.append(cellOf("td", interval ? `${digits(interval[0])} to ${digits(interval[1])}` : ""));
      }
      row.append(cellOf("td", cell.vmem_bytes === null ? "" : mib(cell.vmem_bytes)));
      if (failing) row.append(cellOf("td", why(found.failure), "text long"));
      return row;
    }));
  };

  // ---- predicted against measured

  const drawScatter = () => {
    const numbers = new Set(state.found.map((entry) => entry.number));
    const points = data.points.filter(([entry]) => numbers.has(entry));
    $("scatter-figure").hidden = !points.length;
    if (!points.length) return;
    const drawn = points.map(([entry, blocks, workload, predicted, measured]) => ({
      target: data.entries[entry].target,
      predicted,
      measured,
      label: `${named(data.entries[entry])}; ${blocks} on ${workload}: ` +
        `modelled ${digits(predicted)} us, measured ${digits(measured)} us`,
    }));
    plots.scatter($("scatter"), drawn, unique(data.entries.map((entry) => entry.target)));
    const share = data.points.length < data.all_points
      ? `, of a sample of ${data.points.length} out of ${data.all_points}` : "";
    const part = `${points.length} points${share}.`;
    $("scatter-note").textContent = `${part} Above the dashed line the model expects too long a time. The filters above apply.`;
    $("scatter").setAttribute("aria-label", `Scatter plot of modelled over measured latency. ${part} The table above has the figures.`);
  };

  $("scripted").hidden = false;
  $("more").addEventListener("click", () => { state.shown += ROWS; drawOverview(); });
  buildFilters();
  buildControls();
  filter();
  plots.onThemeChange(() => { drawMap(); drawScatter(); });
})();
