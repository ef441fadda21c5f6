(function () {
  "use strict";
  // What plotly does not do by itself on a phone: smaller letters, titles and names on several lines,
  // no more whole numbers along an axis than there is room for. Panels side by side keep a width that
  // can be read; the figure then scrolls in its own box.
  var NARROW = 600, PANEL = 260, SMALL = 11, LETTER = 6, TICK = 16, BESIDE = 90, NAME = 18;

  function lines(text, most) {
    if (text.indexOf("<") >= 0) return text;
    return text.split(" ").reduce(function (done, word) {
      var last = done[done.length - 1];
      if (last && (last + " " + word).length <= most) done[done.length - 1] = last + " " + word;
      else done.push(word);
      return done;
    }, []).join("<br>");
  }

  function axes(layout, letter) {
    return Object.keys(layout).filter(function (name) { return new RegExp("^" + letter + "axis\\d*$").test(name); });
  }

  function panels(layout) {
    return new Set(axes(layout, "x").map(function (name) { return (layout[name].domain || [0])[0]; })).size;
  }

  function fit(spec, width) {
    var layout = spec.layout;
    layout.font = Object.assign({}, layout.font, { size: SMALL });
    var names = new Set();
    spec.data.forEach(function (trace) {
      if (Array.isArray(trace.y)) trace.y.forEach(function (y) { if (typeof y === "string") names.add(y); });
    });
    var longest = 0;
    if (names.size) axes(layout, "y").forEach(function (name) {
      if (layout[name].tickmode) return;
      layout[name].tickmode = "array";
      layout[name].tickvals = Array.from(names);
      layout[name].ticktext = Array.from(names, function (text) { return lines(text, NAME); });
      layout[name].ticktext.forEach(function (text) {
        text.split("<br>").forEach(function (line) { longest = Math.max(longest, line.length); });
      });
    });
    var free = width - Math.max(BESIDE, 40 + longest * LETTER);
    axes(layout, "x").forEach(function (name) {
      var axis = layout[name], domain = axis.domain || [0, 1];
      var room = free * (domain[1] - domain[0]);
      if (axis.title && axis.title.text) axis.title.text = lines(axis.title.text, Math.floor(room / LETTER));
      if (axis.dtick === 1 && axis.range && axis.type !== "log") {
        axis.dtick = Math.max(1, Math.ceil(Math.abs(axis.range[1] - axis.range[0]) * TICK / room));
      }
    });
  }

  document.querySelectorAll("script.figure").forEach(function (source) {
    var spec = JSON.parse(source.textContent);
    var chart = document.getElementById(source.dataset.for);
    var columns = panels(spec.layout);
    if (columns > 1) chart.style.minWidth = columns * PANEL + "px";
    if (chart.clientWidth < NARROW) fit(spec, chart.clientWidth);
    Plotly.newPlot(chart, spec.data, spec.layout, spec.config);
  });

  function value(row, index) {
    var cell = row.cells[index];
    if (cell.className === "none") return null;
    return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
  }

  document.querySelectorAll("table.sortable").forEach(function (table) {
    var body = table.tBodies[0];
    var heads = Array.from(table.tHead.rows[0].cells);
    heads.forEach(function (head, index) {
      head.querySelector("button").addEventListener("click", function () {
        // Numbers: largest first. What was not measured stays at the end either way.
        var numeric = Array.from(body.rows).some(function (row) { return typeof value(row, index) === "number"; });
        var now = head.getAttribute("aria-sort");
        var descending = now ? now !== "descending" : numeric;
        heads.forEach(function (other) { other.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        Array.from(body.rows).map(function (row) { return [value(row, index), row]; }).sort(function (a, b) {
          if (a[0] === null || b[0] === null) return (a[0] === null) - (b[0] === null);
          var order = numeric ? a[0] - b[0] : a[0].localeCompare(b[0]);
          return descending ? -order : order;
        }).forEach(function (pair) { body.appendChild(pair[1]); });
      });
    });

    var search = table.parentNode.previousElementSibling;
    var input = search.querySelector("input");
    input.addEventListener("input", function () {
      var wanted = input.value.trim().toLowerCase();
      var found = 0;
      Array.from(body.rows).forEach(function (row) {
        row.hidden = wanted !== "" && row.textContent.toLowerCase().indexOf(wanted) < 0;
        found += row.hidden ? 0 : 1;
      });
      search.querySelector("span").textContent = wanted ? found + " of " + body.rows.length + " rows" : "";
    });
  });

  // Browsers: rows are made when they are wanted, and only ever as text.

  var STEP = 100;

  function make(parent, tag, text, name) {
    var node = document.createElement(tag);
    if (text !== undefined && text !== null) node.textContent = text;
    if (name) node.className = name;
    if (parent) parent.appendChild(node);
    return node;
  }

  function foreign(parent, text, name) {
    var outer = make(parent, "span", null, name);
    make(outer, "bdi", text);
    return outer;
  }

  function shown(value) {
    if (value === null || value === undefined) return "\u2013";
    if (value === true) return "yes";
    if (value === false) return "no";
    return typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(4))) : String(value);
  }

  function long(text, most) {
    var letters = Array.from(text);
    if (letters.length <= most) return text;
    return letters.slice(0, most).join("") + "... (" + (letters.length - most).toLocaleString("en") + " more characters)";
  }

  function sheet(parent, heads, name) {
    var table = make(parent, "table", null, name);
    var head = make(make(table, "thead"), "tr");
    heads.forEach(function (one) {
      var cell = make(head, "th", one.text, one.name);
      cell.scope = "col";
      if (one.title) cell.title = one.title;
    });
    return make(table, "tbody");
  }

  function browse(source) {
    var data = JSON.parse(source.textContent);
    source.textContent = "";
    var root = document.getElementById(source.dataset.for);
    var body = root.querySelector("tbody");
    var head = root.querySelector("thead tr");
    var input = root.querySelector("input");
    var select = root.querySelector("select");
    var turn = root.querySelector(".turn");
    var more = root.querySelector(".more");
    var status = root.querySelector("[role=status]");
    var visible = data.columns.filter(function (column) { return column.heading !== null; });
    var count = data.by[0].length;
    var state = { by: -2, descending: true, rows: [], made: 0 }; // -2: as they came, -1: by name
    var low = data.strings.map(function (text) { return text.toLowerCase(); });
    // Lower case can be longer (as of a dotted I), and then places would no longer fit.
    var lowTexts = data.texts.map(function (text) {
      var lower = text.toLowerCase();
      return lower.length === text.length ? lower : text;
    });

    function label(i) {
      return data.by.map(function (part) { return part[i]; }).join(".");
    }

    function say() {
      var all = state.rows.length === count;
      status.textContent = (all ? "" : state.rows.length.toLocaleString("en") + " of ") +
        count.toLocaleString("en") + " " + data.noun + "s";
      var rest = state.rows.length - state.made;
      more.hidden = rest <= 0;
      more.textContent = "Show " + Math.min(STEP, rest) + " more (" + state.made.toLocaleString("en") + " of " +
        state.rows.length.toLocaleString("en") + " shown)";
      turn.hidden = state.by === -2;
      turn.textContent = state.by === -1 ? (state.descending ? "last first" : "first first")
        : state.descending ? "largest first" : "smallest first";
      Array.from(head.cells).forEach(function (cell) {
        if (Number(cell.dataset.by) === state.by) cell.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
        else cell.removeAttribute("aria-sort");
      });
      select.value = String(state.by);
    }

    function addRows() {
      var until = Math.min(state.made + STEP, state.rows.length);
      for (; state.made < until; state.made++) addRow(state.rows[state.made]);
      say();
    }

    function addRow(i) {
      var row = make(body, "tr");
      var name = make(row, "th");
      name.scope = "row";
      var button = make(name, "button", label(i));
      button.type = "button";
      button.setAttribute("aria-expanded", "false");
      button.setAttribute("aria-label", data.noun + " " + label(i));
      visible.forEach(function (column) { make(row, "td", shown(column.values[i]), "n"); });
      var said = make(row, "td", null, "said");
      if (data.tokens.length) chips(said, data.tokens[0].values[i].slice(0, 4));
      function flip() {
        var open = button.getAttribute("aria-expanded") === "true";
        if (open) {
          row.nextSibling.remove();
          button.removeAttribute("aria-controls");
        } else {
          var inside = document.createElement("tr");
          inside.id = root.id + "-" + i;
          button.setAttribute("aria-controls", inside.id);
          var cell = make(inside, "td", null, "opened");
          cell.colSpan = row.cells.length;
          fill(make(cell, "div", null, "story"), i);
          row.after(inside);
        }
        button.setAttribute("aria-expanded", String(!open));
      }
      button.addEventListener("click", function (event) { event.stopPropagation(); flip(); });
      row.addEventListener("click", function () { if (!String(window.getSelection())) flip(); });
    }

    function chips(parent, numbers) {
      var list = make(parent, "span", null, "chips");
      numbers.forEach(function (n, i) {
        if (i) list.appendChild(document.createTextNode(" "));
        foreign(list, n === null ? "\u2013" : data.strings[n], "chip");
      });
    }

    function fill(parent, i) {
      data.tokens.forEach(function (one) {
        var line = make(parent, "p", null, "line");
        make(line, "b", one.heading + ": ");
        chips(line, one.values[i]);
      });
      var from = data.start[i], until = data.start[i + 1];
      data.groups.forEach(function (title, g) {
        var own = [];
        for (var e = from; e < until; e++) if (!data.group.length || data.group[e] === g) own.push(e);
        if (own.length) examples(parent, title, own);
      });
      if (from === until && data.silent) make(parent, "p", data.silent, "note");
      var rest = make(parent, "details");
      make(rest, "summary", "All numbers of " + data.noun + " " + label(i));
      var table = sheet(rest, [{ text: "column" }, { text: "value" }, { text: "unit" }], "pairs");
      data.columns.forEach(function (column) {
        var row = make(table, "tr");
        row.title = column.meaning;
        make(row, "th", column.name).scope = "row";
        make(row, "td", shown(column.values[i]), "n");
        make(row, "td", column.unit);
      });
    }

    function examples(parent, title, own) {
      make(parent, "h4", title + " (" + own.length + ")");
      var heads = data.measured.map(function (m) { return { text: m.heading, title: m.meaning, name: "n" }; });
      heads.push({ text: "text, the token marked" + (data.shade.length ? ", shaded by " + data.measured[0].heading : "") });
      heads = heads.concat(data.where.map(function (w) {
        return { text: w.heading, title: w.meaning, name: w.string ? "" : "n" };
      }));
      var table = sheet(parent, heads, "examples");
      var most = 0;
      own.forEach(function (e) {
        var shades = data.shade[e] || [];
        for (var n = 2; n < shades.length; n += 3) most = Math.max(most, shades[n]);
      });
      own.forEach(function (e) {
        var place = data.place[e];
        var row = make(table, "tr");
        data.measured.forEach(function (m) { titled(make(row, "td", shown(m.values[e]), "n"), m); });
        var text = data.texts[data.text[place]];
        var cut = data.from[place] > 0 || !data.whole[data.text[place]];
        var bdi = make(make(row, "td", null, "text"), "bdi");
        var shades = data.shade[e] || [];
        if (cut) bdi.appendChild(document.createTextNode("\u2026"));
        stretch(bdi, text, data.from[place], data.mark[place], shades, most);
        make(bdi, "mark", long(text.slice(data.mark[place], data.end[place]), 200)).title =
          "token: " + data.strings[data.token[place]];
        stretch(bdi, text, data.end[place], data.to[place], shades, most);
        data.where.forEach(function (w) {
          var value = w.values[place];
          var cell = make(row, "td", w.string ? null : shown(value), w.string ? "" : "n");
          if (w.string) foreign(cell, value === null ? "\u2013" : data.strings[value], value === null ? "" : "chip");
          titled(cell, w);
        });
      });
    }

    // The text from one place to another, shaded where something was measured.
    function stretch(parent, text, from, to, shades, most) {
      for (var n = 0; n < shades.length; n += 3) {
        var low = Math.max(from, shades[n]), high = Math.min(to, shades[n + 1]);
        if (low >= high) continue;
        parent.appendChild(document.createTextNode(text.slice(from, low)));
        var shade = make(parent, "span", text.slice(low, high), "shade");
        shade.style.setProperty("--level", Math.round(15 + 65 * shades[n + 2] / most) + "%");
        shade.title = String(shades[n + 2]);
        from = high;
      }
      parent.appendChild(document.createTextNode(text.slice(from, to)));
    }

    function titled(cell, column) {
      cell.dataset.heading = column.heading; // for narrow screens, where there is no head
    }

    function matches(wanted) {
      for (var i = 0; i < count; i++) if (label(i) === wanted) return function (j) { return label(j) === wanted; };
      var strings = new Set();
      low.forEach(function (text, n) { if (text.indexOf(wanted) >= 0) strings.add(n); });
      var hits = lowTexts.map(function (text) {
        var found = [], at = text.indexOf(wanted);
        for (; at >= 0; at = text.indexOf(wanted, at + 1)) found.push(at);
        return found;
      });
      var places = data.text.map(function (t, p) {
        return strings.has(data.token[p]) ||
          hits[t].some(function (at) { return at >= data.from[p] && at + wanted.length <= data.to[p]; }) ||
          data.where.some(function (w) { return w.string && strings.has(w.values[p]); });
      });
      return function (j) {
        for (var t = 0; t < data.tokens.length; t++) {
          if (data.tokens[t].values[j].some(function (n) { return strings.has(n); })) return true;
        }
        for (var e = data.start[j]; e < data.start[j + 1]; e++) if (places[data.place[e]]) return true;
        return false;
      };
    }

    function compare(a, b) {
      var parts = state.by === -1 ? data.by : [data.columns[state.by].values];
      for (var k = 0; k < parts.length; k++) {
        var x = parts[k][a], y = parts[k][b];
        if (x === null || y === null) {
          if (x !== y) return (x === null) - (y === null);
        } else if (x !== y) {
          var order = typeof x === "string" ? x.localeCompare(y) : x - y;
          return state.descending ? -order : order;
        }
      }
      return a - b;
    }

    function update() {
      var wanted = input.value.trim().toLowerCase();
      var keep = wanted ? matches(wanted) : function () { return true; };
      state.rows = [];
      for (var i = 0; i < count; i++) if (keep(i)) state.rows.push(i);
      if (state.by !== -2) state.rows.sort(compare);
      state.made = 0;
      body.textContent = "";
      root.querySelector(".scroll").scrollTop = 0;
      addRows();
    }

    function sortBy(by) {
      state.descending = state.by === by ? !state.descending : by !== -1;
      state.by = by;
      update();
    }

    function heading(text, by, unit, title) {
      var cell = make(head, "th");
      cell.scope = "col";
      cell.dataset.by = by;
      if (title) cell.title = title;
      var button = make(cell, "button", text);
      button.type = "button";
      button.addEventListener("click", function () { sortBy(by); });
      if (unit) make(cell, "span", unit, "unit");
    }

    function option(text, by) {
      make(select, "option", text).value = String(by);
    }

    heading(data.noun, -1);
    option("default order", -2);
    option(data.noun, -1);
    data.columns.forEach(function (column, by) {
      if (column.heading !== null) heading(column.heading, by, column.unit, column.meaning);
      option(column.name, by);
    });
    if (data.tokens.length) make(head, "th", data.tokens[0].heading).scope = "col";
    select.addEventListener("change", function () { state.by = NaN; sortBy(Number(select.value)); });
    turn.addEventListener("click", function () { sortBy(state.by); });
    more.addEventListener("click", function () {
      var first = state.made;
      addRows();
      // The button may be gone now: go on where the new rows begin.
      var next = body.querySelectorAll("th button")[first];
      if (next) next.focus({ preventScroll: true });
    });
    var waiting;
    input.addEventListener("input", function () { clearTimeout(waiting); waiting = setTimeout(update, 150); });
    update();
  }

  document.querySelectorAll("script.browse").forEach(browse);
})();
