"use strict";
(() => {
  let data = { figures: {} };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  async function unpacked(id) {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }
  async function loadPlotly() {  // the page's policy has the hash of the script, and lets no other run
    const script = document.createElement("script");
    script.textContent = await unpacked("plotly");
    document.head.append(script);
  }
  const plots = () => [...document.querySelectorAll(".plot")].filter((plot) => data.figures[plot.id]);

  // Figures. Their ink and grid are the page's, so they follow it from light to dark and onto paper.
  function theme() {
    const axis = { gridcolor: colour("grid"), zerolinecolor: colour("line"), linecolor: colour("line") };
    const look = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      "font.color": colour("soft"), "font.family": colour("text"), "font.size": 12,
      "hoverlabel.bgcolor": colour("raised"), "hoverlabel.bordercolor": colour("line"), "hoverlabel.font.color": colour("ink"),
      "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": colour("soft"), "modebar.activecolor": colour("accent"),
    };
    for (const name of ["xaxis", "yaxis"]) for (const key in axis) look[`${name}.${key}`] = axis[key];
    return look;
  }
  function nested(flat) {
    const tree = {};
    for (const [path, value] of Object.entries(flat)) {
      const keys = path.split("."), last = keys.pop();
      let at = tree;
      for (const key of keys) at = at[key] ??= {};
      at[last] = value;
    }
    return tree;
  }
  function merged(under, over) {
    for (const [key, value] of Object.entries(over)) {
      under[key] = value && typeof value === "object" && !Array.isArray(value) ? merged(under[key] ?? {}, value) : value;
    }
    return under;
  }
  const heat = () => [[0, colour("raised")], [1, colour("heat")]];

  // On a narrow screen the names along a heat map are fewer and shorter.
  function thin(layout, width) {
    for (const axis of [layout.xaxis, layout.yaxis]) {
      const every = Math.ceil((axis.tickvals.length * 14) / (width - 110));
      const kept = (list) => list.filter((_, place) => place % every === 0);
      axis.tickvals = kept(axis.tickvals);
      axis.ticktext = kept(axis.ticktext).map((text) => (/^[^&]{13,}$/.test(text) ? `${text.slice(0, 11)}…` : text));
    }
  }

  async function draw(plot) {
    const figure = data.figures[plot.id], narrow = plot.clientWidth < 480;
    const layout = merged(figure.layout, nested(theme()));
    const square = figure.data[0]?.type === "heatmap" ? plot.clientWidth : figure.data[0]?.type === "scattergl" ? 400 : Infinity;
    if (narrow && layout.height > square) { layout.height = square; plot.style.height = `${square}px`; }
    if (touch.matches) {  // a finger on a figure scrolls the page
      layout.dragmode = false;
      layout.xaxis.fixedrange = layout.yaxis.fixedrange = true;
    }
    for (const trace of figure.data) {
      if (trace.type === "heatmap") { trace.colorscale = heat(); if (narrow) { trace.showscale = false; thin(layout, plot.clientWidth); } }
    }
    const config = {
      responsive: true, displaylogo: false, scrollZoom: plot.id === "map" && !narrow,
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
      displayModeBar: touch.matches ? false : "hover",
      toImageButtonOptions: { format: "svg", filename: plot.id },
    };
    await Plotly.newPlot(plot, figure.data, layout, config);
    plot.dataset.drawn = "yes";
    if (plot.id === "map" && data.images) explore(plot);
  }
  function recolour() {
    for (const plot of plots()) {
      if (!plot.dataset.drawn) continue;
      Plotly.relayout(plot, theme());
      if (plot.data[0]?.type === "heatmap") Plotly.restyle(plot, { colorscale: [heat()] });
    }
  }
  async function drawAll() {
    for (const plot of plots()) {
      await draw(plot);
      await new Promise((next) => setTimeout(next));  // let the page breathe between figures
    }
  }

  // The map: the image of a point in a card beside it, under the mouse or by arrow keys.
  function explore(plot) {
    const images = data.images, sources = JSON.parse(document.getElementById("sheets").textContent), card = plot.parentElement.querySelector(".card");
    const [canvas, [name, note]] = [card.querySelector("canvas"), card.querySelectorAll("p")];
    const sheets = sources.map(() => null);
    const order = plot.data.flatMap((trace, curve) => trace.customdata.map((_, point) => [curve, point]));
    let at = -1, wanted = -1;

    function sheet(number) {
      if (!sheets[number]) { sheets[number] = new Image(); sheets[number].src = sources[number]; }
      return sheets[number];
    }
    async function show(place, x, y) {
      wanted = place;
      const picture = sheet(Math.floor(place / images.perSheet)), inside = place % images.perSheet, side = images.side;
      await picture.decode();
      if (wanted !== place) return;  // the mouse has moved on
      const left = (inside % images.columns) * side, top = Math.floor(inside / images.columns) * side;
      canvas.getContext("2d").drawImage(picture, left, top, side, side, 0, 0, canvas.width, canvas.height);
      name.textContent = images.notes[place];
      note.textContent = images.names[place];
      card.hidden = false;
      card.dataset.place = place;
      const beside = x + 16 + card.offsetWidth > plot.clientWidth ? x - 16 - card.offsetWidth : x + 16;
      card.style.left = `${Math.max(0, beside)}px`;
      const above = plot.offsetTop + Math.min(y, plot.clientHeight - card.offsetHeight);
      card.style.top = `${Math.max(plot.offsetTop, above)}px`;
    }
    function position(curve, point) {
      const { xaxis, yaxis, _size } = plot._fullLayout, trace = plot.data[curve];
      return [_size.l + xaxis.d2p(trace.x[point]), _size.t + yaxis.d2p(trace.y[point])];
    }
    plot.on("plotly_hover", ({ points: [point] }) => show(point.customdata, ...position(point.curveNumber, point.pointNumber)));
    plot.on("plotly_unhover", () => { wanted = -1; card.hidden = true; });
    plot.addEventListener("pointerup", (event) => {  // a finger does not hover: the nearest image is meant
      if (event.pointerType !== "touch") return;
      const frame = plot.getBoundingClientRect();
      const away = ([curve, point]) => {
        const [x, y] = position(curve, point);
        return Math.hypot(x - event.clientX + frame.left, y - event.clientY + frame.top);
      };
      const shown = order.filter(([curve]) => plot.data[curve].visible !== "legendonly");
      const distances = shown.map(away), least = distances.reduce((a, b) => Math.min(a, b), Infinity);
      card.hidden = true;
      if (least > 24) return;
      const [curve, point] = shown[distances.indexOf(least)];
      show(plot.data[curve].customdata[point], ...position(curve, point));
    }, true);
    plot.tabIndex = 0;
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") card.hidden = true;
      if (!step) return;
      event.preventDefault();
      at = (at + step + order.length) % order.length;
      const [curve, point] = order[at], place = plot.data[curve].customdata[point];
      plot.setAttribute("aria-label", `${images.notes[place]}, ${images.names[place]}`);
      show(place, ...position(curve, point));
    });
    plot.addEventListener("blur", () => { card.hidden = true; });
    highlight(plot);
  }

  // Its legend: pointing at a group, or going to it by the keyboard, dims the others; a click keeps it so.
  function highlight(plot) {
    const buttons = [...plot.parentElement.querySelectorAll(".legend button")], usual = plot.data.map((trace) => trace.marker.opacity);
    let kept = -1, shown = -1, waiting = false;
    function dim(number) {
      shown = number;
      if (waiting) return;  // a mouse crosses many groups in one frame
      waiting = true;
      requestAnimationFrame(() => {
        waiting = false;
        plot.dataset.shown = shown;
        Plotly.restyle(plot, { "marker.opacity": usual.map((value, i) => (shown < 0 ? value : i === shown ? 1 : 0.06)) });
      });
    }
    buttons.forEach((button, number) => {
      for (const event of ["mouseenter", "focus"]) button.addEventListener(event, () => dim(number));
      for (const event of ["mouseleave", "blur"]) button.addEventListener(event, () => dim(kept));
      button.addEventListener("click", () => {
        kept = kept === number ? -1 : number;
        buttons.forEach((other, i) => other.setAttribute("aria-pressed", String(i === kept)));
        dim(kept);
      });
    });
  }

  // Tables that sort: numbers by value, the rest by the alphabet; what is empty stays last.
  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const rows = [...body.rows].map((row) => ({ row, key: key(row), number: Number(key(row)) }));
      const empty = ({ key }) => key === "";
      rows.sort((a, b) => {
        if (empty(a) || empty(b)) return empty(a) - empty(b);
        const numbers = !Number.isNaN(a.number) && !Number.isNaN(b.number);
        const order = numbers ? a.number - b.number : a.key.localeCompare(b.key);
        return down ? -order : order;
      });
      body.append(...rows.map(({ row }) => row));
    }));
  }

  // The gallery shows what is asked for.
  function filter() {
    const gallery = document.querySelector(".gallery"), more = document.getElementById("gallery-all");
    const chosen = document.getElementById("gallery-class"), wrong = document.getElementById("gallery-wrong");
    const all = () => { gallery.classList.remove("short"); more?.remove(); };
    more?.addEventListener("click", all);
    if (!chosen) return;
    const apply = () => {
      all();
      for (const row of gallery.children) {
        row.hidden = (chosen.value !== "" && row.dataset.class !== chosen.value) || (wrong.checked && !("wrong" in row.dataset));
      }
    };
    chosen.addEventListener("change", apply);
    wrong.addEventListener("change", apply);
  }

  // Contents follow what is on the screen.
  function follow() {
    const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
    const seen = new Set();
    const observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) seen[isIntersecting ? "add" : "delete"](target.id);
      const current = [...links.keys()].find((id) => seen.has(id));
      if (!current) return;  // between two sections the last one stays
      for (const [id, link] of links) id === current ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
    }, { rootMargin: "-10% 0px -60% 0px" });
    document.querySelectorAll("section").forEach((section) => observer.observe(section));
  }

  document.querySelectorAll("table.sortable").forEach(sortable);
  filter();
  follow();
  async function start() {
    if (window.DecompressionStream) {
      data = JSON.parse(await unpacked("data"));
      if (document.getElementById("plotly")) await loadPlotly().then(drawAll);
    } else {
      const text = "This browser is too old to draw figures. They are in the folder figures, beside this page.";
      for (const plot of document.querySelectorAll(".plot")) plot.textContent = text;
    }
    document.body.dataset.ready = "yes";
  }
  start();
  dark.addEventListener("change", recolour);

  // Paper is white and narrow, and nothing on it can be opened.
  let unfolded = [];
  function resize(width) {
    for (const plot of plots()) if (plot.dataset.drawn) Plotly.relayout(plot, { width: width(plot), autosize: true });
  }
  addEventListener("beforeprint", () => {
    document.documentElement.dataset.paper = "yes";
    unfolded = [...document.querySelectorAll("section > details:not([open])")];
    for (const one of unfolded) one.open = true;
    recolour();
    resize((plot) => (plot.closest(".pair") ? 320 : 660));
  });
  addEventListener("afterprint", () => {
    delete document.documentElement.dataset.paper;
    for (const one of unfolded) one.open = false;
    recolour();
    resize(() => null);
  });
})();
