"""Finding the answer in a response."""

from __future__ import annotations

_OPENINGS = ("\\boxed", "\\fbox")


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{…}` (or `\\fbox{…}`, or `\\boxed x`); None where there is none, or no end."""
    start, opening = max((text.rfind(opening), opening) for opening in _OPENINGS)
    if start < 0:
        return None
    rest = text[start + len(opening) :].lstrip()
    if not rest.startswith("{"):
        word = rest.split("$")[0].split()
        return word[0] if word else None
    depth = 0
    for position, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:position].strip()
    return None


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; all of it where there is none."""
    return text.rpartition("</think>")[2]
