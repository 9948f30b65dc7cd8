// ComfyUI's page in a headless Chromium, for the browser tests: start, load a graph, run it, look at it.

const { chromium } = (await import(process.env.PLAYWRIGHT_CORE ?? "playwright-core")).default;

export const SHOTS = process.env.SHOTS ?? ".";

/** A page on a running ComfyUI; errors of the page and of our script are collected in page.problems. */
export async function open(url, { vueNodes = false, width = 1500, height = 900, settings = {} } = {}) {
  const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    args: ["--no-sandbox", "--disable-gpu", "--use-gl=swiftshader"],
  });
  const context = await browser.newContext({
    viewport: { width, height },
    permissions: ["clipboard-read", "clipboard-write"],
  });
  const page = await context.newPage();
  page.problems = [];
  page.on("pageerror", (error) => page.problems.push(String(error)));
  page.on("console", (message) => {
    const fromUs = message.location().url.includes("ComfyUI-VC-Attention");
    if (message.type() === "error" && fromUs) page.problems.push(message.text());
  });
  const wanted = {
    "Comfy.TutorialCompleted": true,
    "Comfy.VueNodes.Enabled": vueNodes,
    "Comfy.Workflow.ShowMissingModelsWarning": false,
    "Comfy.Minimap.Visible": false,
    ...settings,
  };
  for (const [name, value] of Object.entries(wanted)) {
    await setSetting(context, url, name, value);
  }
  await page.goto(url);
  await page.waitForFunction(() => window.app?.graph && window.app.extensionManager && window.app.canvas, null, {
    timeout: 60000,
  });
  await page.waitForTimeout(1500);
  await page.keyboard.press("Escape");
  return page;
}

/** A setting as the server stores it; a loaded page does not see the change. */
export async function setSetting(context, url, name, value) {
  const headers = { "Content-Type": "application/json" };
  await context.request.post(`${url}/api/settings/${name}`, { data: JSON.stringify(value), headers });
}

export async function close(page) {
  await page.context().browser().close();
}

/** Load a graph (UI format) as the open workflow and bring all of it into view. */
export async function load(page, graph) {
  await page.evaluate((data) => window.app.loadGraphData(data), graph);
  await page.waitForTimeout(800);
  await fit(page);
}

export async function fit(page) {
  await page.evaluate(() => {
    const nodes = window.app.graph.nodes;
    const left = Math.min(...nodes.map((n) => n.pos[0]));
    const top = Math.min(...nodes.map((n) => n.pos[1])) - 40;
    const right = Math.max(...nodes.map((n) => n.pos[0] + n.size[0]));
    const bottom = Math.max(...nodes.map((n) => n.pos[1] + n.size[1]));
    const canvas = window.app.canvas;
    const [w, h] = [canvas.canvas.clientWidth - 120, canvas.canvas.clientHeight - 160];
    const scale = Math.min(1, w / (right - left), h / (bottom - top));
    canvas.ds.scale = scale;
    canvas.ds.offset[0] = -left + 90 / scale;
    canvas.ds.offset[1] = -top + 70 / scale;
    canvas.setDirty(true, true);
  });
  await page.waitForTimeout(600);
}

/** Queue the open workflow and wait for the server to be done with it. Returns its history entry. */
export async function run(page, url, { timeout = 300000 } = {}) {
  const before = new Set(Object.keys(await (await page.request.get(`${url}/api/history`)).json()));
  await page.evaluate(() => window.app.queuePrompt(0, 1));
  const end = Date.now() + timeout;
  while (Date.now() < end) {
    const history = await (await page.request.get(`${url}/api/history`)).json();
    const fresh = Object.keys(history).find((id) => !before.has(id));
    if (fresh) return history[fresh];
    await page.waitForTimeout(500);
  }
  throw new Error("the workflow did not finish in time");
}

export async function shot(page, name) {
  await page.screenshot({ path: `${SHOTS}/${name}.png` });
}

/** The text of every status box on the page, and how urgent it looks. */
export async function statusBoxes(page) {
  return page.evaluate(() =>
    [...document.querySelectorAll(".vc-attention")].map((box) => ({
      level: box.dataset.level,
      line: box.querySelector(".vc-attention-line").textContent,
      detail: box.querySelector(".vc-attention-detail").textContent,
      visible: box.getClientRects().length > 0,
    })),
  );
}
