import { svelte } from "@sveltejs/vite-plugin-svelte";
import { copyFileSync } from "node:fs";
import { defineConfig, type Plugin } from "vite";

const OUT = "../src/unlazy/studio/static/studio";

/** Inside a page's script element `<!--` could hide what follows; in a string `<\\!--` means the same and does not. */
const pasteable: Plugin = {
  name: "pasteable",
  generateBundle(_options, bundle) {
    for (const file of Object.values(bundle))
      if (file.type === "chunk") file.code = file.code.replaceAll("<!--", "<\\!--");
  },
};

/** The list of runs is asked for before anything else is set up, where the address wants it. */
const EARLY = `var unlazyEarly=/^(#\\/?|#\\/runs.*)?$/.test(location.hash)&&!document.getElementById("unlazy-inline")?fetch("api/runs"):null;unlazyEarly&&unlazyEarly.catch(function(){});`;

/** One classic script and one style sheet with fixed names: served as files, or pasted into a one-file report. */
export default defineConfig({
  base: "./",
  publicDir: "public",
  plugins: [
    svelte(),
    { name: "colour-maps", closeBundle: () => copyFileSync("src/colormaps.json", `${OUT}/colormaps.json`) },
    pasteable,
  ],
  build: {
    outDir: OUT,
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    cssCodeSplit: false,
    reportCompressedSize: false,
    license: { fileName: "licenses.md" }, // of the packages that are bundled
    rolldownOptions: {
      input: "src/main.ts",
      output: {
        format: "iife",
        entryFileNames: "studio.js",
        assetFileNames: "studio[extname]",
        codeSplitting: false,
        banner: EARLY,
      },
    },
  },
});
