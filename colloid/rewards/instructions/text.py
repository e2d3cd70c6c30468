"""Words, sentences, syllables and languages of a response, as the instructions count them."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable

PUNCTUATION = string.punctuation
_REMOVE_PUNCTUATION = str.maketrans("", "", PUNCTUATION)
_ABBREVIATIONS = "Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|Rev|Capt|Lt|Gen|Mt|Inc|Ltd|Co|vs|etc|Fig|e\\.g|i\\.e|a\\.m|p\\.m|U\\.S"
_NO_END = re.compile(rf"\b(?:{_ABBREVIATIONS}|[A-HJ-Z])\.$")
_END = re.compile(r"[.!?…]+[\"'”’)\]*_]*(?=\s|$)")
_TOKEN = re.compile(r"\w+(?:[-'’.]\w+)*|[^\w\s]")


def listed(text: str) -> dict[str, None]:
    """The words of a text, in order, as keys."""
    return dict.fromkeys(text.split())


STOP_WORDS = listed(
    """
    i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers herself it
    its itself they them their theirs themselves what which who whom this that these those am is are was were be been
    being have has had having do does did doing a an the and but if or because as until while of at by for with about
    against between into through during before after above below to from up down in out on off over under again further
    then once here there when where why how all any both each few more most other some such no nor not only own same so
    than too very s t can will just don should now
    """
)
PRONOUNS = listed(
    """
    i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers
    herself it its itself they them their theirs themselves
    """
)
_LANGUAGES = "en es pt ar hi fr ru de ja it bn uk th ur ta te bg ko pl he fa vi ne sw kn mr gu pa ml fi zh nl tr id"


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores."""
    return re.findall(r"\w+", text)


def bare_words(text: str) -> list[str]:
    """What spaces separate, after all punctuation is taken out."""
    return text.translate(_REMOVE_PUNCTUATION).split()


def tokens(text: str) -> list[str]:
    """Words and, each by itself, punctuation marks."""
    return _TOKEN.findall(text)


def sentences(text: str) -> list[str]:
    """Sentences; abbreviations, initials and decimal points end none, a line break ends none either."""
    text = " ".join(text.split())
    found, start = [], 0
    for match in _END.finditer(text):
        part = text[start : match.end()]
        if match.group().startswith(".") and len(match.group()) == 1 and _NO_END.search(part):
            continue
        found.append(part.strip())
        start = match.end()
    found.append(text[start:].strip())
    return [sentence for sentence in found if sentence]


def syllables(word: str) -> int:
    """Syllables of an English word."""
    import syllapy

    return syllapy.count(word)


def language(text: str) -> str:
    """The ISO 639-1 code of the text's language."""
    return _classifier()(text.lower())[0]


def is_emoji(character: str) -> bool:
    """Whether it is an emoji, or the mark that makes one of the character before."""
    code = ord(character)
    ranges = ((0x1F000, 0x1FAFF), (0x2600, 0x27BF), (0x2B00, 0x2BFF), (0x2300, 0x23FF), (0xFE0F, 0xFE0F))
    return any(low <= code <= high for low, high in ranges)


@functools.lru_cache(maxsize=1)
def _classifier() -> Callable[[str], tuple[str, float]]:
    """py3langid's, which is slow to load, for the languages that instructions ask for."""
    import py3langid

    py3langid.set_languages(_LANGUAGES.split())
    return py3langid.classify
