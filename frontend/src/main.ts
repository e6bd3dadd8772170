import { mount } from "svelte";
import App from "./App.svelte";
import { colours } from "./panels/heatmap.ts";
import "./studio.css";

interface Bench {
  drawTimes: number[]; // milliseconds of each heat map drawn, the last thousand
  ready: boolean; // the first panels of a run are drawn
  colours: Record<string, readonly (readonly number[])[]>;
}

declare global {
  interface Window {
    __unlazy: Bench;
  }
}

const [unsigned, signed, difference] = [colours("unsigned"), colours("signed"), colours("difference")];
window.__unlazy = {
  drawTimes: [],
  ready: false,
  colours: { unsigned, signed, difference, sequential: unsigned, diverging: signed },
};

mount(App, { target: document.getElementById("studio")! });
