"""Urls of objects: which store they are in, and what may be shown of them."""

import importlib.util
from fnmatch import fnmatchcase
from urllib.parse import unquote, urlsplit

from tico_ssl.runtime.errors import UserError
from tico_ssl.runtime.extras import install_command

WEB = ("http://", "https://")
SCHEMES = ("s3://", "gs://", "az://", *WEB)
WILD = set("*?[")


def is_url(place: str) -> bool:
    """Whether data are in object storage."""
    return place.startswith(SCHEMES)


def require_plain(url: str) -> None:
    """Refuse a url that has a secret in it, since recipes and logs name the data."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise UserError(
            f"{shown}: leave the user name and password out of the url: they would be written into the recipe"
        )
    if url.startswith(WEB) and ("?" in url or "#" in url):
        shown = f"{parts.scheme}://{parts.netloc}{parts.path}"
        raise UserError(
            f"{shown}: leave out what follows the name of the file (? or #): it would be written into the recipe"
        )
    if not parts.netloc:
        raise UserError(f"{url}: a bucket or a server is missing, as in s3://bucket/train-000.tar")


def require_library() -> None:
    """Refuse urls without the library that reads what is behind them."""
    if importlib.util.find_spec("obstore") is None:
        raise UserError(f"data in object storage need obstore: {install_command('cloud')}")


def split(url: str) -> tuple[str, str]:
    """The store (a bucket, a container, a server) and the name of an object in it."""
    scheme, _, rest = url.partition("://")
    home, _, key = rest.partition("/")
    return f"{scheme}://{home}/", unquote(key) if url.startswith(WEB) else key


def parent(url: str) -> str:
    """The folder of an object, or of a folder, with a slash at its end."""
    store, _ = split(url)
    above = url.rstrip("/").rpartition("/")[0] + "/"
    return above if above.startswith(store) else store


def name_of(url: str) -> str:
    """The last part."""
    return url.rstrip("/").rpartition("/")[2]


def is_folder(url: str) -> bool:
    """Whether a url ends in a slash, or in a name without a suffix."""
    return url.endswith("/") or "." not in name_of(url)


def is_pattern(url: str) -> bool:
    """Whether a url stands for all objects that match it."""
    return bool(WILD & set(url))


def matching(pattern: str, urls: list[str]) -> list[str]:
    """Those that match a pattern, in which a star does not reach over a slash."""
    slashes = pattern.count("/")
    return [url for url in urls if url.count("/") == slashes and fnmatchcase(url, pattern)]
