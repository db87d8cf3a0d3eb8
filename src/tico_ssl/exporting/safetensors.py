"""safetensors: the network's own names, with architecture, input size and normalisation as metadata (.safetensors)."""

from pathlib import Path

from tico_ssl.exporting._snippets import assembled, loading
from tico_ssl.networks.backbones import Backbone
from tico_ssl.networks.storage import ENTRY, save_backbone

OUT = "backbone.safetensors"


def write(backbone: Backbone, out: Path) -> str:
    """The file that a run has, which `load_backbone` reads, and safetensors alone."""
    save_backbone(backbone, out)
    lines = [
        "import json",
        "import safetensors",
        f"with safetensors.safe_open({str(out)!r}, framework='pt') as file:",
        "    state = {name: file.get_tensor(name) for name in file.keys()}",
        f"    about = json.loads(file.metadata()[{ENTRY!r}])  # config, image_size, mean, std",
    ]
    if backbone.config.name.startswith("tico/"):
        return assembled(
            [
                *lines,
                f"# with tico-ssl: model = tico_ssl.load_backbone({str(out)!r})",
                "#                features = model(model.preprocess('photo.jpg'))",
            ]
        )
    return assembled([*lines, *loading(backbone, "state")])
