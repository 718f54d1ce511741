"""Checks of the tensors: the right kind, under names that engines know, all of our network's.

Engines skip tensors that they do not know and leave missing ones random, mostly without a warning.
"""

from collections.abc import Iterator

import torch

from fledge.core.errors import BadInput
from fledge.core.terminal import counted
from fledge.formats.checks.base import Finding, Subject, error, wrong_key
from fledge.formats.codec import EAGLE1_CLASSES, EAGLE3_CLASS, EAGLE3_QWEN3_CLASS
from fledge.formats.foreign import KIND_OF_CLASS, DraftFiles
from fledge.formats.import_draft import check_network


def architecture(subject: Subject) -> Iterator[Finding]:
    """A class or model_type that engines do not take for such a draft."""
    view = subject.view
    if not any(name.startswith(("layers.", "fc")) for name in view.state):
        examples = ", ".join(sorted(subject.files.tensors)[:3])
        evidence = f"no tensor of a draft among {len(view.state)} ({examples} ...)"
        yield error(evidence, "name the directory of a draft", last=True)
    elif view.misnamed:
        if view.merges:
            what = "fc merges one embedding and one hidden state (EAGLE-1/2), declared as EAGLE-3"
        else:
            what = "layer 0 reads embedding and state side by side (EAGLE-3), declared as EAGLE-1"
        vllm, sglang = (view.method.algorithms[engine] for engine in ("vllm", "sglang"))
        yield error(
            f"{what}: served like that, it accepts nothing",
            fix=f'vLLM: method "{vllm}"; SGLang: --speculative-algorithm {sglang}',
            last=True,
        )
    elif not view.borrows and not view.layout.nested:
        named, qk_norm = view.architectures, view.layer_extras["qk_norm"]
        if len(named) != 1 or named[0] not in {*KIND_OF_CLASS, "LlamaForCausalLM"}:
            right = EAGLE1_CLASSES["sglang"] if view.merges else EAGLE3_CLASS
            right = EAGLE3_QWEN3_CLASS if qk_norm else right
            evidence = f"architectures is {named}: no engine loads that as a draft"
            yield wrong_key("architectures", [right], evidence)
        wanted = "qwen3" if qk_norm else "llama"
        if (kind := view.get("model_type")) != wanted:
            layer = "Qwen3 layer (it has q/k norms)" if qk_norm else "Llama layer"
            evidence = f"model_type is {kind!r}: the draft is a {layer} whatever the target is"
            yield wrong_key("model_type", wanted, evidence)


def names(subject: Subject) -> Iterator[Finding]:
    """Wrapper prefixes, or one layer under two names."""
    view, prefix = subject.view, subject.view.layout.prefix
    twice = {name: view.names[own] for name, own in view.own_names.items()}
    twice = {name: first for name, first in twice.items() if name != first}
    odd = [
        name
        for own, name in view.names.items()
        if name not in (*_spellings(own, prefix), *view.spellings(own))
    ]
    if wrong := [*twice, *odd]:
        same = all(torch.equal(view.tensors[a], view.tensors[b]) for a, b in twice.items())
        evidence = f"{counted(len(wrong), 'name is', 'names are')} not the engines', or second "
        evidence += f"names, such as {wrong[0]}"
        yield error(evidence, f"rename to {view.own_name(wrong[0])}", _unwrap if same else None)


def _spellings(our_name: str, prefix: str) -> tuple[str, ...]:
    """The names that a tensor may have in a file whose backbone has this prefix."""
    if prefix and our_name not in ("lm_head.weight", "d2t", "t2d", "mask_hidden"):
        return (prefix + our_name,)
    return our_name, _midlayer(our_name), our_name.replace("input_layernorm", "hidden_norm")


def _midlayer(our_name: str) -> str:
    return our_name.replace("layers.0.", "midlayer.", 1)


def _unwrap(files: DraftFiles) -> None:
    """Keep each tensor once, without wrappers; layer 0 stays `midlayer` if it is called that."""
    files.tensors = {
        _midlayer(our_name) if ".midlayer." in f".{name}" else our_name: files.tensors[name]
        for our_name, name in files.view.names.items()
    }


def network(subject: Subject) -> Iterator[Finding]:
    """Tensors that are missing, unknown, of another shape, or not finite. Runs when the others have
    found nothing that is not repaired."""
    try:
        check_network(subject)
    except BadInput as refused:
        fix = "export again from the trainer's own checkpoint; is it this target's draft?"
        yield error(f"{refused.what}: engines leave what is missing random", refused.fix or fix)
