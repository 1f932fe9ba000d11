(function () {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const still = window.matchMedia("(prefers-reduced-motion: reduce)");
  function dressed(figure) {
    const layout = figure.layout;
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--ink").trim(), line = style.getPropertyValue("--line").trim();
    const soft = style.getPropertyValue("--soft").trim();
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
    return Object.assign({}, layout, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 12 },
      margin: { l: 48, r: 12, t: 32, b: 40 }, legend: { orientation: "h", y: -0.32, yanchor: "top" }, showlegend: figure.data.length > 1,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: ink },
      xaxis: Object.assign({}, axis, layout.xaxis), yaxis: Object.assign({}, axis, layout.yaxis),
      transition: { duration: still.matches ? 0 : 150 },
    });
  }
  const drawn = new Set();
  function draw(place) {
    drawn.add(place);
    const figure = figures[place.dataset.chart];
    Plotly.react(place, figure.data, dressed(figure), {
      responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"],
    });
  }
  // A page may have many charts, and drawing one takes longer than a frame. So each is drawn when it is near and
  // scrolling rests, one at a time; and all of them before they are printed.
  const places = [...document.querySelectorAll("[data-chart]")], waiting = new Set(), rest_ms = 120;
  let scrolled_at = -Infinity, timer = 0;
  function soon(ms) { timer = timer || setTimeout(drawOne, ms); }
  function drawOne() {
    timer = 0;
    const left_ms = scrolled_at + rest_ms - performance.now(), [place] = waiting;
    if (!place) { document.documentElement.dataset.drawn = "yes"; return; }
    if (left_ms > 0) { soon(left_ms); return; }
    waiting.delete(place);
    if (!drawn.has(place)) draw(place);
    soon(0);
  }
  // Figures are watched, not charts: a browser that skips what is out of sight sees nothing inside of a figure.
  const near = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const place = target.querySelector("[data-chart]");
      if (isIntersecting && !drawn.has(place)) waiting.add(place); else waiting.delete(place);
    }
    soon(0);
  }, { rootMargin: "600px" });
  addEventListener("scroll", () => { scrolled_at = performance.now(); }, { passive: true });
  places.forEach((place) => near.observe(place.closest("figure")));
  addEventListener("beforeprint", () => places.filter((place) => !drawn.has(place)).forEach(draw));
  dark.addEventListener("change", () => drawn.forEach(draw));
})();
