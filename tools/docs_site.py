"""Hook of mkdocs.yml: generated pages, experiments and notebooks as pages, links that leave docs/, old addresses."""

from __future__ import annotations

import json
import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from docs_reference import PAGES  # noqa: E402

# Pages outside docs/ and where they are on the site.
ELSEWHERE = {
    "CHANGELOG.md": "help/changelog.md",
    "CONTRIBUTING.md": "help/contributing.md",
    "SECURITY.md": "help/security.md",
}
ELSEWHERE |= {
    path.relative_to(ROOT).as_posix(): f"results/experiments/{path.parent.name}.md"
    for path in sorted((ROOT / "experiments").glob("*/README.md"))
}
# Addresses of before docs/ had folders.
MOVED = {
    "your-images": "tutorials/your-images",
    "api": "how-to/python",
    "service": "how-to/serve",
    "data": "how-to/data",
    "runs": "how-to/benchmarks",
    "add-a-method": "how-to/add-a-method",
    "extend": "how-to/extend",
    "scale": "how-to/scale",
    "performance": "explanation/performance",
    "method": "explanation/cpp",
    "beyond": "explanation/default-classifier",
    "unknown": "explanation/unknown",
    "suggest": "explanation/suggest",
    "augmentation": "reference/augmentation",
    "reproducibility": "results/reproducibility",
    "security": "explanation/security",
    "mini": "reference/mini",
    "nano": "reference/nano",
}


def on_files(files: Any, config: Any) -> Any:
    """Add generated pages, pages from outside docs/ with their pictures, and notebooks."""
    texts = {address: make() for address, make in PAGES.items()}
    texts |= {address: (ROOT / path).read_text(encoding="utf-8") for path, address in ELSEWHERE.items()}
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        texts[f"tutorials/{path.stem}.md"] = notebook_page(path)
    for address, text in texts.items():
        files.append(File.generated(config, address, content=text))
    for path in sorted((ROOT / "experiments").glob("*/*.png")):
        address = f"results/experiments/{path.parent.name}-{path.name}"
        files.append(File.generated(config, address, abs_src_path=str(path)))
    return files


def notebook_page(path: Path) -> str:
    """Return a notebook as Markdown: its text and its code."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = [
        f"```python\n{''.join(c['source'])}\n```" if c["cell_type"] == "code" else "".join(c["source"]) for c in cells
    ]
    note = f"*This is the notebook [{path.name}](../../examples/{path.name}), which the tests run.*"
    return "\n\n".join([parts[0], note, *parts[1:]])


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links that leave docs/ to their page on the site, to the repository, or nowhere."""
    address = page.file.src_uri
    source = next((path for path, page_address in ELSEWHERE.items() if page_address == address), f"docs/{address}")
    fences = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    hidden_code: list[str] = []

    def hide(block: re.Match[str]) -> str:
        hidden_code.append(block[0])
        return f"\0{len(hidden_code) - 1}\0"

    def change(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        if re.match(r"[a-z]+:|#|\0", target):
            return link[0]
        path, mark, anchor = target.partition("#")
        target_path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        page_address = site_address(target_path)
        if page_address:
            return f"[{text}]({posixpath.relpath(page_address, posixpath.dirname(address) or '.')}{mark}{anchor})"
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{target_path})"
        return text if "`" in text or target_path in text else f"{text} (`{target_path}`)"

    markdown = re.sub(r"(?<!`)`[^`\n]+`(?!`)", hide, fences.sub(hide, markdown))
    markdown = re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", change, markdown)
    while "\0" in markdown:
        markdown = re.sub(r"\0(\d+)\0", lambda marker: hidden_code[int(marker[1])], markdown)
    return markdown


def site_address(path: str) -> str | None:
    """Return where a file of the repository is on the site, or None."""
    if path in ELSEWHERE:
        return ELSEWHERE[path]
    if path + "/README.md" in ELSEWHERE:
        return ELSEWHERE[path + "/README.md"]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    picture = re.fullmatch(r"experiments/(\w+)/([^/]+\.png)", path)
    return f"results/experiments/{picture[1]}-{picture[2]}" if picture else None


def on_post_build(config: Any) -> None:
    """Write a page that redirects for every old address."""
    for old_address, new_address in MOVED.items():
        page = Path(config.site_dir) / old_address / "index.html"
        assert (Path(config.site_dir) / new_address / "index.html").exists(), new_address
        page.parent.mkdir(exist_ok=True)
        target = os.path.relpath(Path(config.site_dir) / new_address, page.parent).replace(os.sep, "/") + "/"
        page.write_text(
            f'<!doctype html><meta charset="utf-8"><title>Moved</title><link rel="canonical" href="{target}">'
            f'<meta http-equiv="refresh" content="0; url={target}"><a href="{target}">This page has moved.</a>\n',
            encoding="utf-8",
        )
