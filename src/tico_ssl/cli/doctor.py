"""The verb that examines the machine: doctor."""

import typer

from tico_ssl.cli._app import app


@app.command()
def doctor() -> None:
    """Say what this machine offers for training, and what to do about what is missing. Exit code 1 if training cannot
    run here.

    Example: tico doctor
    """
    from tico_ssl.runtime.checkup import examine
    from tico_ssl.runtime.progress import say

    found = examine()
    for finding in found:
        say(finding.line())
    if found[-1].prevents:
        raise typer.Exit(1)
    say("next       tico pretrain")
