"""A workflow as the page saves it -> the prompt that the page would queue."""

WIDGET_TYPES = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
NOTES = {"Note", "MarkdownNote"}


def widget_names(info):
    """The widgets of a node in the order in which a saved workflow lists their values.

    None stands for the page's own "control after generate", which follows a seed.
    """
    names = []
    for group in ("required", "optional"):
        for name, (kind, *rest) in info["input"].get(group, {}).items():
            options = rest[0] if rest else {}
            if options.get("forceInput") or not (isinstance(kind, list) or kind in WIDGET_TYPES):
                continue
            names.append(name)
            if options.get("control_after_generate"):
                names.append(None)
    return names


def to_api(workflow, object_info):
    """The API form. Raises ValueError if a node's saved values are not as many as its widgets."""
    source = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        if node["type"] in NOTES:
            continue
        names, values = widget_names(object_info[node["type"]]), node["widgets_values"]
        if len(names) != len(values):
            raise ValueError(f"{node['type']} has widgets {names}, the workflow stores {values}")
        inputs = {name: value for name, value in zip(names, values, strict=True) if name is not None}
        inputs.update({i["name"]: source[i["link"]] for i in node["inputs"] if i.get("link") is not None})
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt
