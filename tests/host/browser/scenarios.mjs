// What a user does in the page, one function per scenario; test_frontend.py starts this and judges the answers.
// node scenarios.mjs <url> <workflows folder> <scenario>...   prints one JSON object, scenario -> answer

import fs from "node:fs";
import path from "node:path";

import { close, fit, load, open, run, setSetting, shot, statusBoxes } from "./comfyui_page.mjs";

const [url, folder, ...chosen] = process.argv.slice(2);
const workflow = (name) => JSON.parse(fs.readFileSync(path.join(folder, `${name}.json`), "utf8"));
const nodeOf = (graph, type) => graph.nodes.find((node) => node.type === type);

/** The comparison, short and without guidance, with a seed of its own so that nothing comes from the cache. */
function comparison(seed, steps = 3) {
  const graph = workflow("compare_sample");
  for (const node of graph.nodes.filter((each) => each.type === "KSampler")) {
    [node.widgets_values[0], node.widgets_values[2], node.widgets_values[3]] = [seed, steps, 1.0];
  }
  return graph;
}

/** Every state that a status box went through while the open workflow ran. */
async function watchedRun(page) {
  const seen = [];
  const watch = setInterval(async () => {
    const boxes = await statusBoxes(page).catch(() => []);
    if (boxes[0] && boxes[0].line !== seen.at(-1)?.line) seen.push(boxes[0]);
  }, 60);
  const entry = await run(page, url);
  await page.waitForTimeout(1200);
  clearInterval(watch);
  return { seen, entry, boxes: await statusBoxes(page) };
}

async function search_and_run(page) {
  const graph = comparison(101);
  const patch = nodeOf(graph, "VCAttentionPatch");
  await load(page, { ...workflow("wan_t2v_sample"), nodes: [], links: [], groups: [] });
  await page.locator("#graph-canvas, canvas").first().dblclick({ position: { x: 700, y: 500 } });
  await page.waitForTimeout(700);
  await page.keyboard.type("nvfp4", { delay: 15 });
  await page.waitForTimeout(900);
  await shot(page, "search");
  const offered = await page.evaluate(() => document.body.innerText.includes("VC-Attention Patch"));
  await page.keyboard.press("Enter");
  await page.waitForTimeout(600);
  await page.locator("#graph-canvas, canvas").first().click({ position: { x: 900, y: 600 } }); // puts it down
  await page.waitForTimeout(300);
  const added = await page.evaluate(() => window.app.graph.nodes.map((node) => node.type));
  // the rest of the graph, then the wires of the added node, as a user would draw them
  await page.evaluate(
    ([data, values]) => {
      const { app, LiteGraph } = window;
      const make = (type, x) => {
        const node = LiteGraph.createNode(type);
        node.pos = [x, 0];
        app.graph.add(node);
        return node;
      };
      const node = app.graph.nodes.find((each) => each.type === "VCAttentionPatch") ?? make("VCAttentionPatch", 400);
      node.pos = [400, 0];
      const names = ["kernel", "min_tokens", "clusters"];
      for (const widget of node.widgets) if (names.includes(widget.name)) widget.value = values[widget.name];
      const model = make("VCAttentionSample", 0);
      const sampler = make("KSampler", 800);
      const decode = make("VCAttentionSampleDecode", 1200);
      const save = make("SaveAnimatedWEBP", 1500);
      for (const widget of sampler.widgets) if (widget.name in data) widget.value = data[widget.name];
      model.connect(0, node, "model");
      node.connect(0, sampler, "model");
      model.connect(1, sampler, "positive");
      model.connect(2, sampler, "negative");
      model.connect(3, sampler, "latent_image");
      sampler.connect(0, decode, "latent");
      decode.connect(0, save, "images");
    },
    [{ seed: 101, steps: 3, cfg: 1 }, { kernel: "reference", min_tokens: 1, clusters: patch.widgets_values[5] }],
  );
  await fit(page);
  const { seen, entry, boxes } = await watchedRun(page);
  await fit(page);
  await shot(page, "searched_and_run");
  return { offered, added, lines: seen.map((box) => box.line), levels: seen.map((box) => box.level), boxes,
    status: entry.status.status_str };
}

async function compare_and_copy(page) {
  await load(page, comparison(102));
  const { entry, boxes } = await watchedRun(page);
  await fit(page);
  await shot(page, "comparison");
  await page.locator(".vc-attention").first().click();
  await page.waitForTimeout(400);
  const copied = await page.evaluate(() => navigator.clipboard.readText());
  const saved = await page.evaluate(() => JSON.stringify(window.app.graph.serialize()));
  const outputs = Object.values(entry.outputs).flatMap((output) => output.vc_attention_report ?? []);
  return { boxes, copied, outputs, saved_has_box: saved.includes("node-text-preview") };
}

async function both_renderers(page) {
  await load(page, comparison(103));
  await watchedRun(page);
  const seen = {};
  for (const [name, on] of [["vue", true], ["classic", false], ["vue_again", true]]) {
    await page.evaluate((value) => window.app.extensionManager.setting.set("Comfy.VueNodes.Enabled", value), on);
    await page.waitForTimeout(1500);
    await fit(page);
    await shot(page, `renderer_${name}`);
    seen[name] = (await statusBoxes(page)).filter((box) => box.visible).map((box) => box.line);
  }
  await page.evaluate(() => window.app.extensionManager.setting.set("Comfy.VueNodes.Enabled", false));
  await page.waitForTimeout(800);
  return seen;
}

