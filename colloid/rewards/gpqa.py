"""`gpqa`: a multiple-choice question; 1 where the response chooses the right letter.

The right choice is `metadata["correct_letter"]`, or the label: a letter, the number of a choice (from 0), or the text
of one of `metadata["choices"]`. Letters are A to J, as many as there are choices, or `metadata["valid_letters"]`.
"""

from __future__ import annotations

import re
import string
from typing import Any

from colloid.rewards.extract import after_thinking, last_boxed

_LETTER = r"[\s*_`\"'$(\[{]*\b([A-Za-z])\b"
_SAYS_ANSWER = re.compile(rf"(?i:\b(?:answer|option|choice))\s*(?i:is|:|=)?(?:\s*(?i:option|choice))?\s*:?{_LETTER}")
_IS_CORRECT = re.compile(r"\b([A-Za-z])\b[)\].:*_\s]*(?i:is\s+(?:the\s+)?(?:correct|right))")
_WRAPPING = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}")


def gpqa_reward(response: str, label: Any, metadata: dict[str, Any]) -> float:
    """1.0 or 0.0. A response that names no letter is right where it holds the right choice's whole text."""
    texts = choice_texts(metadata)
    letters = valid_letters(metadata)
    right = right_letter(label, metadata)
    chosen = chosen_letter(response, letters)
    if chosen is not None and right is not None:
        return float(chosen == right)
    wanted = [str(metadata[key]) for key in ("correct_answer", "answer_text") if metadata.get(key)]
    if right is not None and right in letters[: len(texts)]:
        wanted.append(texts[letters.index(right)])
    if isinstance(label, str) and len(label.strip()) > 1:
        wanted.append(label)
    said = f" {_plain(after_thinking(response))} "
    return float(any(_plain(text) and f" {_plain(text)} " in said for text in wanted))


def chosen_letter(response: str, letters: list[str]) -> str | None:
    """The letter that the answer (what follows `</think>`) settles on: the last that is boxed, else the last that is
    said to be the answer, else the last capital letter that stands alone."""
    text = after_thinking(response)
    boxed = last_boxed(text)
    if boxed is not None:
        letter = _WRAPPING.sub(r"\1", boxed).strip(" ()[].*:").upper()
        if letter in letters:
            return letter
    for pattern in (_SAYS_ANSWER, _IS_CORRECT, re.compile(r"\b([A-Z])\b")):
        found = [match.group(1).upper() for match in pattern.finditer(text) if _is_letter(match)]
        found = [letter for letter in found if letter in letters]
        if found:
            return found[-1]
    return None


def right_letter(label: Any, metadata: dict[str, Any]) -> str | None:
    """The letter of the right choice, where the row tells it."""
    letters = valid_letters(metadata)
    given = metadata.get("correct_letter")
    if isinstance(given, str) and given.strip():
        return given.strip().upper()
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(letters):
        return letters[label]
    text = str(label or "").strip()
    if text.upper() in letters:
        return text.upper()
    texts = choice_texts(metadata)[: len(letters)]
    for letter, choice in zip(letters[: len(texts)], texts, strict=True):
        if _plain(choice) == _plain(text):
            return letter
    return None


def choice_texts(metadata: dict[str, Any]) -> list[str]:
    """The texts of the choices, in order."""
    choices = metadata.get("choices") or []
    return [str(choice) for choice in (choices.values() if isinstance(choices, dict) else choices)]


def valid_letters(metadata: dict[str, Any]) -> list[str]:
    """The letters that may be chosen."""
    if metadata.get("valid_letters"):
        return [str(letter).upper() for letter in metadata["valid_letters"]]
    return list(string.ascii_uppercase[: len(choice_texts(metadata)) or 10])


def _is_letter(match: re.Match) -> bool:
    """`answer is a …` and `answer: I …` are words, unless nothing of the sentence follows."""
    if match.group(1) not in "aI":
        return True
    return re.match(r"[)\].:*_`\"'$}\s]*(?:$|[\n).])", match.string[match.end(1) :]) is not None


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
