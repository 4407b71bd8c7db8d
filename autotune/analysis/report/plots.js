"use strict";
// The two plots, drawn with plotly.js in the colours of the page.
const plots = (() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // Lightness alone tells the order, so that it can be seen without telling colours apart. The best stands out.
  const SCALES = {
    light: ["#0b6e6e", "#66b3a4", "#a5d3c5", "#d8e8d8", "#f6efdc"],
    dark: ["#5eead4", "#2fa596", "#1f766f", "#1d4f57", "#26323f"],
  };
  const CONFIG = { responsive: true, displayModeBar: false, scrollZoom: false, doubleClick: false };
  const scale = () => {
    const colours = SCALES[dark.matches ? "dark" : "light"];
    return colours.map((c, i) => [i / (colours.length - 1), c]);
  };
  // Plotly reads tags in its labels: text from rows must stay text.
  const literal = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const base = () => ({
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--ink"), family: getComputedStyle(document.body).fontFamily, size: 12 },
    showlegend: false,
    dragmode: false,
    hoverlabel: { bgcolor: colour("--panel"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
  });

  // One trace of cells that share a kind; the others are holes in it.
  const layer = (grid, kind, extra) => ({
    type: "heatmap",
    z: grid.map((row) => row.map((cell) => (cell.kind === kind ? cell.z : null))),
    hovertext: grid.map((row) => row.map((cell) => literal(cell.hover))),
    hovertemplate: "%{hovertext}<extra></extra>",
    hoverongaps: false,
    xgap: 2,
    ygap: 2,
    showscale: false,
    ...extra,
  });
  const flat = (fill) => ({ colorscale: [[0, fill], [1, fill]], zmin: 0, zmax: 1 });

  const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  // The colour at a part of the scale, and black or white, whichever is easier to read on it.
  const inkAt = (part) => {
    const colours = SCALES[dark.matches ? "dark" : "light"];
    const place = Math.min(1, Math.max(0, part)) * (colours.length - 1);
    const low = Math.min(Math.floor(place), colours.length - 2);
    const [from, to] = [colours[low], colours[low + 1]].map(channels);
    const linear = from.map((value, i) => (value + (to[i] - value) * (place - low)) / 255)
      .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179 ? "#000000" : "#ffffff";
  };

  // grid: rows by pages, columns by queries; cells {kind, z, lines, hover}. marks: {x, y, dx, symbol, fill}.
  const map = (element, { pages, queries, grid, marks, most, unit }) => {
    const axis = { fixedrange: true, showgrid: false, zeroline: false, ticks: "" };
    const inner = Math.max(170, 66 * pages.length);
    const inks = { failed: colour("--bad-ink"), ran: colour("--ink"), none: colour("--soft") };
    const cells = grid.flatMap((row, y) => row.map((cell, x) => ({ ...cell, x, y })));
    const traces = [
      layer(grid, "us", {
        colorscale: scale(),
        zmin: 0,
        zmax: most,
        showscale: true,
        colorbar: {
          orientation: "h",
          x: 0.5, xanchor: "center", y: 1, yanchor: "bottom", ypad: 4,
          len: 0.9, thickness: 10, outlinewidth: 0,
          title: { text: unit, side: "top", font: { size: 12 } },
          tickvals: [0, most / 2, most],
          ticktext: ["best", `+${most / 2}%`, `${most === 100 ? "≥ " : ""}+${most}%`],
        },
      }),
      layer(grid, "failed", flat(colour("--bad"))),
      layer(grid, "ran", flat(colour("--pick"))),
      layer(grid, "none", flat(colour("--paper"))),
      {
        type: "scatter",
        mode: "text",
        x: cells.map((cell) => cell.x),
        y: cells.map((cell) => cell.y - 0.13),
        text: cells.map((cell) => cell.lines.join("<br>")),
        textfont: { color: cells.map((cell) => (cell.kind === "us" ? inkAt(cell.z / most) : inks[cell.kind])) },
        hoverinfo: "skip",
      },
      {
        type: "scatter",
        mode: "markers",
        x: marks.map((mark) => mark.x + mark.dx),
        y: marks.map((mark) => mark.y + 0.33),
        marker: {
          symbol: marks.map((mark) => mark.symbol),
          color: marks.map((mark) => mark.fill),
          size: 12,
          line: { color: "#10161d", width: 1.5 },
        },
        hoverinfo: "skip",
      },
    ];
    const layout = {
      ...base(),
      height: inner + 106,
      margin: { l: 58, r: 8, t: 58, b: 48 },
      xaxis: {
        ...axis,
        title: { text: "num_queries_per_blk" },
        tickvals: queries.map((_, i) => i), ticktext: queries.map(String), range: [-0.5, queries.length - 0.5],
      },
      yaxis: {
        ...axis,
        title: { text: "num_kv_pages_per_blk" },
        tickvals: pages.map((_, i) => i), ticktext: pages.map(String), range: [-0.5, pages.length - 0.5],
      },
    };
    return Plotly.react(element, traces, layout, CONFIG);
  };

  const SYMBOLS = ["circle", "square", "diamond", "cross", "triangle-up"];
  const INKS = { light: ["#0b6e6e", "#b4530a", "#5b3aa6", "#a3174f", "#3c4a5c"],
                 dark: ["#5eead4", "#fdba74", "#c4b5fd", "#fda4c4", "#cbd5e1"] };

  // points: {target, predicted, measured, label}; generations in a fixed order, so that each keeps its symbol.
  const scatter = (element, points, generations) => {
    const all = points.flatMap((point) => [point.predicted, point.measured]);
    const low = Math.min(...all) / 1.3, high = Math.max(...all) * 1.3;
    const ends = [Math.log10(low), Math.log10(high)];
    const inks = INKS[dark.matches ? "dark" : "light"];
    const traces = generations.map((target, i) => {
      const own = points.filter((point) => point.target === target);
      return {
        type: "scatter", mode: "markers", name: target,
        x: own.map((point) => point.measured), y: own.map((point) => point.predicted),
        text: own.map((point) => literal(point.label)),
        hovertemplate: "%{text}<extra></extra>",
        marker: { symbol: SYMBOLS[i % SYMBOLS.length], color: inks[i % inks.length], size: 8, opacity: 0.75 },
      };
    });
    traces.unshift({
      type: "scatter", mode: "lines", name: "equal", x: [low, high], y: [low, high], hoverinfo: "skip",
      line: { color: colour("--soft"), width: 1, dash: "dash" },
    });
    const axis = { type: "log", range: ends, fixedrange: true, gridcolor: colour("--line"), dtick: "D2" };
    const layout = {
      ...base(),
      height: 420,
      margin: { l: 62, r: 8, t: 8, b: 52 },
      showlegend: true,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
      xaxis: { ...axis, title: { text: "measured, us" } },
      yaxis: { ...axis, title: { text: "modelled, us" } },
    };
    return Plotly.react(element, traces, layout, CONFIG);
  };

  return { map, scatter, onThemeChange: (redraw) => dark.addEventListener("change", redraw) };
})();
