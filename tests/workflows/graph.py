"""A graph in the format that ComfyUI's page saves, written from the nodes' definitions (object_info)."""

from typing import Any

WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3"}
SEED_NAMES = {"seed", "noise_seed"}
ROW, HEAD = 26, 50  # height of a widget and of a node's title with its sockets, about


def specs(definition: dict) -> dict[str, tuple[str, dict]]:
    """Inputs in the page's order: name -> (type, options)."""
    found = {}
    for group in ("required", "optional"):
        for name, spec in definition["input"].get(group, {}).items():
            options = spec[1] if len(spec) > 1 else {}
            found[name] = ("COMBO" if isinstance(spec[0], list) else spec[0], options)
    return found


def is_widget(kind: str, options: dict) -> bool:
    return kind in WIDGETS and not options.get("forceInput")


def default(definition: dict, name: str, kind: str, options: dict) -> Any:
    """What the page puts into a fresh widget."""
    if "default" in options:
        return options["default"]
    choices = options.get("options") or []
    if kind == "COMFY_DYNAMICCOMBO_V3":
        return choices[0]["key"]
    if kind == "COMBO":
        for group in ("required", "optional"):
            spec = definition["input"].get(group, {}).get(name)
            if spec is not None and isinstance(spec[0], list):
                choices = spec[0]
        return choices[0] if choices else ""
    return {"INT": 0, "FLOAT": 0.0, "STRING": "", "BOOLEAN": False}[kind]


class Graph:
    """Nodes are added from left to right; what add() returns is used to connect them."""

    def __init__(self, object_info: dict):
        self._info = object_info
        self._nodes: list[dict] = []
        self._links: list[list] = []
        self._groups: list[dict] = []

    def note(self, text: str, pos, size) -> None:
        self._nodes.append(
            {
                **self._base("MarkdownNote", pos, size, None),
                **{"inputs": [], "outputs": [], "properties": {}, "widgets_values": [text]},
                **{"color": "#432", "bgcolor": "#653"},
            }
        )

    def group(self, title: str, bounding) -> None:
        self._groups.append({"title": title, "bounding": list(bounding), "color": "#3f789e", "flags": {}})

    def add(self, kind: str, pos, *, size=None, title=None, models=(), **inputs) -> "Node":
        """inputs: widget values, and for sockets Node outputs (node["MODEL"] or node[0])."""
        definition = self._info[kind]
        node = self._base(kind, pos, size, title)
        node.update(inputs=[], outputs=[], properties={"Node name for S&R": kind}, widgets_values=[])
        if models:
            node["properties"]["models"] = [dict(model) for model in models]
        unknown = set(inputs) - set(specs(definition))
        if unknown:
            raise ValueError(f"{kind} has no inputs {sorted(unknown)}")
        for name, (socket, options) in specs(definition).items():
            if is_widget(socket, options):
                node["widgets_values"] += self._widget(definition, name, socket, options, inputs)
            else:
                self._socket(node, name, socket, inputs.get(name))
        names = definition.get("output_name") or definition["output"]
        for slot, (socket, label) in enumerate(zip(definition["output"], names, strict=True)):
            node["outputs"].append({"name": label, "type": socket, "links": [], "slot_index": slot})
        sockets = max(len(node["inputs"]), len(node["outputs"]))
        node["size"] = list(size or (300, HEAD + ROW * (sockets + len(node["widgets_values"]))))
        self._nodes.append(node)
        return Node(node, self)

    def _base(self, kind, pos, size, title) -> dict:
        number = len(self._nodes) + 1
        node = {"id": number, "type": kind, "pos": list(pos), "size": list(size or (300, 100))}
        return {**node, "flags": {}, "order": number - 1, "mode": 0, **({"title": title} if title else {})}

    def _widget(self, definition, name, kind, options, inputs) -> list:
        values = [inputs.get(name, default(definition, name, kind, options))]
        if options.get("control_after_generate") or name in SEED_NAMES:
            values.append("fixed")
        if options.get("image_upload"):
            values.append("image")
        return values

    def _socket(self, node, name, kind, source) -> None:
        entry = {"name": name, "type": kind, "link": None}
        if source is not None:
            origin, slot = source
            output = origin["outputs"][slot]
            if "*" not in (kind, output["type"]) and output["type"] not in kind.split(","):
                raise ValueError(f"{node['type']}.{name} takes {kind}, got {output['type']}")
            number = len(self._links) + 1
            target_slot = len(node["inputs"])
            self._links.append([number, origin["id"], slot, node["id"], target_slot, output["type"]])
            entry["link"] = number
            output["links"].append(number)
        node["inputs"].append(entry)

    def to_json(self) -> dict:
        return {
            "last_node_id": len(self._nodes),
            "last_link_id": len(self._links),
            **{"nodes": self._nodes, "links": self._links, "groups": self._groups},
            **{"config": {}, "extra": {"ds": {"scale": 0.7, "offset": [60, 120]}}, "version": 0.4},
        }


class Node:
    """node["name"] or node[0]: one of its outputs."""

    def __init__(self, node: dict, graph: Graph):
        self._node = node

    def __getitem__(self, output):
        names = [entry["name"] for entry in self._node["outputs"]]
        return self._node, output if isinstance(output, int) else names.index(output)
