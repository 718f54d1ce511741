"""The model card: what the draft is, what it was trained on, what it reached, how to serve it.

It is read on other machines: it uses the target's public name, and no path of this one."""

import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from fledge.core.terminal import counted
from fledge.formats.engines import serve_command
from fledge.methods.shared.config import PLACEHOLDER_KEY
from fledge.models.resolve import is_hub_id
from fledge.recipe.schema import Recipe
from fledge.recipe.yaml_text import dump_yaml

_PRIVATE = {"urls", "token_env"}  # target keys about servers and access to them


def model_card(record: Mapping[str, Any], directory: str, recipe: Recipe | None) -> str:
    """The README.md of an export that will be in `directory`."""
    target = record["target"]["served_as"]
    if not is_hub_id(target):
        target = f"path/to/{target or 'TARGET'}"
    command = serve_command(record, directory, target=target)
    parts = [
        _front_matter(record),
        f"# {record['kind']} draft for {record['target']['name'] or 'an unnamed target'}\n",
        _summary(record),
        "## Serve\n",
        f"```\n{shlex.join(command)}\n```\n",
        _versions(record),
        "## Acceptance\n",
        _acceptance(record["self_check"]),
        "## Training\n",
        _training(record, recipe),
    ]
    return "\n".join(parts)


def _front_matter(record: Mapping[str, Any]) -> str:
    served_as = record["target"]["served_as"]
    tags = f"tags: [speculative-decoding, {record['objective']}, draft]"
    lines = ["---", "library_name: fledge", tags]
    if is_hub_id(served_as):
        lines.insert(1, f"base_model: {served_as}")
    return "\n".join([*lines, "---", ""])


def _summary(record: Mapping[str, Any]) -> str:
    target, shape = record["target"], record["shape"]
    tokenizer = target["tokenizer_fingerprint"]
    rows = {
        "format": f"{record['format']}, {record['dtype']}",
        "target": target["name"] or "not recorded",
        "layers of the draft": shape["num_hidden_layers"],
        "target layers it reads (outputs, from 0)": ", ".join(map(str, record["aux_layer_ids"])),
        "draft vocabulary": f"{shape['draft_vocab_size']:,} of {shape['vocab_size']:,} tokens",
        "embeddings": record["embeddings"],
        "tokenizer": f"the target's{f' (fingerprint {tokenizer})' if tokenizer else ''}",
        "drafting": f"{record['method']}, {record['num_draft_tokens']} tokens a round",
    }
    if record[PLACEHOLDER_KEY] is not None:
        rows["mask token id"] = record[PLACEHOLDER_KEY]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"| | |\n|---|---|\n{table}\n"


def _versions(record: Mapping[str, Any]) -> str:
    text = f"Written for {record['engine_title']} {record['engine_version']}."
    if record["chosen_aux_layers"]:
        text += " Engines count layers differently: this file is for this engine only;"
        text += " for another one export again."
    return f"{text}\n"


def acceptance_rows(check: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The acceptance lengths that the self-check of an export found, by what was measured."""
    rows = [("estimated in training, on its held-out rows", check["estimate"])]
    rows.append(("measured again on the same rows, from these files", check["same_rows"]))
    if decoded := check["decoded"]:
        what = f"on the target's answers to {counted(decoded['prompts'], 'held-out prompt')}"
        rows.append((f"{what}, from every position", decoded["every_slot_length"]))
        rows.append((f"{what}, tokens per round", decoded["acceptance_length"]))
    return [(what, length) for what, length in rows if length is not None]


def _acceptance(check: Mapping[str, Any]) -> str:
    rows, decoded = acceptance_rows(check), check["decoded"]
    if not rows:
        return "Not measured: exported without the target.\n"
    table = "\n".join(f"| {name} | {value:.3f} |" for name, value in rows)
    parts = ["| acceptance length | |\n|---|--:|", table]
    if decoded is not None:
        joint = ", ".join(f"{share:.1%}" for share in decoded["joint"])
        parts.append(f"\nTokens 1..k all accepted: {joint}.\n\n{decoded['definition']}.")
    return "\n".join([*parts, ""])


def _training(record: Mapping[str, Any], recipe: Recipe | None) -> str:
    if recipe is None:
        return "The recipe is not known.\n"
    data = ", ".join(portable(list(recipe.data.train))) or "a cache of the target's states"
    checkpoint = "" if record["step"] is None else f" Checkpoint at step {record['step']:,}."
    values = portable(recipe.model_dump())
    values["target"] = {k: v for k, v in values["target"].items() if k not in _PRIVATE}
    if values["target"].get("model"):
        values["target"]["model"] = record["target"]["name"] or values["target"]["model"]
    return f"Data: {data}.{checkpoint}\n\n```yaml\n{dump_yaml(values)}```\n"


def portable(value: Any) -> Any:
    """The same value, with every absolute path reduced to its last part."""
    if isinstance(value, dict):
        return {key: portable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(portable(inner) for inner in value)
    if isinstance(value, str) and (value.startswith("~") or PurePath(value).is_absolute()):
        return PurePath(value).name
    return value
