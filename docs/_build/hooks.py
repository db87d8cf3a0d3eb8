"""What MkDocs does beyond the pages in docs/: pages generated from the code, links to files outside docs/, formulas.

Formulas become MathML when the site is built: browsers draw it themselves, so a page needs no script and no network.
"""

import html
import posixpath
import re
from pathlib import Path

import command_line
import methods
import recipes
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

GENERATED = {
    "reference/methods.md": methods.page,
    "reference/recipes.md": recipes.page,
    "reference/command-line.md": command_line.page,
}
LINK = re.compile(r"(\]\(|\bsrc=\"|\bhref=\")(\.\./[^)\"\s]*)")
FORMULA = re.compile(r"<(span|div) class=\"arithmatex\">\\[(\[](.*?)\\[)\]]</\1>", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages; nothing is written into docs/."""
    for name, page in GENERATED.items():
        files.append(File.generated(config, name, content=page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links that leave docs/ to the repository."""
    root, folder = Path(config.docs_dir).parent, posixpath.dirname(page.file.src_uri)
    return LINK.sub(lambda link: link[1] + outside(link[2], folder, root, str(config.repo_url)), markdown)


def outside(link: str, folder: str, root: Path, repository: str) -> str:
    """The address of a file that is not part of the site; other links as they are."""
    path, hash_, anchor = link.partition("#")
    target = posixpath.normpath(posixpath.join("docs", folder, path))
    if target.startswith("docs/"):
        return link
    kind = "tree" if (root / target).is_dir() else "blob"
    return f"{repository.rstrip('/')}/{kind}/main/{target}{hash_}{anchor}"


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Draw formulas."""
    return FORMULA.sub(
        lambda found: convert(html.unescape(found[2]), display="block" if found[1] == "div" else "inline"), content
    )
