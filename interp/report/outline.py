"""Numbers of a page's headings and figures, by which it is cited, and the contents made of them."""

from __future__ import annotations


class Outline:
    """The headings of one part of a page, in the order in which they are made.

    Titles are HTML already. A heading's id is that of its part and its number.

    Args:
        part: id of the part.
        prefix: what the part's numbers begin with; "" where the page has one part only.
    """

    def __init__(self, part: str, prefix: str = "") -> None:
        self.part, self.prefix = part, prefix
        self._headings: list[tuple[str, str, str]] = []  # id, number, title
        self._figures = 0

    def heading(self, title: str) -> str:
        """The next <h3>; its number is a link to itself, to copy."""
        place = len(self._headings) + 1
        anchor, number = f"{self.part}-{place}", f"{self.prefix}{place}"
        self._headings.append((anchor, number, title))
        return f'<h3 id="{anchor}"><a class="number" href="#{anchor}">{number}</a> {title}</h3>'

    def figure(self) -> str:
        """The next figure's name: "Figure 2"."""
        self._figures += 1
        return f"Figure {self.prefix}{self._figures}"

    def contents(self) -> str:
        """One line of links to the headings made so far."""
        links = "".join(
            f'<li><a href="#{anchor}">{number} {title}</a></li>'
            for anchor, number, title in self._headings
        )
        if not links:
            return ""
        return f'<nav class="contents" aria-label="Contents"><ol>{links}</ol></nav>'
