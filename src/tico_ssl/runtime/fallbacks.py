"""Fallbacks to a slower path, with the reason: noted where they happen, reported by the training loop."""

TEXTS = {
    "captured": "the step is not captured",
    "compiled": "the step is not compiled",
    "store": "images are decoded in every epoch, all or some (`tico data pack` or more training.workers help)",
    "kernels": "views are made without Triton kernels, which is slower",
}
_noted: dict[str, str] = {}


def note(what: str, reason: str) -> None:
    """Note a fallback, a key of `TEXTS`, which gives the same result, and its reason."""
    _noted[what] = reason


def reason_of(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def drain() -> dict[str, str]:
    """Reasons by fallback, of those noted since the last call."""
    noted = dict(_noted)
    _noted.clear()
    return noted


def sentence(what: str, reason: str) -> str:
    """A line for the log."""
    return f"{TEXTS.get(what, what)}: {reason}"
