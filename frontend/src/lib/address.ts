// The state of the page lives in the address: "#/run/KEY?step=48&mark=17". Pure functions both ways.

export interface Place {
  page: "runs" | "run" | "compare" | "overlay" | "neuron" | "halfspace" | "claims" | "play";
  key: string; // of the run (runs, claims, play: "")
  other: string; // the second run of a comparison
  layer: number;
  unit: number;
  query: Record<string, string>;
}

export const nowhere = (): Place => ({ page: "runs", key: "", other: "", layer: 0, unit: 0, query: {} });

const decode = (text: string): string => {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a stray per cent sign is no reason to fail
  }
};
const whole = (text: string | undefined): number => Math.max(0, Math.trunc(Number(text)) || 0);

/** A key may come with its slashes encoded (what we write) or plain (what people type). */
export function parse(hash: string): Place {
  const [path, search] = hash.replace(/^#/, "").split(/\?(.*)/s);
  const query = Object.fromEntries(new URLSearchParams(search ?? ""));
  const parts = path.split("/").filter(Boolean);
  const place: Place = { ...nowhere(), query };
  const [head, ...rest] = parts;
  if (head === "claims" || head === "play" || head === "overlay") return { ...place, page: head };
  if (head === "compare" && rest.length >= 2) {
    const half = rest.length / 2; // plain slashes: both keys equally deep
    const keys = rest.length === 2 ? rest : [rest.slice(0, half).join("/"), rest.slice(half).join("/")];
    return { ...place, page: "compare", key: decode(keys[0]), other: decode(keys[1]) };
  }
  if (head !== "run" || !rest.length) return place;
  if (rest.length >= 4 && rest.at(-3) === "halfspace") {
    const unit = { layer: whole(rest.at(-2)), unit: whole(rest.at(-1)) };
    return { ...place, page: "halfspace", key: decode(rest.slice(0, -3).join("/")), ...unit };
  }
  if (rest.length >= 3 && rest.at(-2) === "neuron")
    return { ...place, page: "neuron", key: decode(rest.slice(0, -2).join("/")), unit: whole(rest.at(-1)) };
  return { ...place, page: "run", key: decode(rest.join("/")) };
}

export function format(place: Place): string {
  const key = encodeURIComponent(place.key);
  const path = {
    runs: "/runs",
    claims: "/claims",
    play: "/play",
    overlay: "/overlay",
    run: `/run/${key}`,
    compare: `/compare/${key}/${encodeURIComponent(place.other)}`,
    neuron: `/run/${key}/neuron/${place.unit}`,
    halfspace: `/run/${key}/halfspace/${place.layer}/${place.unit}`,
  }[place.page];
  const kept = Object.entries(place.query).filter(([, value]) => value !== "");
  const search = kept.map(([name, value]) => `${name}=${encodeURIComponent(value).replace(/%2C/g, ",")}`).join("&");
  return `#${path}${search ? `?${search}` : ""}`;
}

/** The same place with some of its query changed; an empty or null value drops the name. */
export function withQuery(place: Place, change: Record<string, string | number | null | undefined>): Place {
  const query = { ...place.query };
  for (const [name, value] of Object.entries(change)) {
    if (value === null || value === undefined || value === "") delete query[name];
    else query[name] = String(value);
  }
  return { ...place, query };
}
