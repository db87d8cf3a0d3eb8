"""The verb that hands a backbone to other tools: export."""

from typing import Annotated

import typer

from tico_ssl.cli import _completing as completing
from tico_ssl.cli._app import RunArgument, verb


@verb("tico export runs/mine onnx --preprocessing inside")
def export(
    run: RunArgument,
    format: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT",
            help="torchvision, timm, safetensors, onnx, torch-export, huggingface or detectron2 "
            "(`tico list exporting`).",
            autocompletion=completing.export_format,
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="File or folder to write; by default backbone with the format's ending."),
    ] = None,
    network: Annotated[
        str,
        typer.Option(
            metavar="NETWORK",
            help="online: the trained network; target: the one that followed it, from the checkpoint.",
            autocompletion=completing.one_of("online", "target"),
        ),
    ] = "online",
    preprocessing: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help="onnx, torch-export: outside: the file takes normalised images; inside: uint8 pixels; inside-float: "
            "values from 0 to 1.",
            autocompletion=completing.one_of("outside", "inside", "inside-float"),
        ),
    ] = "outside",
) -> None:
    """Export a backbone, or a classifier of `tico finetune`, to another library. Prints the lines that load it."""
    from tico_ssl.exporting._writing import export_with_snippet, usual_name
    from tico_ssl.runtime.progress import say

    snippet = export_with_snippet(run, format, out, network, preprocessing)
    say(f"wrote {out or usual_name(format)}; to load it:\n\n{snippet}")
