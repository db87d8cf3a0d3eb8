"""What could not be done the fast way, and why: noted where it happens, told by whoever keeps a log."""

TEXTS = {
    "captured": "the step is not captured",
    "compiled": "the step is not compiled",
    "kernels": "views are made without Triton kernels, which is slower",
}
_noted: dict[str, str] = {}


def note(what: str, reason: str) -> None:
    """Something of `TEXTS` that is done in another way, with the same result, and why."""
    _noted[what] = reason


def reason_of(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def drain() -> dict[str, str]:
    """The reasons of all that was noted since this was last asked."""
    noted = dict(_noted)
    _noted.clear()
    return noted


def sentence(what: str, reason: str) -> str:
    """In words."""
    return f"{TEXTS.get(what, what)}: {reason}"