async function bypassed(page) {
  const graph = comparison(104);
  nodeOf(graph, "VCAttentionPatch").mode = 4;
  await load(page, graph);
  const { entry, boxes } = await watchedRun(page);
  await shot(page, "bypassed");
  return { boxes, outputs: Object.values(entry.outputs).flatMap((output) => output.vc_attention_report ?? []),
    status: entry.status.status_str };
}

async function not_active(page) {
  const graph = comparison(105);
  nodeOf(graph, "VCAttentionPatch").widgets_values[10] = "auto"; // no kernel runs on a CPU by itself
  await load(page, graph);
  const { boxes, entry } = await watchedRun(page);
  await shot(page, "not_active");
  return { boxes, outputs: Object.values(entry.outputs).flatMap((output) => output.vc_attention_report ?? []) };
}

/** ComfyUI's progress text on the patch. */
async function ownText(page) {
  return page.evaluate(() => window.app.graph.nodes.find((node) => node.type === "VCAttentionPatch")
    .widgets.filter((widget) => widget.name.startsWith("$$")).map((widget) => widget.value));
}

async function switched_off(page) {
  const set = (on) => page.evaluate(
    (value) => window.app.extensionManager.setting.set("VCAttention.ShowStatus", value), on);
  await set(false);
  await load(page, comparison(106));
  const { boxes, entry } = await watchedRun(page);
  const own_text = await ownText(page);
  await shot(page, "switched_off");
  await set(true);
  return { boxes, own_text, status: entry.status.status_str };
}

/** A browser that does not get our script: ComfyUI's own text is left. */
async function script_missing(page) {
  await page.route("**/vc_attention.js*", (route) => route.abort());
  const reload = async () => {
    await page.reload();
    await page.waitForFunction(() => window.app?.graph && window.app.extensionManager && window.app.canvas);
    await page.waitForTimeout(2000);
  };
  await reload();
  await load(page, comparison(107));
  const { boxes, entry } = await watchedRun(page);
  const own_text = await ownText(page);
  await shot(page, "script_missing");
  await page.unroute("**/vc_attention.js*");
  await reload();
  page.problems.splice(0, Infinity, ...page.problems.filter((text) => !text.includes("ERR_FAILED")));
  return { boxes, own_text, status: entry.status.status_str };
}

async function every_workflow(page) {
  const answers = {};
  for (const file of fs.readdirSync(folder).filter((name) => name.endsWith(".json")).sort()) {
    const name = file.slice(0, -5);
    const graph = workflow(name);
    await load(page, graph);
    await shot(page, `workflow_${name}`);
    answers[name] = await page.evaluate(async (links) => {
      const { app, LiteGraph } = window;
      const types = app.graph.nodes.map((node) => node.type);
      const live = app.graph.links.size ?? Object.keys(app.graph.links).length;
      const { output } = await app.graphToPrompt();
      const response = await app.api?.fetchApi?.("/validate", { method: "HEAD" }).catch(() => null);
      return { missing: types.filter((type) => !(type in LiteGraph.registered_node_types)), links: live === links,
        prompt: output, response: response?.status ?? null };
    }, graph.links.length);
    const answer = await page.request.post(`${url}/prompt`, { data: { prompt: answers[name].prompt } });
    const body = await answer.json();
    const errors = Object.values(body.node_errors ?? {}).flatMap((node) => node.errors.map((error) => ({
      node: node.class_type, type: error.type, input: error.extra_info?.input_name })));
    answers[name] = { missing: answers[name].missing, links: answers[name].links, errors, status: answer.status() };
    await page.request.post(`${url}/interrupt`);
    await page.request.post(`${url}/queue`, { data: { clear: true } });
  }
  return answers;
}

/** As a new user: the template browser, this pack's page of it, the comparison. */
async function from_templates(page) {
  await page.evaluate(() => window.app.extensionManager.command.execute("Comfy.BrowseTemplates"));
  await page.waitForTimeout(2500);
  await page.getByText("ComfyUI-VC-Attent").first().click();
  await page.waitForTimeout(2500);
  await shot(page, "templates");
  const thumbnails = await page.evaluate(() =>
    [...document.images].filter((image) => image.src.startsWith("blob:") && image.naturalWidth === 512).length);
  await page.getByText("compare_sample").first().click();
  await page.waitForTimeout(2500);
  await shot(page, "from_templates");
  return { thumbnails, types: await page.evaluate(() => window.app.graph.nodes.map((node) => node.type)) };
}

async function pack_disabled(page) {
  await load(page, workflow("compare_sample"));
  await shot(page, "pack_disabled");
  return page.evaluate(() => ({ nodes: window.app.graph.nodes.length,
    ours: Object.keys(window.LiteGraph.registered_node_types).filter((type) => type.startsWith("VCAttention")) }));
}

const SCENARIOS = { from_templates, search_and_run, compare_and_copy, both_renderers, bypassed, not_active, switched_off,
  script_missing, every_workflow, pack_disabled };
const answers = {};
const page = await open(url, { width: 1700, height: 1000 });
for (const name of chosen) {
  page.problems.length = 0;
  try {
    answers[name] = { ...(await SCENARIOS[name](page)), problems: [...page.problems] };
  } catch (error) {
    answers[name] = { failed: String(error.stack ?? error), problems: [...page.problems] };
    await shot(page, `failed_${name}`);
  }
}
await setSetting(page.context(), url, "Comfy.VueNodes.Enabled", false);
await close(page);
console.log(JSON.stringify(answers));
