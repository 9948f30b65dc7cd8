// Stands in for ComfyUI's page under Node: /scripts/app.js, /scripts/api.js and a few DOM elements.
// Used as `node --import ./tests/web/comfyui_stub.mjs --test ...`.

import { register } from "node:module";

const HOOKS = `
export async function resolve(specifier, context, next) {
  if (specifier.startsWith("/scripts/")) return { url: "stub:" + specifier, shortCircuit: true };
  return next(specifier, context);
}
export async function load(url, context, next) {
  if (url === "stub:/scripts/app.js")
    return { format: "module", source: "export const app = globalThis.comfyApp;", shortCircuit: true };
  if (url === "stub:/scripts/api.js")
    return { format: "module", source: "export const api = globalThis.comfyApi;", shortCircuit: true };
  return next(url, context);
}`;
register(`data:text/javascript,${encodeURIComponent(HOOKS)}`);

class Element extends EventTarget {
  constructor(tag) {
    super();
    Object.assign(this, { tag, className: "", children: [], style: {}, dataset: {}, textContent: "" });
  }
  append(child) {
    this.children.push(child);
  }
  setAttribute(name, value) {
    this[name] = value;
  }
  click() {
    this.dispatchEvent(new Event("click"));
  }
  find(className) {
    return this.children.find((child) => child.className === className);
  }
}

/** A node of the graph, as much of it as an extension touches. */
export class GraphNode {
  constructor(type) {
    Object.assign(this, { type, widgets: [] });
  }
  addDOMWidget(name, type, element, options) {
    const widget = { name, type, element, options };
    this.widgets.push(widget);
    return widget;
  }
  removeWidget(widget) {
    this.widgets.splice(this.widgets.indexOf(widget), 1);
  }
}

export class Graph {
  constructor(nodes) {
    this.byId = new Map(Object.entries(nodes));
    this.nodes = [...this.byId.values()];
  }
  getNodeById(id) {
    return this.byId.get(String(id)) ?? null;
  }
}

export const extensions = [];
globalThis.comfyApi = new EventTarget();
globalThis.comfyApp = {
  settings: {},
  registerExtension: (extension) => extensions.push(extension),
  extensionManager: { setting: { get: (id) => globalThis.comfyApp.settings[id] } },
};
globalThis.document = {
  head: new Element("head"),
  body: new Element("body"),
  createElement: (tag) => new Element(tag),
};

export const clipboard = { text: null };
Object.defineProperty(globalThis, "navigator", {
  configurable: true,
  value: { clipboard: { writeText: async (text) => void (clipboard.text = text) } },
});

/** What the server's send_sync arrives as. */
export function send(name, detail) {
  const event = new Event(name);
  event.detail = detail;
  globalThis.comfyApi.dispatchEvent(event);
}

export const sendStatus = (status) => send("vc_attention.status", status);
