"use strict";
// Texts of models and data sets reach the page as textContent alone.
(async () => {
  const byId = (id) => document.getElementById(id);

  function make(tag, className, ...content) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    element.append(...content.filter((part) => part !== null && part !== undefined));
    return element;
  }

  async function unpacked() {
    const bytes = Uint8Array.from(atob(byId("data").textContent.trim()), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  }

  function shown(value, digits = 3) {
    if (value === null || value === undefined) return "—";
    const size = Math.abs(value);
    if (digits === 0) return Math.round(value).toLocaleString("en").replace("-", "−");
    const text = size && (size < 1e-4 || size >= 1e9) ? value.toExponential(2) : size >= 1000 ? Math.round(value).toLocaleString("en") : value.toFixed(size >= 100 ? 1 : size >= 0.1 || !size ? digits : 5);
    return text.replace("-", "−");
  }
  const signed = (value) => (value === null ? "—" : (value > 0 ? "+" : "") + shown(value));

  // ---- curves: a cursor at the same step in all of them, values beside it

  function nearest(steps, wanted) {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < wanted) low = middle; else high = middle;
    }
    return wanted - steps[low] <= steps[high] - wanted ? low : high;
  }

  function tip(panel, step) {
    const rows = panel.lines.map((line) => {
      const i = nearest(line.x, step);
      const exact = line.x[i] === step ? "" : ` (${shown(line.x[i], 0)})`;
      return make("div", "row", make("span", "", make("i", `swatch c${line.color % 6} ${line.style}`), line.label + exact), make("b", "", shown(line.y[i])));
    });
    return make("div", "tip", make("div", "", `step ${shown(step, 0)}`), ...rows);
  }

  function followPointer(panels) {
    const plots = [...document.querySelectorAll(".plot")];
    const clear = () => document.querySelectorAll(".cursor, .tip").forEach((element) => element.remove());
    const left = (panel, step) => panel.left + ((step - panel.low) / (panel.high - panel.low)) * (panel.right - panel.left);
    plots.forEach((plot, index) => {
      const own = panels[index];
      plot.addEventListener("pointerleave", clear);
      plot.addEventListener("pointermove", (event) => {
        const box = plot.getBoundingClientRect();
        const share = ((event.clientX - box.left) / box.width - own.left) / (own.right - own.left);
        const wanted = own.low + Math.min(1, Math.max(0, share)) * (own.high - own.low);
        const steps = own.lines[0].x;
        const step = steps[nearest(steps, wanted)];
        clear();
        plots.forEach((other, i) => {
          if (step < panels[i].low || step > panels[i].high) return;
          const cursor = make("div", "cursor");
          cursor.style.left = `${left(panels[i], step) * 100}%`;
          other.append(cursor);
        });
        const note = tip(own, step);
        if (left(own, step) < 0.5) note.style.left = `calc(${left(own, step) * 100}% + 10px)`;
        else note.style.right = `calc(${(1 - left(own, step)) * 100}% + 10px)`;
        plot.append(note);
      });
    });
  }

  // ---- rollouts

  function tokensMarked(text, special) {
    if (!special.length) return [text];
    const pattern = new RegExp(`(${special.map((token) => token.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|")})`);
    return text.split(pattern).map((part, i) => (i % 2 ? make("span", "token", part) : part));
  }

  function browse(runs) {
    const field = (name) => byId(`f-${name}`);
    const filters = ["ended", "least", "most", "shortest", "longest", "text"];
    let chosen = null, listed = [];

    const run = () => runs[Number(field("run").value) || 0];
    const mean = (group) => {
      const known = group.c.map((completion) => completion.r).filter((reward) => reward !== null);
      return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
    };
    const longest = (group) => Math.max(...group.c.map((completion) => completion.n || 0));
    const spread = (group) => {
      const known = group.c.map((completion) => completion.r).filter((reward) => reward !== null);
      return known.length ? Math.max(...known) - Math.min(...known) : 0;
    };
    const orders = {
      given: () => 0,
      best: (a, b) => (mean(b.group) ?? -Infinity) - (mean(a.group) ?? -Infinity),
      worst: (a, b) => (mean(a.group) ?? Infinity) - (mean(b.group) ?? Infinity),
      spread: (a, b) => spread(b.group) - spread(a.group),
      longest: (a, b) => longest(b.group) - longest(a.group),
    };
    const bound = (name) => (field(name).value === "" ? null : Number(field(name).value));
    const within = (value, low, high) => (low === null || (value !== null && value >= low)) && (high === null || (value !== null && value <= high));

    function filter() {
      const text = field("text").value.toLowerCase(), ended = field("ended").value;
      const [least, most, shortest, farthest] = ["least", "most", "shortest", "longest"].map(bound);
      return (completion) =>
        within(completion.r, least, most) && within(completion.n, shortest, farthest) && (!ended || completion.f === ended) && (!text || (completion.t || "").toLowerCase().includes(text));
    }

    function option(value, label) {
      const made = make("option", "", label);
      made.value = value;
      return made;
    }

    function fillSteps() {
      const steps = run().steps;
      const kinds = { train: "step ", eval: "evaluation ", failed: "stopped at " };
      field("step").replaceChildren(option("all", `all ${steps.length} that are kept here`), ...steps.map((step, i) => option(String(i), kinds[step.kind] + step.label.replace(/^(eval|failed)-/, ""))));
      const train = steps.map((step, i) => (step.kind === "train" ? i : -1)).filter((i) => i >= 0);
      field("step").value = String(train.length ? train[train.length - 1] : steps.length - 1);
      const reasons = new Set(steps.flatMap((step) => step.groups.flatMap((group) => group.c.map((completion) => completion.f))));
      field("ended").replaceChildren(option("", "in any way"), ...[...reasons].filter(Boolean).sort().map((reason) => option(reason, reason)));
    }

    function bars(group, low, high) {
      const strip = make("span", "bars");
      strip.title = "rewards in the group";
      for (const completion of group.c) {
        const bar = make("i");
        bar.style.height = completion.r === null ? "0" : `${high > low ? ((completion.r - low) / (high - low)) * 100 : 50}%`;
        strip.append(bar);
      }
      return strip;
    }

    function snippet(group) {
      const last = (group.p || "").split("\n").map((line) => run().special.reduce((rest, token) => rest.split(token).join(" "), line).trim()).filter(Boolean);
      return last.length > 1 ? last[last.length - 2].length > 12 ? last[last.length - 2] : last[0] : last[0] || "";
    }

    function picture([address, width, height], i) {
      const image = make("img", Math.max(width, height) <= 64 ? "tiny" : "");
      image.src = address;
      image.alt = `image ${i + 1} of the prompt, ${width} × ${height} pixels`;
      image.title = `${width} × ${height} pixels`;
      return image;
    }

    function pictures(group) {
      if (!group.ni) return null;
      const left = group.ni - group.im.length;
      const rest = left ? make("span", "empty", `${left} of ${group.ni} image${group.ni > 1 ? "s" : ""} not shown`) : null;
      return make("div", "images", ...group.im.map(picture), rest);
    }

    function list() {
      const matches = filter(), which = field("step").value;
      const steps = which === "all" ? run().steps : [run().steps[Number(which)]];
      const every = steps.flatMap((step) => step.groups.map((group) => ({ step, group })));
      listed = every.filter(({ group }) => group.c.some(matches)).sort(orders[field("order").value]);
      const found = listed.reduce((sum, { group }) => sum + group.c.filter(matches).length, 0);
      const of = which === "all" ? "" : steps[0].of > steps[0].groups.length ? ` (the step has ${steps[0].of} groups)` : "";
      byId("count").textContent = `${listed.length} of ${every.length} groups${of}, ${found} completions match`;
      byId("reset").hidden = !filters.some((name) => field(name).value !== "");
      const rewards = run().steps.flatMap((step) => step.groups.flatMap((group) => group.c.map((completion) => completion.r))).filter((reward) => reward !== null);
      const low = Math.min(0, ...rewards), high = Math.max(...rewards);
      byId("groups").replaceChildren(...listed.slice(0, 400).map((entry, i) => {
        const where = which === "all" ? `step ${entry.step.label} · ` : "";
        const button = make("button", "", make("div", "line", make("span", "", `${where}row ${entry.group.row} · mean ${shown(mean(entry.group))}`), bars(entry.group, low, high)), make("div", "snippet", entry.group.im && entry.group.im.length ? picture(entry.group.im[0], 0) : null, snippet(entry.group)));
        button.addEventListener("click", () => show(i));
        return button;
      }));
      if (!listed.length) byId("groups").append(make("p", "empty", "No completion is like that."));
      show(Math.max(0, listed.findIndex((entry) => chosen && entry.group === chosen)));
    }

    function scale(value, most) {
      const bar = make("i", value < 0 ? "minus" : "plus");
      const width = most ? (Math.abs(value) / most) * 50 : 0;
      bar.style.left = `${value < 0 ? 50 - width : 50}%`;
      bar.style.width = `${width}%`;
      return make("div", "scale", bar);
    }

    function card(completion, i, most, matches) {
      const functions = Object.entries(completion.rs || {});
      const by = functions.length > 1 ? make("div", "by", ...functions.map(([name, value]) => make("span", "", `${name} ${shown(value)}`))) : null;
      const ended = make("span", completion.f === "truncated" ? "cut" : "", completion.f || "");
      const body = make("p", "text mono", ...(completion.t === null ? [make("span", "empty", "not sampled")] : completion.t === "" ? [make("span", "empty", "(empty)")] : tokensMarked(completion.t, run().special)));
      body.dir = "ltr";
      return make("article", matches(completion) ? "card" : "card dim",
        make("header", "", make("div", "top", make("span", "", `#${i + 1}`), make("span", "", `${shown(completion.n, 0)} tokens · `, ended)),
          make("div", "scores", make("span", "", "reward", make("b", "", shown(completion.r))), make("span", "", "advantage", make("b", "", signed(completion.a)))),
          completion.a === null ? null : scale(completion.a, most), by), body);
    }

    function show(i) {
      [...byId("groups").children].forEach((button, k) => button.setAttribute("aria-pressed", String(k === i)));
      if (!listed.length) { chosen = null; byId("group").replaceChildren(); return; }
      const { step, group } = listed[i];
      chosen = group;
      const most = Math.max(...group.c.map((completion) => Math.abs(completion.a || 0)));
      const prompt = make("p", "text mono prompt", ...tokensMarked(group.p ?? "(the prompt is not in the file)", run().special));
      prompt.dir = "ltr";
      const rest = group.size > group.c.length ? ` · ${group.c.length} of ${group.size} completions` : "";
      const matches = filter();
      byId("group").replaceChildren(make("h3", "", `Step ${step.label} · prompt row ${group.row} · group ${group.i + 1} of ${step.of}${rest}`), ...[pictures(group)].filter(Boolean), prompt, make("div", "cards", ...group.c.map((completion, k) => card(completion, k, most, matches))));
    }

    function move(by) {
      const select = field("step"), next = select.selectedIndex + by;
      if (next < 0 || next >= select.options.length) return;
      select.selectedIndex = next;
      list();
    }

    if (!runs.some((each) => each.steps.length)) return;
    field("run").replaceChildren(...runs.map((each, i) => option(String(i), each.name)));
    field("run").value = String(runs.findIndex((each) => each.steps.length));
    field("run").closest("label").hidden = runs.length < 2;
    fillSteps();
    field("run").addEventListener("input", () => { fillSteps(); list(); });
    ["step", "order", ...filters].forEach((name) => field(name).addEventListener("input", list));
    byId("before").addEventListener("click", () => move(-1));
    byId("after").addEventListener("click", () => move(1));
    byId("reset").addEventListener("click", () => { filters.forEach((name) => { field(name).value = ""; }); list(); });
    list();
  }

  if (typeof DecompressionStream === "undefined") {
    const message = byId("no-script");
    if (message) message.textContent = "This browser is too old to unpack the rollouts; any of 2023 or later does.";
    return;
  }
  const data = await unpacked();
  followPointer(data.panels);
  if (byId("groups")) {
    byId("no-script").remove();
    byId("rollouts-body").hidden = false;
    browse(data.runs);
  }
  document.documentElement.dataset.ready = "yes";
})();
