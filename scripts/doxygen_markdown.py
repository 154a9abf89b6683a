"""doxygen_markdown.py FILE: a Markdown page for Doxygen 1.9. A heading gets a label of its page and GitHub's anchor, and
links to pages and headings become references. What a link names beside the site's pages is left as text."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def is_page(path):
    return path.suffix == ".md" and (path.parent == ROOT / "docs" or path.relative_to(ROOT).as_posix() in
                                     ("README.md", "CONTRIBUTING.md", "examples/README.md"))


def page_of(path):
    """README.md is the main page, whose label is Doxygen's own."""
    name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "_").lower()
    return "index" if name == "readme" else "page_" + name


def anchor_of(heading):
    """GitHub's: words of lower case, joined by dashes."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def anchors_of(text):
    """The anchors of a page in order."""
    found = []
    for line in without_code(text):
        if line and (heading := re.match(r"#+ +(.*?)\s*$", line)):
            found.append(anchor_of(heading[1]))
    return found


def without_code(text):
    """The page's lines, those of code blocks as None."""
    fenced = False
    for line in text.split("\n"):
        fence = line.lstrip().startswith("```")
        yield None if fenced or fence else line
        fenced ^= fence


def links_of(text):
    """What links of the page name: (target, anchor)."""
    for line in without_code(text):
        for target in re.findall(r"\]\(([^)\s]+)\)", line or ""):
            if not re.match(r"[a-z]+:", target):
                yield tuple((target + "#").split("#")[:2])


def converted(path):
    text = path.read_text()

    def link(match):
        shown, target = match[1], match[2]
        if re.match(r"[a-z]+:", target):
            return match[0]
        name, _, anchor = target.partition("#")
        other = (path.parent / name).resolve() if name else path
        if not is_page(other):
            return shown
        return f'@ref {page_of(other)}{"-" + anchor if anchor else ""} "{shown.replace("`", "")}"'

    out = []
    for line, raw in zip(without_code(text), text.split("\n")):
        if line is None:
            out.append(raw)
            continue
        if heading := re.match(r"(#+) +(.*?)\s*$", line):
            label = page_of(path) if len(heading[1]) == 1 else f"{page_of(path)}-{anchor_of(heading[2])}"
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[2])
            if len(heading[1]) == 1:
                plain = plain.replace("`", "")  # Doxygen's tree would show its tags.
            # The main page's label is given by Doxygen.
            out.append(f"{heading[1]} {plain}" + ("" if label == "index" else f" {{#{label}}}"))
        else:
            line = re.sub(r"!\[([^\]]*)\]\(docs/images/", r"![\1](", line)
            out.append(re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", link, line))
    return "\n".join(out)


if __name__ == "__main__":
    print(converted(pathlib.Path(sys.argv[1]).resolve()))
