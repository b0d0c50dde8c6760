// charts are drawn on canvases, which style sheets do not reach
(() => {
  const query = matchMedia("(prefers-color-scheme: dark)");
  const paint = () => {
    const style = getComputedStyle(document.documentElement);
    const [fore, dim, line] = ["--fore", "--dim", "--line"].map((name) => style.getPropertyValue(name).trim());
    for (const shown of Bokeh.documents) for (const model of shown.all_models) {
      for (const [name, color] of [
        ["axis_label_text_color", fore], ["major_label_text_color", dim], ["label_text_color", fore],
        ["title_text_color", fore], ["axis_line_color", dim], ["major_tick_line_color", dim],
        ["minor_tick_line_color", line], ["grid_line_color", line],
      ]) if (name in model) model[name] = color;
    }
  };
  addEventListener("dure-drawn", paint);
  const wait = () => Bokeh.documents.length ? paint() : setTimeout(wait, 20);
  document.addEventListener("DOMContentLoaded", wait);
  query.addEventListener("change", paint);
  // a printed page has all that a reader could open
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = true; }));
})();
