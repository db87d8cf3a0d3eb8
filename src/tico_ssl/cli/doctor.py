"""The verb that examines the machine: doctor."""

import typer

from tico_ssl.cli._app import verb


@verb("tico doctor")
def doctor() -> None:
    """Check whether this machine is ready for training. Says what is missing and what to do; exit code 1 if training
    cannot run here."""
    from tico_ssl.runtime.checkup import examine
    from tico_ssl.runtime.progress import say

    found = examine()
    for finding in found:
        say(finding.line())
    if found[-1].prevents:
        raise typer.Exit(1)
    say("next       tico pretrain")
