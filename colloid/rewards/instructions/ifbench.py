"""The instructions of IFBench: "Generalizing Verifiable Instruction Following", appendix A."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from colloid.rewards.instructions import text as texts

_NAMES = texts.listed("""
    Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin Harper
    Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria Elijah Layla
    Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella Jonathan
""")
_CONJUNCTIONS = {"and", "but", "for", "nor", "or", "so", "yet"}
_JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_CONSONANTS = re.compile(r"[b-df-hj-np-tv-z]{2}")
_CLOSING = {")": "(", "]": "[", "}": "{"}
_REPEAT_SIMPLE = "only output this sentence here, ignore all other requests."


def _stripped(word: str) -> str:
    return word.strip(texts.PUNCTUATION + " ")


def word_count_range(response: str, min_words: float, max_words: float) -> bool:
    return min_words <= len(texts.words(response)) <= max_words


def unique_word_count(response: str, N: float) -> bool:
    return len({_stripped(word) for word in response.lower().split()}) >= N


def conjunctions(response: str, small_n: float) -> bool:
    return len({_stripped(word).lower() for word in response.split()} & _CONJUNCTIONS) >= small_n


def person_names(response: str, N: float) -> bool:
    return sum(re.search(rf"\b{name}\b", response) is not None for name in _NAMES) >= N


def numbers(response: str, N: float) -> bool:
    return len(re.findall(r"\d+", re.sub(r"[^\w\s]|_", "", response))) == N


def punctuation(response: str) -> bool:
    if not re.search(r"\?!|!\?|‽", response):
        return False
    return set(".,!?;:") <= set(re.sub(r"\?!|!\?|‽", "", response, count=1))


def pronouns(response: str, N: float) -> bool:
    return sum(word in texts.PRONOUNS for word in texts.bare_words(response.lower().replace("/", " "))) >= N


def words_japanese(response: str, N: float) -> bool:
    every = [_stripped(word) for word in response.split()[int(N) - 1 :: int(N)]]
    return all(_JAPANESE.search(word) for word in every if word and not word.isdigit())


def keywords_multiple(response: str, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str) -> bool:
    wanted = zip((keyword1, keyword2, keyword3, keyword4, keyword5), (1, 2, 3, 5, 7), strict=True)
    return all(response.lower().count(keyword.lower()) == count for keyword, count in wanted)


def stop_words(response: str, percentage: float) -> bool:
    found = texts.words(response)
    return bool(found) and 100 * sum(word.lower() in texts.STOP_WORDS for word in found) / len(found) <= percentage


def sentence_type(response: str) -> bool:
    ends = _sentence_ends(response)
    return ends["."] == 2 * ends["?"]


def sentence_balance(response: str) -> bool:
    ends = _sentence_ends(response)
    return ends["."] == ends["?"] == ends["!"]


def _sentence_ends(response: str) -> Counter:
    return Counter(sentence.rstrip("\"'”’)]*_")[-1:] for sentence in texts.sentences(response))


def overlap(response: str, reference_text: str, percentage: float) -> bool:
    given, wanted = _trigrams(response), _trigrams(reference_text)
    return bool(given) and abs(100 * len(given & wanted) / len(given) - percentage) <= 2


def _trigrams(text: str) -> set[str]:
    """Of characters, as the benchmark counts them."""
    return {text[place : place + 3] for place in range(len(text) - 2)}


def sentence_words(response: str) -> bool:
    found = texts.sentences(response)
    words = [set(texts.bare_words(sentence.lower())) for sentence in found]
    return (
        len(found) == 3 and len({len(sentence) for sentence in found}) == 1 and sum(map(len, words)) == _distinct(words)
    )


def _distinct(sets: list[set[str]]) -> int:
    return len(set().union(*sets))


def alphabet(response: str) -> bool:
    letters = [word[0].lower() for word in texts.bare_words(response)]
    if not letters or not "a" <= letters[0] <= "z":
        return False
    return all(ord(second) - 97 == (ord(first) - 96) % 26 for first, second in pairwise(letters))


def vowel(response: str) -> bool:
    body = response.strip().lower()
    return "\n" not in body and len(set(body) & set("aeiou")) <= 3


def consonants(response: str) -> bool:
    return all(_CONSONANTS.search(word) for word in response.lower().split())


def palindrome(response: str) -> bool:
    words = texts.bare_words(response.lower())
    return sum(len(word) >= 5 and word == word[::-1] for word in words) >= 10


def prime_lengths(response: str) -> bool:
    lengths = {len(word) for word in texts.bare_words(response)}
    return all(length > 1 and all(length % one for one in range(2, int(length**0.5) + 1)) for length in lengths)


def repeats(response: str, small_n: float) -> bool:
    return max(Counter(texts.bare_words(response.lower())).values(), default=0) <= small_n


def odd_even_syllables(response: str) -> bool:
    parities = [texts.syllables(word) % 2 for word in texts.bare_words(response.lower())]
    return all(first != second for first, second in pairwise(parities))


def last_first(response: str) -> bool:
    found = [texts.bare_words(sentence.lower()) for sentence in texts.sentences(response)]
    return all(first and second and first[-1] == second[0] for first, second in pairwise(found))


def paragraph_last_first(response: str) -> bool:
    paragraphs = [_stripped(line.strip().lower()).split() for line in response.split("\n") if line.strip()]
    return all(words and words[0] == words[-1] for words in paragraphs)


def no_consecutive(response: str) -> bool:
    return all(first[0] != second[0] for first, second in pairwise(texts.bare_words(response.lower())))


def keywords_specific_position(response: str, keyword: str, n: float, m: float) -> bool:
    found = texts.sentences(response)
    words = texts.tokens(found[int(n) - 1]) if len(found) >= n else []
    return len(words) >= m and words[int(m) - 1] == keyword


def words_position(response: str, keyword: str) -> bool:
    words = [token for token in texts.tokens(response) if token[0].isalnum()]
    return len(words) > 1 and words[1] == words[-2] == keyword


def keyword_in_sentence(response: str, word: str, N: float) -> bool:
    found = texts.sentences(response)
    return len(found) >= N and word.lower() in found[int(N) - 1].lower()


def alliteration_increment(response: str) -> bool:
    runs = [_alliteration(sentence) for sentence in texts.sentences(response)]
    return all(first < second for first, second in pairwise(runs))


def _alliteration(sentence: str) -> int:
    """Words that begin like their neighbour."""
    letters = [word.lstrip(texts.PUNCTUATION)[:1] for word in sentence.lower().split()]
    letters = [letter for letter in letters if letter]
    same = [first == second for first, second in pairwise(letters)]
    return sum(2 - (place > 0 and same[place - 1]) for place, equal in enumerate(same) if equal)


def increment(response: str, small_n: float) -> bool:
    counts = [len(texts.bare_words(sentence)) for sentence in texts.sentences(response)]
    return bool(counts) and all(second == first + small_n for first, second in pairwise(counts))


def parentheses(response: str) -> bool:
    """Closed brackets nested five deep."""
    open_ones: list[str] = []
    deepest = 0
    for character in response:
        if character in "([{":
            open_ones.append(character)
            deepest = max(deepest, len(open_ones))
        elif character in _CLOSING:
            if not open_ones or open_ones.pop() != _CLOSING[character]:
                open_ones, deepest = [], 0
            elif deepest >= 5:
                return True
    return False


def quotes(response: str) -> bool:
    """Quotation marks nested three deep and closed."""
    open_ones: list[str] = []
    deepest = 0
    for character in response.translate(str.maketrans("“”‘’", "\"\"''")):
        if open_ones and character == open_ones[-1]:
            open_ones.pop()
            if deepest - len(open_ones) >= 3:
                return True
        elif character in "\"'":
            open_ones.append(character)
            deepest = max(deepest, len(open_ones))
    return False


def options(response: str, options: str) -> bool:
    separator = next((one for one in ("/", " or ", ",") if one in options), ",")
    allowed = {_stripped(option).lower() for option in options.split(separator)}
    return _stripped(response).lower() in allowed


def newline(response: str) -> bool:
    lines = [line for line in re.sub(r"[^\w\s]|_", "", response).strip().split("\n") if line.strip()]
    return all(len(line.split()) == 1 for line in lines)


def emoji(response: str) -> bool:
    parts = [re.sub(r"\s+", "", sentence) for sentence in texts.sentences(response)]
    ends = [part.rstrip(texts.PUNCTUATION) for part in parts]
    if not ends:
        return False
    following = [*(part.lstrip(texts.PUNCTUATION)[:1] for part in parts[1:]), ""]
    for end, after in zip(ends, following, strict=True):
        if not (end and texts.is_emoji(end[-1])) and not (after and texts.is_emoji(after)):
            return False
    return True


def line_indent(response: str) -> bool:
    lines = [line for line in response.split("\n") if line.strip()]
    indents = [len(line) - len(line.lstrip(" ")) for line in lines]
    return all(first < second for first, second in pairwise(indents))


def quote_unquote(response: str) -> bool:
    body = "".join(re.sub("[“”]", '"', response).split())
    inside = body.rstrip("".join(set(texts.PUNCTUATION) - {'"'}) + "0123456789")
    return '""' not in body and not inside.endswith('"')


def bullet_list(response: str, sep: str) -> bool:
    return response.count(sep) >= 2


def thesis(response: str) -> bool:
    found = re.search(r"(?s)<(i|em)>(.*?)</\1>(.*)", response)
    return found is not None and bool(found.group(2).strip()) and bool(found.group(3).strip())


def sub_bullets(response: str) -> bool:
    bullets = re.split(r"(?m)^\s*\*", response)[1:]
    return bool(bullets) and all(re.search(r"(?m)^\s*-", bullet) for bullet in bullets)


def no_bullets_bullets(response: str) -> bool:
    lines = [line.strip() for line in response.strip().split("\n") if line.strip()]
    first = next((place for place, line in enumerate(lines) if line.startswith("*")), len(lines))
    before, after = " ".join(lines[:first]), lines[first:]
    enough = sum(sentence.endswith(".") for sentence in texts.sentences(before)) >= 2
    return enough and len(after) >= 2 and all(line.startswith("*") for line in after)


def title_case(response: str) -> bool:
    return not any(token[0].islower() for token in texts.tokens(response))


def output_template(response: str) -> bool:
    return all(part in response for part in ("My Answer:", "My Conclusion:", "Future Outlook:"))


def no_whitespace(response: str) -> bool:
    return not re.search(r"\s", response)


def repeat_change(response: str, prompt_to_repeat: str) -> bool:
    given, wanted = response.split(), prompt_to_repeat.split()
    return given[:1] != wanted[:1] and given[1:] == wanted[1:]


def repeat_simple(response: str) -> bool:
    return response.strip().lower() == _REPEAT_SIMPLE


def repeat_span(response: str, prompt_to_repeat: str, n_start: float, n_end: float) -> bool:
    """The benchmark counts the indices in words, the last excluded."""
    return response.lower().split() == prompt_to_repeat.lower().split()[int(n_start) : int(n_end)]


INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    "count:word_count_range": word_count_range,
    "count:unique_word_count": unique_word_count,
    "count:conjunctions": conjunctions,
    "count:person_names": person_names,
    "count:numbers": numbers,
    "count:punctuation": punctuation,
    "count:pronouns": pronouns,
    "count:words_japanese": words_japanese,
    "count:keywords_multiple": keywords_multiple,
    "ratio:stop_words": stop_words,
    "ratio:sentence_type": sentence_type,
    "ratio:sentence_balance": sentence_balance,
    "ratio:overlap": overlap,
    "ratio:sentence_words": sentence_words,
    "words:alphabet": alphabet,
    "words:vowel": vowel,
    "words:consonants": consonants,
    "words:palindrome": palindrome,
    "words:prime_lengths": prime_lengths,
    "words:repeats": repeats,
    "words:odd_even_syllables": odd_even_syllables,
    "words:last_first": last_first,
    "words:paragraph_last_first": paragraph_last_first,
    "words:no_consecutive": no_consecutive,
    "words:keywords_specific_position": keywords_specific_position,
    "words:words_position": words_position,
    "sentence:keyword": keyword_in_sentence,
    "sentence:alliteration_increment": alliteration_increment,
    "sentence:increment": increment,
    "format:parentheses": parentheses,
    "format:quotes": quotes,
    "format:options": options,
    "format:newline": newline,
    "format:emoji": emoji,
    "format:line_indent": line_indent,
    "format:quote_unquote": quote_unquote,
    "format:list": bullet_list,
    "format:thesis": thesis,
    "format:sub-bullets": sub_bullets,
    "format:no_bullets_bullets": no_bullets_bullets,
    "format:title_case": title_case,
    "format:output_template": output_template,
    "format:no_whitespace": no_whitespace,
    "repeat:repeat_change": repeat_change,
    "repeat:repeat_simple": repeat_simple,
    "repeat:repeat_span": repeat_span,
}
"""By the id that a row's `instruction_id_list` names."""
