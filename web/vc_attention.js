// What VC-Attention did, on its nodes: a status line, a bar, and the run's report on a click.
//
// The pack works without this file: ComfyUI then shows the same text by itself, without the bar.
// Events come from nodes/status_events.py. Nothing is stored, nothing is sent.

import { app } from "/scripts/app.js";
import { api } from "/scripts/api.js";

const EVENT = "vc_attention.status";
const SETTING = "VCAttention.ShowStatus";
const PATCH_NODES = ["VCAttentionPatch", "VCAttentionPatchWanVideo", "VCAttentionPatchRaylight"];
const REPORT_NODES = [
  "VCAttentionReport",
  "VCAttentionReportRaylight",
  "VCAttentionCompare",
  "VCAttentionBenchmark",
];

// The name under which ComfyUI looks for its own progress text on a node. Answering to it means that the
// text lands here instead of in a second box below ours.
const WIDGET = "$$node-text-preview";
const TYPE = "vc_attention_status";
const HEIGHT = 92;

const STYLE = `
.vc-attention { box-sizing: border-box; width: 100%; height: 100%; max-height: ${HEIGHT}px; padding: 6px 8px; cursor: copy;
  border-radius: 6px; background: var(--comfy-input-bg, #222); color: var(--input-text, #ddd);
  font: 11px/1.35 Inter, Arial, sans-serif; overflow: hidden auto; user-select: none; pointer-events: auto; }
.vc-attention:focus-visible { outline: 1px solid #4b9fd5; }
.vc-attention-line { font-weight: 600; overflow-wrap: anywhere; }
.vc-attention-detail { color: var(--descrip-text, #999); overflow-wrap: anywhere; }
.vc-attention-bar { display: flex; height: 5px; margin: 5px 0; border-radius: 3px; overflow: hidden;
  background: var(--border-color, #444); }
.vc-attention-bar i { display: block; }
.vc-attention-taken { background: #3fa66b; }
.vc-attention-left { background: #d9922e; }
.vc-attention[data-level="warning"] { box-shadow: inset 3px 0 0 #d9922e; }
.vc-attention[data-level="running"] .vc-attention-line { color: #6fb7e6; }
.vc-attention-dialog { width: min(46rem, 90vw); padding: 12px; border: 1px solid #555; border-radius: 8px;
  background: var(--comfy-menu-bg, #222); color: var(--input-text, #ddd); }
.vc-attention-dialog textarea { box-sizing: border-box; width: 100%; height: 20rem; }
`;

const count = (number) => Number(number ?? 0).toLocaleString("en-US");
const counts = (table) =>
  Object.entries(table ?? {})
    .map(([what, calls]) => `${count(calls)} ${what}`)
    .join(", ");

const added = (tables) => {
  const sum = {};
  for (const table of tables)
    for (const [what, calls] of Object.entries(table ?? {})) sum[what] = (sum[what] ?? 0) + calls;
  return sum;
};

/** Finished runs of one prompt as one: two experts, or two samplers, share a node. */
export function together(runs) {
  if (runs.length === 1) return runs[0];
  const total = (field) => runs.reduce((sum, run) => sum + (run[field] ?? 0), 0);
  const [first, ...more] = runs.map((run) => run.report ?? "");
  return {
    ...runs.at(-1),
    steps: runs.map((run) => run.steps).join(" + "),
    taken: total("taken"),
    video_calls: total("video_calls"),
    kernels: added(runs.map((run) => run.kernels)),
    left: added(runs.map((run) => run.left)),
    warning: runs.find((run) => run.warning)?.warning ?? null,
    // the first line of each names the machine: once is enough
    report: [first, ...more.map((text) => text.split("\n").slice(1).join("\n"))].join("\n"),
  };
}

/** Video self-attention calls and how many of them ran on a kernel of ours; text attention does not count. */
export function share(status) {
  const video = status.video_calls ?? 0;
  return { taken: video ? status.taken / video : 0, left: video ? 1 - status.taken / video : 0 };
}

/** "warning" for what a user should look at, "running" between the first step and the end, else "ok". */
export function level(status) {
  if (status.phase === "note" || status.warning) return "warning";
  return status.phase === "step" ? "running" : "ok";
}

/** The first line: the step, or the result, or the warning. */
export function headline(status) {
  if (status.phase === "note") return status.text;
  if (status.warning) return status.warning;
  if (status.phase === "ready") return `Ready: ${status.kernel}`;
  if (status.phase === "report") return "Click to copy this report";
  const percent = Math.floor(100 * share(status).taken);
  if (status.phase === "step") {
    const values = status.grouped ? "grouped" : "plain";
    return `Step ${status.step} of ${status.steps} at ${status.precision}, values ${values}`;
  }
  return `${percent}% of the video attention at ${status.precision}, ${status.steps} steps`;
}

/** The second line: how many calls ran on which kernel, and what was left alone. */
export function detail(status) {
  if (status.phase === "note") return "";
  if (status.phase === "report") {
    if (status.warning) return "Click to copy this report";
    const lines = status.report.split("\n").slice(1, 3);
    return lines.map((text) => text.trim().replace(/\s+/g, " ")).join(" · ");
  }
  if (status.phase === "ready") return `${status.precision}, ${status.numerics}; waiting for the sampler`;
  const kernels = counts(status.kernels);
  const left = counts(status.left);
  const ran = `${kernels || count(status.taken)} of ${count(status.video_calls)} calls`;
  return left ? `${ran}; left alone: ${left}` : ran;
}

