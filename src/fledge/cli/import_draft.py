"""`fledge import`: convert a draft of another trainer to fledge's layout."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fledge.cli.console import out, print_json, quiet_libraries
from fledge.cli.options import OUT, AsJson, TrustRemoteCode
from fledge.core.files import check_place
from fledge.core.install import fledge_command

EXAMPLE = "Example: fledge import downloaded/eagle3-draft --target smollm2-135m --out drafts/mine"


def import_draft(
    draft: Annotated[
        str, Argument(metavar="FOREIGN", help="A directory or hub id, in any layout.")
    ],
    target: Annotated[str, Option(help="The target it was trained for.")],
    destination: Annotated[Path, Option(*OUT, help="Directory to write.")],
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Write a foreign draft in fledge's layout: for eval, as draft.init_from, for export.

    EAGLE-3 and P-EAGLE in the layouts of SafeAILab EAGLE, SpecForge, speculators, NeMo AutoModel
    and ModelOpt; EAGLE-1 and EAGLE-2 in those of SafeAILab, vLLM and SGLang; block drafts in
    those of z-lab, DeepSpec, SpecForge, speculators and ModelOpt. What engines would share with the
    target (embeddings, a full head) is copied from it, except for block drafts, which have
    none of their own. Faults of the files with a certain repair are repaired, and named; other
    faults are for fledge diagnose.
    """
    from fledge.formats.foreign import read_files
    from fledge.formats.import_draft import convert_draft
    from fledge.models.resolve import local_model

    quiet_libraries()
    path = Path(draft).expanduser()
    directory = path if path.is_dir() else local_model(draft)
    check_place(destination, directory=True)
    diagnosis = convert_draft(
        directory, destination, target=target, trust_remote_code=trust_remote_code
    )
    repairs = [finding for finding in diagnosis.findings if finding.repair is not None]
    layout, imported = diagnosis.files.view.layout, read_files(destination)
    facts = {
        "out": str(destination),
        "layout": layout.name,
        "made_by": layout.made_by,
        "tensors": len(imported.tensors),
        **imported.view.method_settings,
        "draft_vocab_size": imported.view.get("draft_vocab_size"),
        "aux_layer_ids": imported.view.aux_layer_ids,
        "repairs": [finding.to_json() for finding in repairs],
    }
    if as_json:
        print_json(facts)
        return
    for finding in repairs:
        out.say(f"repaired: {finding.evidence} -> {finding.fix}")
    states = f"the outputs of {facts['aux_layer_ids']}"
    if imported.view.merges:
        states = "the target's last hidden state"
    out.say(
        f"{destination}: {imported.view.method.title} from {layout.made_by}, {facts['tensors']} "
        f"tensors, draft vocabulary {facts['draft_vocab_size']:,}, listening to {states}"
    )
    out.say(f"next: {fledge_command('eval', destination, '--target', target)}")
