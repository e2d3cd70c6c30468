"""Is a mathematical answer right? math-verify decides, behind a fast path for what needs no algebra.

The fast path answers only where math-verify's verdict is plain from the text: the response has one `\\boxed{…}`, which
holds the label letter by letter; or the label is a plain number, and the response holds exactly one candidate, itself a
plain number. Everything else is left to math-verify, which is slow (up to seconds) and can hang, and so runs in a
worker process.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

_NUMBER = r"-?(?:0|[1-9]\d{0,14})(?:\.\d{1,6})?"
_PLAIN_NUMBER = re.compile(_NUMBER)
_BOXED_NUMBER = re.compile(r"\\boxed\{\s*(" + _NUMBER + r")\s*\}")
_LONE_NUMBER = re.compile(r"(?:^|(?<=\s))(" + _NUMBER + r")(?=[.!]?(?:\s|$))")
_READABLE = re.compile(r"[A-Za-z0-9\\{}()\[\]+\-*/=^_,.<>|!: &%]{1,200}")
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)(?:\{\})?")
_NO_CONTENT = " {}()[]+-*/=^_,.<>|!:&%"
_FINAL_ANSWER = re.compile(r"(?i)final answer")
_PERCENT = re.compile(r"[^A-Za-z0-9]*(?:%|[Pp]ercent|[Pp]ct)")
_LATEX = re.compile(r"[\\${}\[\]]")
_END_TOKENS = re.compile(r"<\|[A-Za-z_]+\|>|</s>")


def fast_verdict(response: str, label: str) -> bool | None:
    """Whether the response's answer is the label; None where only math-verify can tell."""
    label = label.strip()
    if _boxes(response, label):
        return True
    if not _PLAIN_NUMBER.fullmatch(label):
        return None
    candidate = _only_candidate(_END_TOKENS.sub(" ", response))
    if candidate is None:
        return None
    return candidate != "" and Decimal(candidate) == Decimal(label)


def _boxes(response: str, label: str) -> bool:
    """Whether the response's only box holds exactly the label, where math-verify takes that for the answer.

    It prefers a box to all but what follows "final answer", reads both texts alike, and so finds them equal unless it
    can read neither; a percent sign behind the box would be taken for part of the answer.
    """
    start = response.find("\\boxed{")
    if start < 0 or response.find("\\boxed", start + 1) >= 0 or not _READABLE.fullmatch(label):
        return False
    begin = start + len("\\boxed{")
    inside = response[begin : begin + len(label) + 8]
    lead = len(inside) - len(inside.lstrip())
    if not inside.startswith(label, lead) or not _balanced(label):
        return False
    after = response[begin + lead + len(label) :].lstrip()
    plain = after.startswith("}") and not _PERCENT.match(after, 1) and _FINAL_ANSWER.search(response) is None
    return plain and _COMMAND.sub("", label).strip(_NO_CONTENT) != ""


def _balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return depth == 0


def _only_candidate(text: str) -> str | None:
    """The one number that can be meant; "" if there is none at all; None if that is not plain."""
    if _LATEX.search(text):
        boxed = _BOXED_NUMBER.findall(text)
        rest = _BOXED_NUMBER.sub(" ", text)
        plain = len(boxed) == 1 and not _LATEX.search(rest) and "answer" not in rest.lower()
        return boxed[0] if plain and "%" not in rest and "percent" not in rest.lower() else None
    if not any(character.isnumeric() for character in text):
        return ""
    numbers = _LONE_NUMBER.findall(text)
    rest = _LONE_NUMBER.sub(" ", text)
    plain = len(numbers) == 1 and not any(c.isnumeric() or c in "+-*/=^%×÷()" for c in rest)
    return numbers[0] if plain and not re.search(r"(?i)percent|pct", rest) else None


def grade(response: str, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """`verify`, as the registry calls it."""
    return verify(response, str(label))


def verify(response: str, label: str) -> float:
    """math-verify's verdict, 1.0 or 0.0. Without time limits of its own: it runs in a process that can be killed."""
    import math_verify

    gold = _parse_label(label)
    answer = math_verify.parse(_END_TOKENS.sub(" ", response), parsing_timeout=None)
    return float(math_verify.verify(gold, answer, timeout_seconds=None))


def warm_up() -> None:
    """Imports what `verify` needs."""
    import logging

    import math_verify

    # Both say on every call that their own time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    math_verify.verify(math_verify.parse("1", parsing_timeout=None), math_verify.parse("1", parsing_timeout=None))


def _parse_label(label: str) -> list:
    """A label is an answer itself; it counts as one whether it is written in LaTeX's delimiters or not."""
    import math_verify

    if re.search(r"\$|\\boxed|\\\[|\\\(", label):
        return math_verify.parse(label, parsing_timeout=None)
    return math_verify.parse(f"\\boxed{{{label}}}", parsing_timeout=None)
