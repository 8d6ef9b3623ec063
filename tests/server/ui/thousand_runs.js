// Answers the page's questions for the list with 1000 runs, and counts them.
const fetched = window.fetch, runs = 1000;
window.asked = 0;
window.fetch = async (...given) => {
  const asked = new URL(String(given[0]));
  if (!asked.pathname.endsWith("/v1/runs")) return fetched(...given);
  window.asked += 1;
  const from = Number(asked.searchParams.get("cursor") ?? 0);
  const [one] = (await (await fetched(new URL("v1/runs?limit=1", document.baseURI))).json()).runs;
  const length = Math.min(Number(asked.searchParams.get("limit")), runs - from);
  const name = (place) => `fleet/${String(place).padStart(5, "0")}`;
  const page = Array.from({ length }, (_, i) => ({ ...one, display_name: null, run: name(from + i) }));
  const next_cursor = from + length < runs ? String(from + length) : null;
  return new Response(JSON.stringify({ runs: page, next_cursor }), { status: 200 });
};
