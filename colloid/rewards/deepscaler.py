"""`deepscaler`: 1 where the last `\\boxed{…}` after `</think>` is the label, as in DeepScaleR (Luo et al., 2025).

A response without the end of its thinking (`</think>`, or `###Response`) has no answer. Two answers are the same where
they are after normalisation (of the MATH benchmark, Hendrycks et al., 2021), or where sympy finds their difference to
be 0; but a whole number only equals the same whole number, and a fraction that is not reduced is another one.
"""

from __future__ import annotations

import re
from typing import Any

from colloid.rewards.extract import last_boxed

_UNITS = "degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard"
_UNIT = re.compile(rf"(?:\\(?:text|mathrm|mbox)\s*\{{\s*)?\b(?:{_UNITS})(?:es|s)?\b(?:\s*\^\s*\d+)?(?:\s*\}})?")
_TOKENS = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+|[A-Za-z]+|\*\*|[-+*/(),])")
_FRACTION = re.compile(r"-?\d+/\d+")
_FUNCTIONS = ("sqrt", "pi")
MOST_LETTERS = 2
"""Expressions with more unknowns than this are compared as texts only."""
LARGEST_POWER = 1000
"""Of all exponents multiplied, so that no power fills the memory."""


def quick_verdict(response: str, label: Any) -> float | None:
    """The reward where the texts tell; None where algebra must."""
    answer, truth = answer_of(response), truth_of(label)
    if answer is None or truth == "":
        return 0.0
    given, wanted = normalized(answer), normalized(truth)
    if given == wanted or _expression(given) == _expression(wanted) != "":
        return 1.0
    if given == "" or (_is_whole(given) and _is_whole(wanted)):
        return float(given != "" and _whole(given) == _whole(wanted))
    return None


