"""Requests to object stores, by obstore: repeated after failures that pass, and one line for those that do not.

Only the process of `server` uses this: obstore's threads do not survive a fork.
"""

import functools
import itertools
import os
import random
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from tico_ssl.data.remote.urls import WEB, split
from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.wording import counted

T = TypeVar("T")
FIRST_WAIT, LONGEST_WAIT = 0.1, 15.0  # seconds
# Seconds in which another try begins: until a store has sent bytes of an object, it may be one that never will.
HURRIED, PATIENT = 5.0, 120.0
QUESTION, TIMEOUT = timedelta(seconds=30), timedelta(seconds=120)  # of a request for a size or a list; for bytes
CONNECTING = timedelta(seconds=10)
MOST_LISTED = 1_000_000
WRONG_RANGE = re.compile(r"Requested \d|CONTENT_RANGE")  # what obstore says of an answer with other bytes
PASSING = re.compile(r"HTTP error|status code: (5\d\d|408|429)|timed out|reset|body", re.IGNORECASE)
NO_CREDENTIALS = re.compile(
    r"/latest/(api/token|meta-data)|computeMetadata|metadata/identity|service account", re.IGNORECASE
)
UNSAFE = "builder error"  # of a request without encryption that was not allowed
VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_SKIP_SIGNATURE=true for a public one",
}


ALLOWING = ("AWS_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP", "AZURE_ALLOW_HTTP")


class Known(NamedTuple):
    """What a store says of an object: its url, its size in bytes, its version (it has another one if it changes), and
    when it was written, in seconds since 1970."""

    url: str
    size: int
    version: str
    modified: float


class WrongBytes(Exception):
    """An answer with other bytes than were asked for: a failure that may pass, unless it comes twice alike."""


_sending: set[str] = set()  # stores that have sent bytes of an object


def head(url: str) -> Known:
    """An object as it is now. Asked for by its first byte: a store then says more about a mistake, and a server without
    range requests shows."""
    store, key = split(url)
    if not key:
        raise UserError(f"{url}: names a bucket or a server, no file in it")

    def request() -> Any:
        return _library().get(_store(store, QUESTION), key, options={"range": (0, 1)}).meta

    return _known(url, _tried(url, request, HURRIED))


def get(known: Known, begin: int, end: int) -> bytes:
    """Bytes of an object, which must be the one that is known."""
    store, key = split(known.url)

    def request() -> bytes:
        answer = _library().get(_store(store, TIMEOUT), key, options={"range": (begin, end)})
        now = _known(known.url, answer.meta)
        if (now.size, now.version) != (known.size, known.version):
            raise UserError(f"{known.url}: changed while it was read: start again, with all of it as it is now")
        content = _at_most(end - begin, answer)
        if len(content) != end - begin:
            came = f"{len(content):,}" if len(content) < end - begin else "more"
            raise WrongBytes(f"{came} bytes came and not {end - begin:,}")
        _sending.add(store)
        return content

    return _tried(known.url, request, PATIENT if store in _sending else HURRIED)


def _at_most(size: int, answer: Any) -> bytes:
    """The bytes of an answer; of one that has more, not all, since it may have no end."""
    content = b""
    for part in answer.stream(min_chunk_size=size):
        content = content + part if content else bytes(part)
        if len(content) > size:
            break
    return content


def listed(folder: str, deep: bool) -> list[Known]:
    """The objects in a folder, which ends in a slash; those of its subfolders too if `deep`."""
    store, prefix = split(folder)
    if folder.startswith(WEB):
        raise UserError(f"{folder}: a web server does not list its files: name them, as in train-{{000..099}}.tar")

    def request() -> list[Known]:
        if not deep:
            found = list(_library().list_with_delimiter(_store(store, QUESTION), prefix)["objects"])
        else:
            found = []
            for part in _library().list(_store(store, QUESTION), prefix):
                found += part
                if len(found) > MOST_LISTED:
                    raise UserError(f"{folder}: more than {MOST_LISTED:,} objects")
        return [_known(store + meta["path"], meta) for meta in found]

    return _tried(folder, request, HURRIED)


def _known(url: str, meta: Any) -> Known:
    modified = meta["last_modified"].timestamp()
    return Known(url, meta["size"], meta.get("e_tag") or meta.get("version") or f"written at {modified}", modified)


def _tried(url: str, request: Callable[[], T], seconds: float) -> T:
    """The answer to a request, which is repeated for so long, with longer and longer breaks, while it fails in a
    passing way."""
    started, before = time.monotonic(), ""
    for number in itertools.count():
        try:
            return request()
        except UserError:
            raise
        except Exception as error:
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2**number) * random.uniform(0.5, 1)
            again = time.monotonic() - started + wait < seconds
            if not again or not _passes(error) or (_is_wrong(error) and str(error) == before):
                raise UserError(_in_words(url, error, number + 1)) from error
            before = str(error)
        time.sleep(wait)
    raise AssertionError


def _passes(error: Exception) -> bool:
    kind, text = type(error).__name__, _first_lines(error)
    passing = kind == "GenericError" and PASSING.search(text) and not _unknown(text) and UNSAFE not in text
    return _is_wrong(error) or bool(passing)


def _is_wrong(error: Exception) -> bool:
    return isinstance(error, WrongBytes) or bool(WRONG_RANGE.search(_first_lines(error)))


def _unknown(text: str) -> bool:
    """Whether credentials were looked for in vain, at last at an address that virtual machines of a cloud have."""
    return bool(NO_CREDENTIALS.search(text))


def _in_words(url: str, error: Exception, tries: int) -> str:
    scheme, kind, text = url.partition("://")[0], type(error).__name__, _first_lines(error)
    variables = VARIABLES.get(scheme, "")
    if "NoSuchBucket" in text or "ContainerNotFound" in text:
        return f"{url}: there is no such bucket"
    if isinstance(error, FileNotFoundError):
        return f"{url}: there is no such file"
    if "status code: 416" in text:
        return f"{url}: is empty"
    if kind == "NotSupportedError" and "ange" in text:
        return f"{url}: the server does not send parts of files (range requests): download the file"
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return f"{url}: access is refused; check the credentials" + (f" ({variables})" if variables else "")
    if "LOCATION" in text or "AuthorizationHeaderMalformed" in text:
        return f"{url}: the bucket is in another region: set AWS_REGION"
    if variables and (_unknown(text) or "must be specified" in text):
        return f"{url}: no credentials found: set {variables}"
    if UNSAFE in text:
        return f"{url}: an endpoint without https needs AWS_ALLOW_HTTP=true"
    often = f" after {counted(tries, 'try')}" if _passes(error) else ""
    return f"{url}: cannot be read{often} ({_reason(text)})"


def _first_lines(error: Exception) -> str:
    return str(error).partition("Debug source")[0]


def _reason(text: str) -> str:
    """The last part of a library's message: without addresses, and what the server sent along."""
    if status := re.search(r"status code: (\d+ [A-Za-z ]+)", text):
        return f"the server says {status[1].strip()}"
    return " ".join(text.split()).rpartition(" - ")[2][:200]


@functools.cache
def _store(root: str, timeout: timedelta) -> Any:
    """The store of a bucket, a container or a server; settings and credentials are those of the environment."""
    from obstore.store import from_url

    options: Any = {"timeout": timeout, "connect_timeout": CONNECTING}
    if root.startswith("http://") or any(os.environ.get(name, "").lower() in ("true", "1") for name in ALLOWING):
        options["allow_http"] = True  # options that are given hide those of the environment
    return from_url(root, client_options=options, retry_config={"max_retries": 0})


def _library() -> Any:
    import obstore

    return obstore
