// Answers requests for the run list with 1000 runs, and counts the requests.
const originalFetch = window.fetch, runs = 1000;
window.requests = 0;
window.fetch = async (...args) => {
  const url = new URL(String(args[0]));
  if (!url.pathname.endsWith("/v1/runs")) return originalFetch(...args);
  window.requests += 1;
  const from = Number(url.searchParams.get("cursor") ?? 0);
  const [one] = (await (await originalFetch(new URL("v1/runs?limit=1", document.baseURI))).json()).runs;
  const length = Math.min(Number(url.searchParams.get("limit")), runs - from);
  const name = (place) => `fleet/${String(place).padStart(5, "0")}`;
  const page = Array.from({ length }, (_, i) => ({ ...one, display_name: null, run: name(from + i) }));
  const next_cursor = from + length < runs ? String(from + length) : null;
  return new Response(JSON.stringify({ runs: page, next_cursor }), { status: 200 });
};
