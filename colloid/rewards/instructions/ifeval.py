"""The 25 instructions of IFEval: "Instruction-Following Evaluation for Large Language Models", table 1."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from colloid.rewards.instructions import text as texts

_CONSTRAINED = ("my answer is yes.", "my answer is no.", "my answer is maybe.")


def _compare(count: int, wanted: float, relation: str | None) -> bool:
    """`relation`: "less than", or "at least"."""
    return count < wanted if relation == "less than" else count >= wanted


def existence(response: str, keywords: list[str]) -> bool:
    return all(keyword.lower() in response.lower() for keyword in keywords)


def frequency(response: str, keyword: str, frequency: float, relation: str | None = None) -> bool:
    return _compare(response.lower().count(keyword.strip().lower()), frequency, relation)


def forbidden_words(response: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word.lower())}\b", response.lower()) for word in forbidden_words)


def letter_frequency(response: str, letter: str, let_frequency: float, let_relation: str | None = None) -> bool:
    return _compare(response.lower().count(letter.lower()), let_frequency, let_relation)


def response_language(response: str, language: str) -> bool:
    return texts.language(response) == language


def number_sentences(response: str, num_sentences: float, relation: str | None = None) -> bool:
    return _compare(len(texts.sentences(response)), num_sentences, relation)


def number_paragraphs(response: str, num_paragraphs: float) -> bool:
    paragraphs = [part.strip() for part in re.split(r"\s?\*\*\*\s?", response)]
    inner = paragraphs[1:-1]
    return all(inner) and sum(bool(part) for part in paragraphs) == num_paragraphs


def number_words(response: str, num_words: float, relation: str | None = None) -> bool:
    return _compare(len(texts.words(response)), num_words, relation)


def nth_paragraph_first_word(response: str, num_paragraphs: float, nth_paragraph: float, first_word: str) -> bool:
    paragraphs = response.split("\n\n")
    place = int(nth_paragraph) - 1
    if sum(bool(part.strip()) for part in paragraphs) != num_paragraphs or place >= len(paragraphs):
        return False
    found = re.match(r"[\"'“‘*_(]*(\w+)", paragraphs[place].strip())
    return found is not None and found.group(1).lower() == first_word.lower()


def number_placeholders(response: str, num_placeholders: float) -> bool:
    return len(re.findall(r"\[.*?\]", response)) >= num_placeholders


def postscript(response: str, postscript_marker: str = "P.S.") -> bool:
    letters = re.findall(r"[a-z]", postscript_marker.lower())
    pattern = r"\.\s?".join(map(re.escape, letters)) + r"\.?\s*\S"
    if set(letters) != {"p", "s"}:
        pattern = re.escape(postscript_marker.lower())
    return re.search(pattern, response.lower()) is not None


def number_bullet_lists(response: str, num_bullets: float) -> bool:
    return len(re.findall(r"(?m)^\s*(?:\*[^*\n]|-).*$", response)) == num_bullets


def constrained_response(response: str) -> bool:
    return any(answer in response.lower() for answer in _CONSTRAINED)


def number_highlighted_sections(response: str, num_highlights: float) -> bool:
    found = re.findall(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*", response)
    return sum(bool((double or single).strip()) for double, single in found) >= num_highlights


def multiple_sections(response: str, section_spliter: str, num_sections: float) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", response)) >= num_sections


def json_format(response: str) -> bool:
    body = re.sub(r"^```(?:json)?|```$", "", response.strip(), flags=re.IGNORECASE).strip()
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


def title(response: str) -> bool:
    return any(found.strip(" <>") for found in re.findall(r"<<([^\n]+?)>>", response))


def two_responses(response: str) -> bool:
    parts = [part.strip() for part in response.split("******")]
    filled = [part for part in parts if part]
    return all(parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def repeat_prompt(response: str, prompt_to_repeat: str) -> bool:
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(response: str, end_phrase: str) -> bool:
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_word_frequency(response: str, capital_frequency: float, capital_relation: str | None = None) -> bool:
    count = sum(token.isupper() for token in texts.tokens(response))
    return _compare(count, capital_frequency, capital_relation)


def english_capital(response: str) -> bool:
    return response.isupper() and texts.language(response) == "en"


def english_lowercase(response: str) -> bool:
    return response.islower() and texts.language(response) == "en"


def no_comma(response: str) -> bool:
    return "," not in response


def quotation(response: str) -> bool:
    body = response.strip()
    return len(body) > 1 and body[0] == body[-1] == '"'


INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    "keywords:existence": existence,
    "keywords:frequency": frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
"""By the id that a row's `instruction_id_list` names."""