def verify(response: str, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """The reward, with sympy. Without time limits of its own: it runs in a process that can be killed."""
    quick = quick_verdict(response, label)
    if quick is not None:
        return quick
    given, wanted = (_expression(normalized(text)) for text in (answer_of(response), truth_of(label)))
    first, second = _elements(given), _elements(wanted)
    if len(first) != len(second) or (len(second) > 1 and (given[0], given[-1]) != (wanted[0], wanted[-1])):
        return 0.0
    return float(all(_same(one, other) for one, other in zip(first, second, strict=True)))


def answer_of(response: str) -> str | None:
    """What is boxed last in the part of the response that is its solution."""
    if "</think>" in response:
        return last_boxed(response.rpartition("</think>")[2])
    if "###Response" in response:
        return last_boxed(response.partition("###Response")[2])
    return None


def truth_of(label: Any) -> str:
    """The label, or what is boxed in it."""
    text = str(label).strip()
    boxed = last_boxed(text) if "\\boxed" in text or "\\fbox" in text else text
    return boxed or ""


def normalized(answer: str) -> str:
    """An answer in one spelling: without spaces, units and dressing, `\\frac{a}{b}` for `a/b`, braces written out."""
    text = answer.strip()
    whole_text = re.fullmatch(r"\\text\s*\{(.+?)\}", text)
    text = whole_text.group(1).strip() if whole_text else text
    for old, new in (("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", "")):
        text = text.replace(old, new)
    for old in ("\\right", "^{\\circ}", "^\\circ", "\\$", "$", "\\%", "%", "\\,", "\\;", "\\ "):
        text = text.replace(old, "")
    text = _UNIT.sub("", text)
    text = re.split(r"\\text\s*\{ ", text)[0]  # units on the right
    text = re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)
    left, equals, right = text.partition("=")
    if equals and len(left.strip()) <= 2 and "=" not in right:
        text = right
    text = re.sub(r"(\d) +(?=\d+\s*/|\\frac)", r"\1+", text)  # 7 3/4
    text = text.replace(" ", "")
    text = re.sub(r"\\frac(\w)(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(\w)\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac\{[^{}]*\})(\w)", r"\1{\2}", text)
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    slash = re.fullmatch(r"(-?)(\d+)/(\d+)", text)
    text = rf"{slash[1]}\frac{{{slash[2]}}}{{{slash[3]}}}" if slash else text
    text = "\\frac{1}{2}" if text == "0.5" else text
    while len(text) > 1 and text[0] == "{" and text[-1] == "}" and _closes_last(text):
        text = text[1:-1]
    return re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", text) if text[:1] not in "([" else text


def _closes_last(text: str) -> bool:
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position == len(text) - 1
    return False


def _expression(text: str) -> str:
    """LaTeX of a normalised answer as plain arithmetic, lower-cased."""
    for _ in range(text.count("\\frac") + text.count("\\sqrt")):
        text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
        text = re.sub(r"\\sqrt\{([^{}]*)\}", r"sqrt(\1)", text)
    for old, new in (("\\cdot", "*"), ("\\times", "*"), ("\\pi", "pi"), ("\\infty", "oo"), ("\\cup", "u")):
        text = text.replace(old, new)
    text = text.replace("√", "sqrt").replace("π", "pi").replace("×", "*").replace("·", "*").replace("−", "-")
    text = text.replace("{", "(").replace("}", ")").replace("^", "**").replace("\\", "")
    return re.sub(r"(?<![A-Za-z])\((\d+)\)", r"\1", text).lower()


def _elements(text: str) -> list[str]:
    """The elements of a tuple or an interval; else the text itself."""
    inner = text[1:-1]
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and not set(inner) & set("[]"):
        depth, parts, start = 0, [], 0
        for position, character in enumerate(inner):
            depth += (character == "(") - (character == ")")
            if depth < 0:
                return [text]
            if character == "," and depth == 0:
                parts.append(inner[start:position])
                start = position + 1
        return [*parts, inner[start:]]
    return [text]


def _same(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    if _FRACTION.fullmatch(_bare(given)) and _FRACTION.fullmatch(_bare(wanted)):
        return _bare(given) == _bare(wanted)
    if _is_whole(given) or _is_whole(wanted):
        return _is_whole(given) and _is_whole(wanted) and _whole(given) == _whole(wanted)
    first, second = _parsed(given), _parsed(wanted)
    if first is None or second is None:
        return False
    import sympy

    return sympy.simplify(first - second) == 0


def _bare(text: str) -> str:
    return text.replace("(", "").replace(")", "")


def _parsed(text: str) -> Any:
    """A sympy expression of numbers, roots and up to two unknowns; None for anything else.

    sympy evaluates what it parses, so nothing but these tokens may reach it: the text is a model's.
    """
    tokens, position = [], 0
    while position < len(text):
        match = _TOKENS.match(text, position)
        if match is None:
            return None
        tokens.append(match.group(1))
        position = match.end()
    names = {token for token in tokens if token[0].isalpha()}
    if len({name for name in names if name not in _FUNCTIONS}) > MOST_LETTERS or "," in tokens:
        return None
    if any(len(name) > 1 and name not in _FUNCTIONS for name in names):
        return None
    power = 1
    for position, token in enumerate(tokens):
        if token == "**":
            exponent, after = (*tokens[position + 1 : position + 3], "", "")[:2]
            if not exponent.isdigit() or after == "**":
                return None
            power *= max(1, int(exponent[:9]))
    if power > LARGEST_POWER:
        return None
    from sympy import SympifyError
    from sympy.parsing import sympy_parser

    rules = (*sympy_parser.standard_transformations, sympy_parser.implicit_multiplication_application)
    try:
        parsed = sympy_parser.parse_expr(text, transformations=rules)
    except (SyntaxError, TypeError, ValueError, SympifyError, AttributeError, ZeroDivisionError):
        return None
    return parsed if hasattr(parsed, "free_symbols") else None


def _is_whole(text: str) -> bool:
    return re.fullmatch(r"-?\d+(?:\.0*)?", text) is not None


def _whole(text: str) -> int:
    return int(text.partition(".")[0])
