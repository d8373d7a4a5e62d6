// What Sphinx leaves undone for readers without a mouse or a screen.
addEventListener("DOMContentLoaded", () => {
  // docutils calls this a list, but its children are labels and notes (ARIA 1.2, "list": required owned elements).
  for (const list of document.querySelectorAll(".citation-list")) list.removeAttribute("role");
});
addEventListener("load", () => {
  // What scrolls sideways can be reached, and so scrolled, by keyboard (WCAG 2.1, 2.1.1).
  for (const box of document.querySelectorAll("article :is(table, pre, .math, .output, .pst-scrollable-table-container)")) {
    if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) box.tabIndex = 0;
  }
});
