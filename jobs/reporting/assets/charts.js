"use strict";
// Draws the charts from the figures in the page. Colours come from the style sheet, so both themes have one source.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const against = figures.against;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  const span = (seconds) => {
    const s = Math.round(seconds * 10) / 10;
    if (s < 120) return s + " s";
    if (s < 7200) return Math.round(s / 6) / 10 + " min";
    return Math.round(s / 360) / 10 + " h";
  };
  const rounded = (value, digits = 2) => value.toLocaleString("en", { maximumFractionDigits: digits });

  const frame = (x, y, tooltip) => ({
    animation: false,
    textStyle: { fontFamily: getComputedStyle(document.body).fontFamily },
    grid: { left: 8, right: 14, top: 20, bottom: 4, containLabel: true },
    tooltip: {
      renderMode: "richText", confine: true, backgroundColor: colour("card"), borderColor: colour("rule"), borderWidth: 1,
      padding: [6, 9], textStyle: { color: colour("ink"), fontSize: 12 }, ...tooltip,
    },
    xAxis: axis(x, false), yAxis: axis(y, true),
  });
  const axis = (settings, lines) => ({
    axisLine: { show: false }, axisTick: { show: false },
    splitLine: { show: lines, lineStyle: { color: colour("rule") } },
    ...settings,
    axisLabel: { color: colour("faint"), fontSize: 11, hideOverlap: true, ...settings.axisLabel },
  });
  const ROUND_TIMES = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  const timeAxis = (total) => ({
    type: "value", min: 0, max: total, interval: ROUND_TIMES.find((s) => total / s <= 6) ?? Math.ceil(total / 6 / 86400) * 86400,
    axisLabel: { formatter: span, showMaxLabel: false },
  });
  const values = { type: "value", axisLabel: { formatter: (v) => rounded(v) }, splitNumber: 4 };
  const counts = { ...values, minInterval: 1 };
  const legend = (names) => ({ legend: {
    show: names.length > 1, data: names, top: 0, left: 0, itemWidth: 14, itemHeight: 8, textStyle: { color: colour("soft"), fontSize: 12 },
  } });
  const withLegend = (option, names) => {
    Object.assign(option, legend(names));
    if (names.length > 1) option.grid.top = 42;
    return option;
  };

  const steps = (t) => {
    const points = t.throughput.tokens_per_s.map((v, i) => [i * t.throughput.bin_s, v]);
    return [...points, [t.total_s, points.length ? points[points.length - 1][1] : 0]];
  };
  const pauseLines = (t, position = "end") => ({
    silent: true, symbol: "none", lineStyle: { color: colour("warn"), type: "dotted", width: 1 },
    label: { color: colour("warn"), fontSize: 11, position, distance: 3, formatter: (p) => "paused " + span(p.data.left_out) },
    data: t.pauses.map(([at, seconds]) => ({ xAxis: at, left_out: seconds })),
  });

  const builders = {
    throughput() {
      const t = figures.times;
      if (!t) return null;
      const other = against && against.times;
      const option = frame(timeAxis(Math.max(t.total_s, other ? other.total_s : 0)), values, { trigger: "axis", formatter: (items) =>
        span(items[0].value[0]) + items.map((p) => `\n${p.seriesName}: ${rounded(p.value[1], 1)}`).join("") });
      const area = { opacity: 0.14 };
      option.series = [{ name: "tokens per second", type: "line", step: "end", symbol: "none", data: steps(t), color: colour("c0"),
        lineStyle: { width: 1.5 }, areaStyle: area, markLine: pauseLines(t) }];
      if (other) option.series.push({ name: "other", type: "line", step: "end", symbol: "none", data: steps(other), color: colour("c1"), lineStyle: { width: 1.5, type: "dashed" } });
      return withLegend(option, other ? ["tokens per second", "other"] : []);
    },
    rows_done() {
      const t = figures.times;
      if (!t) return null;
      const other = against && against.times;
      const option = frame(timeAxis(Math.max(t.total_s, other ? other.total_s : 0)), values, { trigger: "axis", formatter: (items) =>
        span(items[0].value[0]) + items.map((p) => `\n${p.seriesName}: ${rounded(p.value[1], 0)}`).join("") });
      const marks = [50, 90, 99].map((share) => ({ share, at: t.tail[`rows_${share}_s`] }));
      option.series = [{ name: "rows", type: "line", step: "end", symbol: "none", data: t.throughput.rows_done, color: colour("c2"), lineStyle: { width: 1.5 },
        areaStyle: { opacity: 0.1 },
        markLine: { silent: true, symbol: "none", lineStyle: { color: colour("faint"), type: "dotted", width: 1 },
          label: { color: colour("faint"), fontSize: 11, position: "end", distance: 3, formatter: (p) => p.data.share + " %" },
          data: marks.filter((m, i) => i === 0 || m.at > marks[i - 1].at + 0.12 * t.total_s).map((m) => ({ xAxis: m.at, share: m.share })) } }];
      if (other) option.series.push({ name: "other", type: "line", step: "end", symbol: "none", data: other.throughput.rows_done, color: colour("c1"), lineStyle: { width: 1.5, type: "dashed" } });
      return withLegend(option, other ? ["rows", "other"] : []);
    },
    acceptance_histogram: () => shares("acceptance_histogram", "c0", "accepted"),
    window_histogram: () => shares("window_histogram", "c3", "drafted"),
    occupancy() {
      const classes = figures.occupancy;
      if (!classes.length) return null;
      const total = classes.reduce((sum, c) => sum + c.steps, 0);
      const names = classes.map((c) => (c.from === c.to ? String(c.from) : `${c.from}–${c.to}`));
      const option = frame({ type: "category", data: names, name: "sequences decoded at once", nameLocation: "middle", nameGap: 24, nameTextStyle: { color: colour("faint"), fontSize: 11 } }, values,
        { trigger: "axis", axisPointer: { type: "shadow" }, formatter: (items) => {
          const c = classes[items[0].dataIndex];
          return `${names[items[0].dataIndex]} at once\nwindow: ${rounded(c.window)}\ntokens per step: ${rounded(c.tokens_per_step)}\n${rounded(c.steps, 0)} steps, ${rounded(100 * c.steps / total, 1)} %`;
        } });
      option.grid.bottom = 22;
      option.series = [
        { name: "draft rows", type: "bar", data: classes.map((c) => c.window), color: colour("c3"), barMaxWidth: 34, itemStyle: { borderRadius: [2, 2, 0, 0] } },
        { name: "new tokens", type: "bar", data: classes.map((c) => c.tokens_per_step), color: colour("c0"), barMaxWidth: 34, itemStyle: { borderRadius: [2, 2, 0, 0] } },
      ];
      return withLegend(option, ["draft rows", "new tokens"]);
    },
    window_time() {
      const t = figures.times;
      if (!t || !t.by_shard.length) return null;
      const option = frame(timeAxis(t.total_s), values, { trigger: "item", formatter: (p) =>
        `shard ${p.value[2]}, ${span(p.value[0])}\n${p.seriesName}: ${rounded(p.value[1])}` });
      const dots = (name, column, c) => ({ name, type: "scatter", symbolSize: t.by_shard.length > 400 ? 3 : 6, color: colour(c), itemStyle: { opacity: 0.8 }, data: t.by_shard.map((p) => [p[0], p[column], p[3]]) });
      option.series = [dots("mean window", 1, "c3"), dots("tokens per step", 2, "c0")];
      return withLegend(option, ["mean window", "tokens per step"]);
    },
    completion_tokens: () => lengths("completion_tokens", "c2"),
    prompt_tokens: () => lengths("prompt_tokens", "c6"),
    workers(plot) {
      const t = figures.times;
      const { lanes, bars, restarts } = t.workers;
      const lane = Math.max(7, Math.min(34, 700 / lanes.length));
      plot.style.height = Math.round(lanes.length * lane + 46) + "px";
      const option = frame(timeAxis(t.total_s), { type: "category", data: lanes, inverse: true, splitLine: { show: false } },
        { trigger: "item", formatter: (p) => {
          const b = p.value;
          if (p.seriesIndex === 1) return `${lanes[b[1]]}: another process from ${span(b[0])} on`;
          return `shard ${b[5]}${b[6] > 1 ? `, attempt ${b[6]}` : ""} on ${lanes[b[0]]}\n${span(b[2])} to ${span(b[3])}: ${span(b[3] - b[2])}\n${rounded(b[7], 0)} rows, ${rounded(b[8], 0)} tokens`;
        } });
      const shades = { first: colour("c0"), slow: colour("c4"), redone: colour("bad") };
      option.series = [{
        type: "custom", data: bars, encode: { x: [2, 3], y: 0 },
        renderItem(params, api) {
          const [x0, y] = api.coord([api.value(2), api.value(0)]);
          const [x1] = api.coord([api.value(3), api.value(0)]);
          const height = api.size([0, 1])[1] * 0.78;
          const kind = bars[params.dataIndex][4];
          return { type: "rect", shape: { x: x0, y: y - height / 2 + (api.value(1) * height) / 2, width: Math.max(x1 - x0 - 0.8, 1), height: height / 2 - 1, r: 1.5 },
            style: { fill: shades[kind], opacity: kind === "first" ? 0.75 : 0.95 } };
        },
      }, {
        type: "custom", data: restarts.map(([at, when]) => [when, at]), encode: { x: 0, y: 1 }, z: 5,
        renderItem(params, api) {
          const [x, y] = api.coord([api.value(0), api.value(1)]);
          const height = api.size([0, 1])[1];
          return { type: "rect", shape: { x: x - 1.5, y: y - height / 2, width: 3, height }, style: { fill: colour("ink") } };
        },
      }];
      if (t.pauses.length) option.series.push({ type: "line", data: [], markLine: pauseLines(t, "start") });
      return option;
    },
  };

  function shares(name, c, what) {
    const mine = figures[name];
    const total = mine.reduce((a, b) => a + b, 0);
    if (!total) return null;
    const rows = [{ name: "this", counts: mine, total, c }];
    if (against) rows.push({ name: "other", counts: against[name], total: against[name].reduce((a, b) => a + b, 0), c: "c1" });
    const size = Math.max(...rows.map((r) => r.counts.length));
    const option = frame({ type: "category", data: [...Array(size).keys()] }, { ...values, axisLabel: { formatter: (v) => rounded(v) + " %" } },
      { trigger: "axis", axisPointer: { type: "shadow" }, formatter: (items) => `${items[0].name} ${what}` + items.map((p) =>
        `\n${rows.length > 1 ? p.seriesName + ": " : ""}${rounded(p.value, 1)} % of steps, ${rounded(rows[p.seriesIndex].counts[p.dataIndex] || 0, 0)}`).join("") });
    option.series = rows.map((r) => ({ name: r.name, type: "bar", color: colour(r.c), barMaxWidth: 34, itemStyle: { borderRadius: [2, 2, 0, 0] },
      data: [...Array(size).keys()].map((i) => (r.total ? (100 * (r.counts[i] || 0)) / r.total : 0)) }));
    return withLegend(option, rows.map((r) => r.name));
  }

  function lengths(name, c) {
    const h = figures[name];
    if (!h.counts.length) return null;
    const from = (i) => h.start + i * h.width;
    const label = (i) => (h.width === 1 ? String(from(i)) : `${from(i)}–${from(i + 1) - 1}`);
    const option = frame({ type: "category", data: h.counts.map((_, i) => from(i)) }, counts,
      { trigger: "axis", axisPointer: { type: "shadow" }, formatter: (items) => `${label(items[0].dataIndex)} tokens\n${rounded(items[0].value, 0)} samples` });
    option.series = [{ type: "bar", data: h.counts, color: colour(c), barCategoryGap: "12%", barMaxWidth: 60, itemStyle: { borderRadius: [2, 2, 0, 0] } }];
    return option;
  }

  const drawn = [];
  for (const card of document.querySelectorAll("[data-chart]")) {
    const plot = card.querySelector(".plot");
    const build = builders[card.dataset.chart];
    const option = build(plot);
    if (option === null) {
      plot.className = "none";
      plot.textContent = card.dataset.chart === "occupancy" ? "Not stored by the version that made these shards." : "Nothing to show yet.";
      continue;
    }
    const many = card.dataset.chart === "workers" && figures.times.workers.bars.length > 2000;
    const chart = echarts.init(plot, null, { renderer: many ? "canvas" : "svg" });
    chart.setOption(option);
    drawn.push({ chart, plot, build });
    new ResizeObserver(() => chart.resize()).observe(plot);
  }
  const redraw = () => drawn.forEach(({ chart, plot, build }) => chart.setOption(build(plot), true));
  dark.addEventListener("change", redraw);
  still.addEventListener("change", redraw);
})();
