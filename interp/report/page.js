(function () {
  "use strict";
  document.querySelectorAll("script.figure").forEach(function (source) {
    var spec = JSON.parse(source.textContent);
    Plotly.newPlot(source.dataset.for, spec.data, spec.layout, spec.config);
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
})();
