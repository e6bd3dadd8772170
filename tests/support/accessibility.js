// The rules of accessibility that matter to the page, checked in the document itself; returns sentences, one a violation.
() => {
  const found = [];
  const say = (rule, element, more = "") => {
    const text = (element.getAttribute?.("data-testid") || element.textContent || "").trim().replace(/\s+/g, " ").slice(0, 40);
    const kind = element.tagName.toLowerCase() + (element.className?.baseVal ?? element.className ?? "").toString().replace(/svelte-\w+/g, "").trim().split(/\s+/).filter(Boolean).map((c) => `.${c}`).join("");
    found.push(`${rule}: <${kind}> "${text}"${more && ` ${more}`}`);
  };
  const all = [...document.querySelectorAll("body *")];
  const visible = (e) => e.checkVisibility({ checkOpacity: false, checkVisibilityCSS: true }) && e.getClientRects().length > 0;
  const hidden = (e) => !!e.closest("[aria-hidden=true]");
  const shown = all.filter(visible);

  // names
  const byId = (ids) => ids.split(/\s+/).map((id) => document.getElementById(id)?.textContent ?? "").join(" ").trim();
  const textOf = (e) => {
    let text = "";
    for (const node of e.childNodes) {
      if (node.nodeType === 3) text += node.textContent;
      else if (node.nodeType === 1 && node.getAttribute("aria-hidden") !== "true")
        text += ` ${node.getAttribute("aria-label") ?? node.getAttribute("alt") ?? textOf(node)}`;
    }
    return text.trim();
  };
  const nameOf = (e) => {
    if (e.getAttribute("aria-labelledby")) return byId(e.getAttribute("aria-labelledby"));
    if (e.getAttribute("aria-label")?.trim()) return e.getAttribute("aria-label");
    if (["INPUT", "SELECT", "TEXTAREA"].includes(e.tagName)) {
      const own = [...(e.labels ?? [])].map(textOf).join(" ").trim();
      return own || (e.getAttribute("title") ?? "").trim();
    }
    if (e.tagName === "IMG") return e.getAttribute("alt") ?? "";
    return textOf(e) || (e.getAttribute("title") ?? "").trim() || (e.querySelector?.("title")?.textContent ?? "");
  };
  const INTERACTIVE = "a[href], button, input, select, textarea, summary, [tabindex]:not([tabindex='-1']), [role=button], [role=slider], [role=link]";
  for (const e of shown.filter((e) => e.matches(INTERACTIVE) && !hidden(e))) if (!nameOf(e)) say("no name", e);
  for (const e of shown.filter((e) => e.matches("img:not([alt])") && !hidden(e))) say("picture without alt", e);
  for (const e of shown.filter((e) => e.matches("[role=img], canvas, [role=dialog], dialog, [role=group], [role=region], [role=table]") && !hidden(e)))
    if (!e.closest("button, a, summary") && !nameOf(e)) say("no name", e);
  for (const e of all.filter((e) => e.matches("[aria-hidden=true] :is(a[href], button, input, select, textarea, [tabindex='0'])") && visible(e)))
    say("focus inside aria-hidden", e);
  for (const e of shown.filter((e) => e.matches("a[href], button, summary") && e.querySelector("a[href], button, input, select, textarea, [tabindex='0']")))
    say("control inside a control", e);
  for (const e of all.filter((e) => Number(e.getAttribute("tabindex")) > 0)) say("tabindex above 0", e);

  // aria
  const ROLES = new Set("alert button cell checkbox columnheader dialog figure group img link list listitem main menu menuitem meter navigation none note option presentation progressbar radio radiogroup region row rowgroup rowheader search searchbox separator slider status switch tab table tablist tabpanel timer toolbar tooltip tree treeitem graphics-document application".split(" "));
  const ATTRIBUTES = new Set("activedescendant atomic busy checked colcount colindex colspan controls current describedby description details disabled errormessage expanded haspopup hidden invalid keyshortcuts label labelledby level live modal multiselectable orientation owns placeholder posinset pressed readonly relevant required roledescription rowcount rowindex rowspan selected setsize sort valuemax valuemin valuenow valuetext".split(" "));
  const NAMELESS = new Set(["DIV", "SPAN", "P", "STRONG", "EM", "B", "I", "SMALL", "CODE", "DT", "DD"]);
  for (const e of all) {
    const role = e.getAttribute("role");
    if (role && !ROLES.has(role)) say("unknown role", e, role);
    for (const { name, value } of e.attributes) {
      if (!name.startsWith("aria-")) continue;
      if (!ATTRIBUTES.has(name.slice(5))) say("unknown attribute", e, name);
      if (["aria-labelledby", "aria-controls", "aria-describedby", "aria-owns"].includes(name))
        for (const id of value.split(/\s+/)) if (id && !document.getElementById(id)) say("refers to nothing", e, `${name}=${id}`);
      if (/^aria-(pressed|expanded|busy|hidden|checked|selected)$/.test(name) && !/^(true|false|mixed)$/.test(value)) say("bad value", e, `${name}=${value}`);
    }
    if ((e.hasAttribute("aria-label") || e.hasAttribute("aria-labelledby")) && NAMELESS.has(e.tagName) && !role) say("a name on an element without role", e);
    if (role === "slider" && ["valuenow", "valuemin", "valuemax"].some((part) => !e.hasAttribute(`aria-${part}`))) say("slider without values", e);
    if (role === "row" && !e.parentElement.closest("[role=table], [role=grid], [role=rowgroup]")) say("row outside a table", e);
    if (["cell", "columnheader", "rowheader"].includes(role) && !e.parentElement.closest("[role=row]")) say("cell outside a row", e);
    if (role === "row" && [...e.children].some((c) => !["cell", "columnheader", "rowheader"].includes(c.getAttribute("role")) && visible(c))) say("row with more than cells", e);
    if (e.tagName === "TH" && visible(e) && !nameOf(e)) say("empty heading of a table", e);
  }
  const ids = all.map((e) => e.id).filter(Boolean);
  for (const id of new Set(ids.filter((id, i) => ids.indexOf(id) !== i))) found.push(`id twice: ${id}`);
  for (const e of all.filter((e) => e.matches("ul > :not(li), ol > :not(li), dl > :not(dt, dd, div)"))) say("foreign child of a list", e);

  // structure
  if (!document.documentElement.lang) found.push("no language");
  if (!document.title.trim()) found.push("no title");
  if (/user-scalable=no|maximum-scale=1/.test(document.querySelector("meta[name=viewport]")?.content ?? "")) found.push("zoom is blocked");
  const mains = all.filter((e) => e.matches("main, [role=main]") && visible(e));
  if (mains.length !== 1) found.push(`${mains.length} main landmarks`);
  for (const e of all.filter((e) => e.matches("nav") && visible(e))) {
    if (!nameOf(e) || !e.hasAttribute("aria-label")) say("navigation without name", e);
    if (!e.children.length) say("empty navigation", e);
  }
  const inside = "main, header, nav, footer, aside, dialog, [role=dialog], .skip, noscript, script";
  for (const e of shown.filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) && !e.closest(inside))) say("outside of all landmarks", e);
  const heads = shown.filter((e) => e.matches("h1, h2, h3, h4, h5, h6") && !e.closest("dialog:not([open])"));
  if (heads.filter((e) => e.tagName === "H1").length < 1) found.push("no h1");
  let level = 0;
  for (const e of heads) {
    const own = Number(e.tagName[1]);
    if (!nameOf(e)) say("empty heading", e);
    if (own > level + 1) say("heading skips a level", e, `h${level} to h${own}`);
    level = own;
  }
  for (const e of shown) {
    const style = getComputedStyle(e);
    const scrolls = (/auto|scroll/.test(style.overflowY) && e.scrollHeight > e.clientHeight + 1) || (/auto|scroll/.test(style.overflowX) && e.scrollWidth > e.clientWidth + 1);
    if (scrolls && e !== document.documentElement && e !== document.body && !e.matches(INTERACTIVE) && !e.querySelector(INTERACTIVE)) say("scrolls, but not by keys", e);
  }

  // contrast
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const parse = (text) => {
    if (!known.has(text)) {
      pen.clearRect(0, 0, 1, 1);
      pen.fillStyle = "#000";
      pen.fillStyle = text;
      pen.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
      known.set(text, [r, g, b, a / 255]);
    }
    return known.get(text);
  };
  const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
  const backgroundOf = (e) => {
    const layers = [];
    for (let at = e; at; at = at.parentElement) {
      const style = getComputedStyle(at);
      if (style.backgroundImage !== "none" && at !== document.body && at !== document.documentElement) return null;
      const colour = parse(style.backgroundColor);
      if (colour[3]) layers.push(colour);
      if (colour[3] > 0.99) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), parse(getComputedStyle(document.documentElement).backgroundColor)[3] ? parse(getComputedStyle(document.documentElement).backgroundColor) : [255, 255, 255]);
  };
  const light = (c) => {
    const [r, g, b] = c.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const complained = new Set();
  for (const e of shown) {
    const words = [...e.childNodes].filter((n) => n.nodeType === 3).map((n) => n.textContent.trim()).join("");
    if (!words || hidden(e) || e.matches("option, :disabled, script, style, .unseen, .skip") || e.closest(":disabled")) continue;
    const style = getComputedStyle(e);
    const below = backgroundOf(e);
    if (!below) continue;
    let opacity = 1;
    let moving = false; // what appears or goes away is looked at when it has come to rest
    for (let at = e; at; at = at.parentElement) {
      opacity *= Number(getComputedStyle(at).opacity);
      moving ||= at.getAnimations().some((one) => one.playState === "running");
    }
    if (moving) continue;
    const own = parse(e instanceof SVGElement ? style.fill : style.color);
    const shade = over([own[0], own[1], own[2], own[3] * opacity * (e instanceof SVGElement ? Number(style.fillOpacity) : 1)], below);
    const [high, low] = [light(shade), light(below)].sort((p, q) => q - p);
    const ratio = (high + 0.05) / (low + 0.05);
    const size = parseFloat(style.fontSize);
    const needed = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    const key = `${e.tagName} ${e.className?.baseVal ?? e.className} ${ratio.toFixed(2)}`;
    if (ratio < needed - 0.005 && !complained.has(key)) {
      complained.add(key);
      say("contrast", e, `${ratio.toFixed(2)} of ${needed}`);
    }
  }
  for (const e of shown.filter((e) => e.matches("input[placeholder]"))) {
    const style = getComputedStyle(e, "::placeholder");
    const below = backgroundOf(e);
    const own = parse(style.color);
    const [high, low] = [light(over([own[0], own[1], own[2], own[3] * Number(style.opacity)], below)), light(below)].sort((p, q) => q - p);
    if ((high + 0.05) / (low + 0.05) < 4.5) say("contrast", e, `placeholder ${((high + 0.05) / (low + 0.05)).toFixed(2)}`);
  }
  return found;
}
