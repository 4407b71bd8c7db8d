"use strict";
// Elements, and numbers in words. Text goes into an element as text, never as markup.
const elements = (() => {
  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children.filter((child) => child !== null));
    return element;
  };
  const cellOf = (tag, text, className = "") => make(tag, { className, scope: tag === "th" ? "col" : "" }, String(text));
  const digits = (us) => (us >= 1000 ? Math.round(us).toString() : us.toPrecision(4));
  const above = (ratio) => {
    const percent = (ratio - 1) * 100;
    return `${percent < -0.05 ? "−" : "+"}${Math.abs(percent).toFixed(Math.abs(percent) < 9.95 ? 1 : 0)}%`;
  };
  const same = (a, b) => a !== null && b !== null && a[0] === b[0] && a[1] === b[1];
  const mib = (bytes) => (bytes / 1048576).toFixed(2);
  const unique = (values) => [...new Set(values)];

  return { make, cellOf, digits, above, same, mib, unique };
})();
