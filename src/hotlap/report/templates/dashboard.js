(function () {
  "use strict";
  const secret = document.querySelector("meta[name=hotlap-secret]").content;
  const sure = document.getElementById("sure"), news = document.getElementById("news");
  const connection = document.getElementById("connection");
  let state = { machines: [], slices: [], stops: [] }, ahead_s = 0, asked = null;

  // Everything that is shown is put in as text, never as markup: strangers name runs, machines and verdicts.
  const usd = (micros) => micros === null || micros === undefined ? "-" :
    "$" + (micros / 1e6).toFixed(Math.abs(micros) >= 1e6 ? 2 : 4);
  const number = (value) => value === null || value === undefined ? "-" : String(Number(value.toPrecision(5)));
  const word = (value) => value === null || value === undefined || value === "" ? "-" : String(value);
  const now_s = () => Date.now() / 1000 + ahead_s;
  function clock(seconds) {
    const left = Math.max(0, Math.round(seconds)), hours = Math.floor(left / 3600);
    const rest = String(Math.floor(left / 60) % 60).padStart(hours ? 2 : 1, "0") + ":" + String(left % 60).padStart(2, "0");
    return hours ? hours + ":" + rest : rest;
  }

  // What a node says is kept beside it: asking the document costs more than comparing.
  function write(node, text) { if (node.said !== text) { node.textContent = text; node.said = text; } }
  const same = (one, other) => one !== undefined && Object.keys(other).every((name) => one[name] === other[name]);

  // Countdowns run in the rows that are in sight; the others are written when they come into it.
  const sight = new Set();
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) sight.add(entry.target); else sight.delete(entry.target);
    count();
  });

  // One row for each key, kept from message to message, so that focus and scroll stay where they are.
  function table(ident, rows, key, fill, columns) {
    const section = document.getElementById(ident), body = section.querySelector("tbody");
    write(section.querySelector("[data-count]"), rows.length ? "(" + rows.length + ")" : "");
    section.querySelector("[data-empty]").hidden = rows.length > 0;
    section.querySelector(".scroll").hidden = rows.length === 0;
    const old = new Map([...body.children].map((line) => [line.key, line]));
    let place = body.firstChild;
    rows.forEach((row, at) => {
      const name = key(row, at);
      let line = old.get(name);
      old.delete(name);
      if (!line) {
        line = document.createElement("tr");
        line.key = name;
        line.setAttribute("role", "row");
        watch.observe(line);
        for (let column = 0; column < columns; column++) {
          const cell = document.createElement(column ? "td" : "th");
          cell.setAttribute("role", column ? "cell" : "rowheader");
          if (!column) cell.scope = "row";
          line.append(cell);
        }
      }
      if (line === place) place = place.nextSibling; else body.insertBefore(line, place);
      if (!same(line.row, row)) { line.row = row; fill(line, row); }
    });
    for (const line of old.values()) { watch.unobserve(line); sight.delete(line); line.remove(); }
  }

  function texts(line, values) { values.forEach((value, at) => write(line.children[at], value)); }

  function machine(line, row) {
    line.times = machineTimes;
    texts(line, [word(row.run), word(row.machine), word(row.provider), word(row.gpu), word(row.owner), word(row.state)]);
    write(line.children[8], usd(row.worst_usd_micros));
    write(line.children[9], word(row.problems));
    const cell = line.children[10];
    if (!row.may_stop) { write(cell, "-"); return; }
    if (row.is_ending) { write(cell, "ending …"); return; }
    let button = cell.querySelector("button");
    if (!button) {
      button = document.createElement("button");
      button.textContent = "End";
      button.addEventListener("click", () => ask(line.row));
      cell.replaceChildren(button);
      cell.said = null;
    }
    button.setAttribute("aria-label", "End machine " + word(row.machine) + " of " + row.run);
  }

  function slice(line, row) {
    line.times = sliceTimes;
    if (row.trouble) { texts(line, [row.run, "-", "-", "-", row.trouble, "-", "-"]); return; }
    const of = row.num_steps ? row.step + " of " + row.num_steps : String(row.step);
    texts(line, [row.run, String(row.slice), row.host, of]);
    let bar = line.children[4].querySelector("progress");
    if (!bar) {
      bar = document.createElement("progress");
      bar.setAttribute("aria-label", "Progress of " + row.run);
      line.children[4].replaceChildren(bar);
      line.children[4].said = null;
    }
    bar.max = row.num_steps || 1;
    bar.value = row.num_steps ? row.step : 0;
    write(line.children[5], number(row.loss));
    write(line.children[6], number(row.val_loss));
  }

  function budget(day) {
    write(document.getElementById("budget-text"), day.left_text + " left of " + day.limit_text + "; " + day.num_open +
      " machines may be alive; resets at " + day.resets_at + ".");
    for (const [ident, key] of [["budget-usd", "usd_micros"], ["budget-gpu", "gpu_s"]]) {
      const bar = document.getElementById(ident);
      bar.max = Math.max(1, day.limit[key]);
      bar.value = day.charged[key];
      bar.title = key === "gpu_s" ? number(day.charged[key] / 60) + " min" : usd(day.charged[key]);
    }
  }

  function count() {
    const now = now_s();
    for (const line of sight) if (line.times) line.times(line, line.row, now);
  }

  function machineTimes(line, row, now) {
    const left = row.ends_at_s === null ? null : row.ends_at_s - now, cell = line.children[6];
    write(cell, left === null ? "-" : left < 0 ? "over since " + clock(-left) : clock(left));
    cell.classList.toggle("late", left !== null && left < 0);
    const price = row.usd_micros_per_hour;
    write(line.children[7], price === null ? "-" : usd(Math.max(0, now - row.began_s) * price / 3600));
  }

  function sliceTimes(line, row, now) { write(line.children[7], row.ends_at_s ? clock(row.ends_at_s - now) : "-"); }

  function ask(row) {
    asked = row;
    write(document.getElementById("sure-text"), "End machine " + word(row.machine) + " of " + row.run +
      "? Whatever its slice has not published is trained again; what it cost so far is charged.");
    sure.returnValue = "keep";
    sure.showModal();
  }

  sure.addEventListener("close", async () => {
    if (sure.returnValue !== "end" || !asked) return;
    try {
      const answer = await fetch("/stop", { method: "POST", body: JSON.stringify({ run: asked.run }),
        headers: { "Content-Type": "application/json", "X-Hotlap-Secret": secret } });
      if (!answer.ok) write(news, "Not ended: " + await answer.text());
    } catch (error) { write(news, "Not ended: hotlap dashboard does not answer."); }
  });

  function show(message) {
    ahead_s = message.now_s - Date.now() / 1000;
    state = Object.assign(state, message);
    if (message.budget) budget(message.budget);
    if (message.machines || message.stops) {
      const ending = new Set(state.stops.filter((each) => each.state === "ending").map((each) => each.run));
      const rows = state.machines.map((row) => Object.assign({ is_ending: ending.has(row.run) }, row));
      table("machines", rows, (row) => row.key, machine, 11);
    }
    if (message.slices) table("slices", state.slices, (row) => row.run, slice, 8);
    if (message.verdicts) {
      const told = message.verdicts;
      table("studies", told.studies, (row) => row.study,
        (line, row) => texts(line, [row.study, String(row.num_runs), number(row.lowest)]), 3);
      table("newest", told.newest, (row, at) => String(at),
        (line, row) => texts(line, [row.where, word(row.what), word(row.verdict), word(row.why)]), 4);
    }
    if (message.troubles) table("troubles", message.troubles, (row) => row.where,
      (line, row) => texts(line, [row.where, row.what]), 2);
    if (message.stops && message.stops.length)
      write(news, message.stops.map((each) => each.run + ": " + each.state + ": " + each.text).join(" · "));
    count();
  }

  const source = new EventSource("/events");
  source.onmessage = (event) => {
    connection.className = "soft";
    write(connection, "Live. Providers are asked every 10 s.");
    show(JSON.parse(event.data));
    document.documentElement.dataset.live = "yes";
  };
  source.onerror = () => {
    connection.className = "lost";
    write(connection, "hotlap dashboard does not answer; what stands here is old. Trying again …");
    document.documentElement.dataset.live = "no";
  };
  setInterval(count, 1000);
})();
