// Returns elements that overflow their card, section, dialog or page.
const wide = [];
for (const card of document.querySelectorAll(".card, main > section, dialog")) {
  const { left, right } = card.getBoundingClientRect();
  for (const inner of card.querySelectorAll("*:not(.hidden)")) {
    if (inner.closest(".table, .canvas, .u-wrap, .scroll")) continue;
    const box = inner.getBoundingClientRect();
    if (box.width && (box.right > right + 1 || box.left < left - 1))
      wide.push(`${inner.tagName}.${inner.className} in ${card.className}: ${inner.textContent.slice(0, 40)}`);
  }
}
for (const word of document.querySelectorAll(".crumbs a, .state, button")) {
  const range = document.createRange();
  range.selectNodeContents(word);
  if (range.getBoundingClientRect().height > 50) wide.push(`broken into letters: ${word.textContent}`);
}
for (const dialog of document.querySelectorAll("dialog")) {
  const { left, right, top, bottom } = dialog.getBoundingClientRect();
  if (left < 0 || right > innerWidth || top < 0 || bottom > innerHeight) wide.push("a dialog leaves the screen");
}
if (document.documentElement.scrollWidth > innerWidth) wide.push(`the page: ${document.documentElement.scrollWidth}`);
return wide;
