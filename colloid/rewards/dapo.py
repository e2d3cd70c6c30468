"""`dapo`: 1 or -1 by the text after the last `Answer:`, as in DAPO (Yu et al., 2025), whose answers are integers.

Both texts are normalised in the manner of Minerva (Lewkowycz et al., 2022, appendix D.1) and must then be the same.
Only the end of a response counts: its last 300 characters.
"""

from __future__ import annotations

import re
from typing import Any

TAIL = 300
"""Characters of the response that are looked at."""
INVALID = "[INVALID]"
"""The prediction of a response without an answer."""

_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_END_TOKENS = re.compile(r"<\|[A-Za-z_]+\|>|</s>")
_UNITS = """
    square ways integers dollars mph inches hours km units points feet minutes digits cents degrees cm gm pounds meters
    meals edges students childrentickets multiples
"""
_DROPPED = (r"\ldots", r"\dots", r"\text{s}", r"\text{.}", r"\text{}^2", r"\text{}^3", r"\text{}", r"\mathrm{th}")
_DROPPED += (r"^{\circ}", r"^\circ", r"\;", r",\!", "{,}", '"')


def dapo_reward(response: str, label: Any) -> dict[str, Any]:
    """`score` (1.0 or -1.0), `acc` (right or not) and `pred` (the normalised answer)."""
    found = _ANSWER.findall(response[-TAIL:])
    prediction = normalized(found[-1]) if found else INVALID
    right = prediction == _canonical(normalized(str(label)))
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": prediction}


def normalized(answer: str) -> str:
    """An answer without units, LaTeX dressing, spaces and thousands separators; of an equation its right side."""
    answer = _END_TOKENS.sub("", answer).split("=")[-1]
    for old, new in (("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text")):
        answer = answer.replace(old, new)
    answer = answer.replace(r",\text{and}", ",").replace(r"\text{and}", ",").replace(r"\text{m}", r"\text{}")
    for text in (*_UNITS.split(), *_DROPPED):
        answer = answer.replace(text, "")
    in_dollars = re.search(r"\$(.*?)\$", answer)
    answer = in_dollars.group(1) if in_dollars else answer
    for command in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)  # \frac12
    answer = re.sub(r"sqrt([^{\[])", r"sqrt{\1}", answer)  # \sqrt3
    answer = answer.replace("$", "")
    without_commas = answer.replace(",", "")
    return without_commas if without_commas.isdigit() else answer.strip()


def _canonical(label: str) -> str:
    """A label that is a whole number, written as one: `034` and `34.0` are 34."""
    plain = re.fullmatch(r"(-?)0*(\d+)(?:\.0*)?", label)
    return plain.group(1) + plain.group(2) if plain else label
