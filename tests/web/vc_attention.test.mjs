import assert from "node:assert/strict";
import test, { beforeEach } from "node:test";

import { clipboard, extensions, Graph, GraphNode, send, sendStatus } from "./comfyui_stub.mjs";

const module = await import("../../web/vc_attention.js");
const [extension] = extensions;
extension.setup();

const STEP = {
  node: "7", phase: "step", step: 3, steps: 20, grouped: true, precision: "8-bit", received: 480, taken: 190,
  video_calls: 200, kernels: { "triton_int8_fp8 int8_fp8": 190 }, left: { "kept exact by exact_blocks": 10 },
  warning: null,
};
const ENDED = { ...STEP, phase: "ended", received: 3200, taken: 1600, video_calls: 1600, left: {}, report: "REPORT" };

let patch;
beforeEach(() => {
  patch = new GraphNode("VCAttentionPatch");
  globalThis.comfyApp.graph = new Graph({ 7: patch, 8: new GraphNode("KSampler") });
  globalThis.comfyApp.rootGraph = undefined;
  globalThis.comfyApp.settings = {};
  clipboard.text = null;
});

const box = (node = patch) => node.widgets[0]?.element;
const line = () => box().find("vc-attention-line").textContent;

test("a step shows its number, grouped or plain, kernel and what was left", () => {
  sendStatus(STEP);
  assert.equal(line(), "Step 3 of 20 at 8-bit, values grouped");
  assert.equal(
    box().find("vc-attention-detail").textContent,
    "190 triton_int8_fp8 int8_fp8 of 200 calls; left alone: 10 kept exact by exact_blocks",
  );
  assert.equal(box().dataset.level, "running");
});

test("the bar is the share of the video attention, which cross-attention is no part of", () => {
  sendStatus(STEP);
  const bar = box().find("vc-attention-bar");
  assert.equal(bar.find("vc-attention-taken").style.width, "95%");
  assert.equal(Math.round(parseFloat(bar.find("vc-attention-left").style.width)), 5);
});

test("events of one run share one box", () => {
  sendStatus(STEP);
  sendStatus(ENDED);
  assert.equal(patch.widgets.length, 1);
  assert.equal(line(), "100% of the video attention at 8-bit, 20 steps");
});

test("two experts of one prompt are shown and copied together, the next prompt starts anew", async () => {
  const low = { ...ENDED, steps: 10, taken: 700, video_calls: 800, left: { "kernel x failed": 100 },
    report: "machine\nlow expert", warning: "x failed" };
  send("execution_start", {});
  sendStatus({ ...ENDED, steps: 10, report: "machine\nhigh expert" });
  sendStatus(low);
  assert.equal(line(), "x failed");
  box().click();
  await new Promise(setImmediate);
  assert.equal(clipboard.text, "machine\nhigh expert\nlow expert");
  assert.match(module.detail(module.together([ENDED, low])), /^380 triton.* of 2,400 calls; left alone: 100 kernel x/);
  assert.match(module.headline({ ...module.together([ENDED, low]), warning: null }), /^95% .* 20 \+ 10 steps$/);
  send("execution_start", {});
  sendStatus(ENDED);
  assert.equal(line(), "100% of the video attention at 8-bit, 20 steps");
});

test("99.9% is not shown as 100%", () => {
  assert.match(module.headline({ ...ENDED, taken: 1599 }), /^99%/);
});

test("no calls, a failed kernel and a note are warnings", () => {
  for (const status of [
    { ...ENDED, received: 0, taken: 0, video_calls: 0, kernels: {}, warning: "No attention call reached this node" },
    { ...STEP, warning: "triton_int8_fp8 failed: out of shared memory" },
    { node: "7", phase: "note", text: "not active, output is unchanged: needs sm_80" },
  ]) {
    sendStatus(status);
    assert.equal(box().dataset.level, "warning");
    assert.equal(line(), status.warning ?? status.text);
  }
});

test("without any video call the bar stays empty and nothing divides by zero", () => {
  assert.deepEqual(module.share({ taken: 0, video_calls: 0 }), { taken: 0, left: 0 });
});

test("a click copies the report", async () => {
  sendStatus(ENDED);
  box().click();
  await new Promise(setImmediate);
  assert.equal(clipboard.text, "REPORT");
});

test("before the end a click copies what the node shows", () => {
  assert.match(module.copyText(STEP), /Step 3 of 20[\s\S]*190 triton_int8_fp8/);
});

test("a node inside subgraphs is found by its execution id", () => {
  const inner = new GraphNode("VCAttentionPatch");
  const outer = new GraphNode("subgraph");
  outer.subgraph = new Graph({ 3: inner });
  globalThis.comfyApp.graph = new Graph({ 12: outer });
  assert.equal(module.findNode("12:3"), inner);
  assert.equal(module.findNode("12:4"), null);
  assert.equal(module.findNode("9:3"), null);
});

test("other nodes and unknown ids are left alone", () => {
  sendStatus({ ...STEP, node: "8" });
  sendStatus({ ...STEP, node: "99" });
  assert.equal(globalThis.comfyApp.graph.getNodeById(8).widgets.length, 0);
});

test("a report node shows what it found and copies all of it", async () => {
  const node = new GraphNode("VCAttentionReport");
  globalThis.comfyApp.graph = new Graph({ 9: node });
  const report = "VC-Attention 0.1.0: card\nWan, 20 steps\n  800 calls\n  more";
  send("executed", { node: "9", display_node: "9", output: { images: [], vc_attention_report: [report] } });
  assert.equal(box(node).find("vc-attention-detail").textContent, "Wan, 20 steps · 800 calls");
  box(node).click();
  await new Promise(setImmediate);
  assert.equal(clipboard.text, report);
  send("executed", { node: "7", output: null });
});

test("a report node without a run says why, as a warning", () => {
  const report = "VC-Attention was not active: precision is off";
  const status = { phase: "report", report, warning: report };
  assert.equal(module.level(status), "warning");
  assert.equal(module.headline(status), status.report);
  assert.equal(module.detail(status), "Click to copy this report");
});

test("ComfyUI's own text box is replaced, and its text shown in ours until an event comes", () => {
  patch.widgets.push({ name: "$$node-text-preview", type: "progressText" });
  sendStatus({ node: "7", phase: "ready", kernel: "triton_int8_fp8", numerics: "int8_fp8", precision: "8-bit" });
  assert.equal(patch.widgets.length, 1);
  patch.widgets[0].options.setValue("step 1 of 20: ...");
  assert.equal(line(), "Ready: triton_int8_fp8");
});

test("the box is neither saved nor queued", () => {
  sendStatus(STEP);
  assert.equal(patch.widgets[0].serialize, false);
  assert.equal(patch.widgets[0].options.serialize, false);
});

test("switched off, nothing is shown; switching off removes what is shown", () => {
  sendStatus(STEP);
  extension.settings[0].onChange(false);
  assert.equal(patch.widgets.length, 0);
  globalThis.comfyApp.settings[extension.settings[0].id] = false;
  sendStatus(STEP);
  assert.equal(patch.widgets.length, 0);
});
