"""`fledge demo`: the whole story on a real 135M model, on a laptop CPU."""

import typer

from fledge.cli.console import out


def demo(
    rows: int = typer.Option(2, min=1, help="Conversations to show in the preview."),
) -> None:
    """Prepare the demo chats for the real SmolLM2-135M and show what would be trained on."""
    from fledge.cli import data
    from fledge.demo import CHATS

    out.rule("[bold]1. The data: which tokens will teach the draft")
    data.preview([str(CHATS)], count=rows)
    out.rule("[bold]2. Tokenised once, ready to pack")
    data.stats([str(CHATS)], max_drop_share=0.05)


EXAMPLE = "Example: fledge demo"
