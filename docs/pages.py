"""MkDocs hook: the site's pages are files of the repository, under the paths that they have there.

MkDocs publishes one folder. Pages of three folders (the root, docs/, experiments/results/) link to each other by
relative paths; the site keeps these paths, so that one link works on a code host and on the site, and is checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

SECTIONS = {
    "Kernels": "docs/kernels/*.md",
    "Results": "experiments/results/*.md",
}  # files of each section of the navigation
PAGES = ("README.md", "docs/**/*.md", "experiments/results/**/*.md")
PICTURES = ("docs/**/*.svg", "docs/**/*.png", "experiments/results/**/*.svg", "experiments/results/**/*.png")


def on_config(config: Any) -> Any:
    """A new page of a kernel or of a result joins its section of the navigation by being there."""
    root = Path(config.config_file_path).parent
    for section in config.nav:
        for title, pages in section.items():
            if title in SECTIONS:
                listed = {path for page in pages for path in (page.values() if isinstance(page, dict) else [page])}
                found = sorted(path.relative_to(root).as_posix() for path in root.glob(SECTIONS[title]))
                pages += [path for path in found if path not in listed]
    return config


def on_files(files: Files, config: Any) -> Files:
    """The theme's own files, and the repository's pages and pictures in place of those of `docs_dir`."""
    root = Path(config.config_file_path).parent
    found = sorted({path for pattern in (*PAGES, *PICTURES) for path in root.glob(pattern)})
    ours = [
        File(path.relative_to(root).as_posix(), str(root), config.site_dir, config.use_directory_urls) for path in found
    ]
    return Files([*(file for file in files if file.src_dir != config.docs_dir), *ours])