/** What a click copies: the server's report, or, before it exists, the lines on the node. */
export function copyText(status) {
  return status.report ?? `VC-Attention\n${headline(status)}\n${detail(status)}`;
}

/** The node that an execution id names; "7:3" is node 3 inside the subgraph node 7. */
export function findNode(id) {
  let graph = app.rootGraph ?? app.graph;
  let node = null;
  for (const part of String(id).split(":")) {
    node = graph?.getNodeById(part) ?? graph?.getNodeById(Number(part)) ?? null;
    graph = node?.subgraph;
  }
  return node;
}

function element(tag, className, parent) {
  const made = document.createElement(tag);
  made.className = className;
  parent?.append(made);
  return made;
}

/** Where the browser gives no clipboard (plain http), the text is shown ready to be copied by hand. */
function showText(text) {
  const dialog = element("dialog", "vc-attention-dialog", document.body);
  const area = element("textarea", "", dialog);
  area.readOnly = true;
  area.value = text;
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.showModal();
  area.select();
}

async function copy(view) {
  const text = view.status ? copyText(view.status) : view.plain;
  if (!text) return;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    showText(text);
    return;
  }
  view.line.textContent = "Report copied";
  setTimeout(() => paint(view), 1200);
}

function makeView() {
  const root = element("div", "vc-attention");
  const view = {
    root,
    line: element("div", "vc-attention-line", root),
    bar: element("div", "vc-attention-bar", root),
    detail: element("div", "vc-attention-detail", root),
    status: null, // what is shown: the last event, or the finished runs together
    runs: [], // finished runs of the prompt
    prompt: -1, // which prompt they belong to
    plain: "", // ComfyUI's progress text, shown until an event comes
  };
  view.taken = element("i", "vc-attention-taken", view.bar);
  view.left = element("i", "vc-attention-left", view.bar);
  root.tabIndex = 0;
  root.setAttribute("role", "button");
  root.addEventListener("click", () => copy(view));
  root.addEventListener("keydown", (event) => event.key === "Enter" && copy(view));
  return view;
}

function paint(view) {
  const { status } = view;
  view.root.dataset.level = status ? level(status) : "ok";
  view.line.textContent = status ? headline(status) : view.plain;
  view.detail.textContent = status ? detail(status) : "";
  view.root.title = `${view.line.textContent}\n${view.detail.textContent}\nClick to copy the report`;
  const counted = status?.phase === "step" || status?.phase === "ended";
  view.bar.style.display = counted ? "flex" : "none";
  if (!counted) return;
  const { taken, left } = share(status);
  view.taken.style.width = `${100 * taken}%`;
  view.left.style.width = `${100 * left}%`;
  view.bar.title = `${count(status.taken)} of ${count(status.video_calls)} video attention calls`;
}

/** The node's status box, made on its first event. */
function viewOf(node) {
  const present = node.widgets?.find((widget) => widget.name === WIDGET);
  if (present?.vcAttentionView) return present.vcAttentionView;
  if (present) node.removeWidget?.(present); // ComfyUI's own box came first
  const view = makeView();
  const widget = node.addDOMWidget(WIDGET, TYPE, view.root, {
    serialize: false, // not part of a prompt
    hideOnZoom: false,
    getValue: () => view.plain,
    setValue: (text) => {
      view.plain = String(text ?? "");
      if (!view.status) paint(view);
    },
    getMinHeight: () => HEIGHT,
    getMaxHeight: () => HEIGHT,
  });
  widget.serialize = false; // nor of a saved workflow
  widget.vcAttentionView = view;
  return view;
}

function enabled() {
  return app.extensionManager?.setting?.get(SETTING) ?? true;
}

let prompts = 0; // started since the page was loaded

function show(status, types) {
  const node = findNode(status.node);
  if (!enabled() || !node || !types.includes(node.type)) return;
  const view = viewOf(node);
  if (view.prompt !== prompts) [view.prompt, view.runs] = [prompts, []];
  if (status.phase === "ended") view.runs.push(status);
  view.status = status.phase === "ended" ? together(view.runs) : status;
  paint(view);
  node.setDirtyCanvas?.(true, true);
}

function onStatus({ detail: status }) {
  show(status, PATCH_NODES);
}

/** A node has finished; reports come with what it shows. */
function onExecuted({ detail: result }) {
  const report = result.output?.vc_attention_report?.[0];
  const warning = result.output?.vc_attention_warning?.[0];
  const node = result.display_node ?? result.node;
  if (report) show({ node, phase: "report", report, warning }, REPORT_NODES);
}

/** Every node of a graph, also inside its subgraphs. */
function* everyNode(graph) {
  for (const node of graph?.nodes ?? []) {
    yield node;
    yield* everyNode(node.subgraph);
  }
}

function removeAll() {
  for (const node of everyNode(app.rootGraph ?? app.graph)) {
    const widget = node.widgets?.find((candidate) => candidate.vcAttentionView);
    if (widget) node.removeWidget?.(widget);
  }
}

app.registerExtension({
  name: "VCAttention.Status",
  settings: [
    {
      id: SETTING,
      category: ["VC-Attention", "Nodes", "ShowStatus"],
      name: "Show what ran on VC-Attention nodes",
      tooltip: "A status line, a bar and a report to copy. Off: ComfyUI's plain progress text.",
      type: "boolean",
      defaultValue: true,
      onChange: (on) => on === false && removeAll(),
    },
  ],
  setup() {
    const style = element("style", "", document.head);
    style.textContent = STYLE;
    api.addEventListener(EVENT, onStatus);
    api.addEventListener("executed", onExecuted);
    api.addEventListener("execution_start", () => (prompts += 1));
  },
});
