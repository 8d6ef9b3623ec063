import { readFileSync } from "node:fs";
import { defineConfig, type Plugin } from "vite";

/** Ships the licences of what the bundle contains beside it. */
function licences(...packages: string[]): Plugin {
  return {
    name: "licences",
    generateBundle() {
      const source = packages
        .map((name) => `${name}\n\n${readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim()}\n`)
        .join(`\n${"-".repeat(72)}\n\n`);
      this.emitFile({ type: "asset", fileName: "assets/LICENSES.txt", source });
    },
  };
}

export default defineConfig({
  base: "./", // the service may stand behind a path
  plugins: [licences("uplot", "preact", "@fontsource-variable/inter")],
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    target: ["chrome123", "firefox120", "safari17.5"], // the first with light-dark()
    assetsInlineLimit: 0, // the content security policy allows no data: addresses
    modulePreload: false, // one script; nothing to preload
    sourcemap: false,
    reportCompressedSize: false,
  },
});
