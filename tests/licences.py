"""The licences of everything that is installed: `make lint` fails on one that is not known to be free to use with this.

CUDA's libraries, which come with torch, are NVIDIA's own, and may be used and passed on.
"""

import re
import sys
from importlib import metadata

KNOWN = re.compile(
    r"\b(MIT|(Free|0)?BSD|Apache|ISC|ISCL|MPL|Mozilla Public License|PSF|Python Software Foundation|Zlib|CC0|BSL-1\.0"
    r"|HPND|Unlicense)\b",
    re.IGNORECASE,
)
COPYLEFT = re.compile(r"\b(A?GPL|GNU (Affero )?General|SSPL|EUPL)", re.IGNORECASE)
STATED = {"atheris": "Apache-2.0"}  # by packages that do not say so in their metadata: in their repository
OF_TORCH = re.compile(r"nvidia-|cuda-")


def licence(package: metadata.Distribution) -> str:
    """What a package says of its licence: an expression, else its classifiers and the first line of a text."""
    about = package.metadata
    if about["Name"] in STATED:
        return STATED[about["Name"]]
    if expression := about.get("License-Expression"):
        return str(expression)
    classifiers = [line for line in about.get_all("Classifier") or [] if line.startswith("License ::")]
    return "; ".join([*classifiers, (about.get("License") or "").strip().partition("\n")[0]])


def is_known(name: str, text: str) -> bool:
    """Whether a package may be used."""
    return bool(OF_TORCH.match(name) or (KNOWN.search(text) and not COPYLEFT.search(text)))


def main() -> None:
    """Name the packages whose licences are not known."""
    found = {package.metadata["Name"]: licence(package) for package in metadata.distributions()}
    unknown = [
        f"{name}: {text or 'no licence given'}" for name, text in sorted(found.items()) if not is_known(name, text)
    ]
    if unknown:
        sys.exit("licences to look at:\n" + "\n".join(unknown))
    sys.stdout.write(f"licences of {len(found)} packages are known\n")


if __name__ == "__main__":
    main()
