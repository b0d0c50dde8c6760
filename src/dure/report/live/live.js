// Live page of a run: draws the charts and replaces what changes, as the server sends it.
(() => {
  const charts = new Map();  // by the name of their section: version and document of Bokeh
  const connection = document.getElementById("connection");
  const part = (name) => document.querySelector(`[data-live="${name}"]`);

  const place = (order, name, section) => {
    const sections = document.getElementById("sections");
    const old = charts.get(name)?.section;
    if (old) return void old.replaceWith(section);
    const next = order.slice(order.indexOf(name) + 1).find((other) => charts.has(other));
    sections.insertBefore(section, next ? charts.get(next).section : null);
  };

  const forget = ({ document, views }) => {
    const index = Bokeh.documents.indexOf(document);
    if (index >= 0) Bokeh.documents.splice(index, 1);
    views.clear();
    document.clear();
  };

  const draw = async (order, name, { version, html, item }) => {
    const old = charts.get(name);
    if (old?.version === version) return;
    const template = document.createElement("template");
    template.innerHTML = html;
    const section = template.content.firstElementChild;
    const isOpen = old?.section.querySelector("details")?.open ?? false;
    place(order, name, section);
    if (isOpen) section.querySelector("details").open = true;
    if (old) forget(old);
    const views = await Bokeh.embed.embed_item(item, section.querySelector(".chart"));
    charts.set(name, { version, section, views, document: [...views][0].model.document });
    dispatchEvent(new Event("dure-drawn"));
  };

  const show = async ({ order, parts, charts: drawn, numbers }) => {
    for (const [name, chart] of charts) if (!order.includes(name)) {
      forget(chart);
      chart.section.remove();
      charts.delete(name);
    }
    for (const name of order) if (name in drawn) await draw(order, name, drawn[name]);
    for (const [name, html] of Object.entries(parts)) {
      const shown = part(name);
      if (shown) shown.innerHTML = html;
    }
    for (const [name, events] of Object.entries(numbers)) {
      charts.get(name)?.document.apply_json_patch({ events });
      await frame();
    }
  };

  // a chart for each frame, so that scrolling stays smooth; a hidden tab has no frames
  const frame = () => new Promise((done) => { requestAnimationFrame(done); setTimeout(done, 100); });

  const say = (text) => { if (connection.textContent !== text) connection.textContent = text; };
  let shown = Promise.resolve(), waiting = 0, delay = 500;

  const connect = () => {
    const socket = new WebSocket(`ws://${location.host}/live${location.search}`);
    socket.onmessage = ({ data }) => {
      delay = 500;
      say("");
      // a tab in the background may draw nothing: it begins again with the whole state
      if (++waiting > 20) socket.close();
      shown = shown.then(() => show(JSON.parse(data))).catch((error) => {
        console.error(error);
        socket.close();
      }).finally(() => { waiting -= 1; });
    };
    socket.onclose = () => {
      say("The connection to dure watch is lost; this page tries to connect again. If dure watch was started again, " +
          "open the address that it has printed.");
      shown.then(() => setTimeout(connect, delay));
      delay = Math.min(2 * delay, 5000);
    };
  };
  connect();
})();
