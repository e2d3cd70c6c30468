"""IFBench's instructions that are whole tasks by themselves (`custom:…`); each belongs to one prompt."""

from __future__ import annotations

import csv
import datetime
import re
import unicodedata
from collections.abc import Callable
from itertools import pairwise

from colloid.rewards.instructions import text as texts

_CAPITALS = texts.listed("""
    Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin Amsterdam Warsaw London
    Brussels Kyiv Prague Luxembourg Paris Vienna Bratislava Budapest Vaduz Chisinau Bern Ljubljana Zagreb
""")
_OPTIONAL_CAPITAL = "Kyiv"
"""The benchmark's list leaves it out."""
_AFRICA = """
    Algeria, Angola, Benin, Botswana, Burkina Faso, Burundi, Cameroon, Central African Republic, Chad, Comoros,
    Djibouti, Egypt, Equatorial Guinea, Eritrea, Ethiopia, Gabon, Ghana, Guinea, Guinea-Bissau, Kenya, Lesotho, Liberia,
    Libya, Madagascar, Malawi, Mali, Mauritania, Mauritius, Morocco, Mozambique, Namibia, Niger, Nigeria, Rwanda,
    Senegal, Seychelles, Sierra Leone, Somalia, South Africa, South Sudan, Sudan, Tanzania, Togo, Tunisia, Uganda,
    Zambia, Zimbabwe
"""
_AFRICAN = {" ".join(name.split()).lower() for name in _AFRICA.split(",")}
"""Those that have one spelling."""
_NAPOLEON = (1769, 1821)


def multiples(response: str) -> bool:
    """The multiples of 7 from 10 to 50."""
    return re.findall(r"\d+", response) == ["14", "21", "28", "35", "42", "49"] and not re.search(r"[^\d\W]", response)


def mcq_count_length(response: str) -> bool:
    """Four questions of five options, each longer than the one before, and nothing else."""
    if not response.startswith("Question"):
        return False
    parts = [part for part in re.split(r"(?m)^Question\s*\d*[.:);|]?\s*", response) if part.strip()]
    stems = []
    for part in parts:
        lines = [line.strip() for line in part.split("\n")]
        options = [bool(re.match(r"[A-Ea-e][.)|]\s*\w", line)) for line in lines]
        if sum(options) != 5:
            return False
        stems.append(len(" ".join(lines[: options.index(True)]).strip()))
    return len(stems) == 4 and all(first < second for first, second in pairwise(stems))


def reverse_newline(response: str) -> bool:
    """The countries of Africa, a line each, from Z to A."""
    lines = [_ascii(re.sub(r"^[\d.*\-\s]+", "", line)).strip().lower() for line in response.split("\n") if line.strip()]
    return lines == sorted(lines, reverse=True) and set(lines) >= _AFRICAN and len(lines) <= len(_AFRICAN) + 10


def word_reverse(response: str) -> bool:
    """The bald eagle, words in reverse."""
    return "eagle bald" in " ".join(texts.bare_words(response.lower()))


def character_reverse(response: str) -> bool:
    """The bald eagle, letters in reverse."""
    return "elgae dlab" in response.lower()


def sentence_alphabet(response: str) -> bool:
    """26 sentences that begin with A to Z."""
    first = "".join(sentence.lstrip("\"'“‘*_(")[:1].lower() for sentence in texts.sentences(response))
    return first == "abcdefghijklmnopqrstuvwxyz"


def european_capitals_sort(response: str) -> bool:
    """The capitals of Europe north of 45 degrees, from north to south."""
    given = [part.strip(" .\n") for part in _ascii(response).split(",")]
    given = ["Kyiv" if part == "Kiev" else part for part in given]
    wanted = [name for name in _CAPITALS if name != _OPTIONAL_CAPITAL or name in given]
    return given == wanted


def csv_city(response: str) -> bool:
    """A header and 7 rows."""
    rows = list(csv.reader(response.strip().splitlines(), skipinitialspace=True))
    return (
        len(rows) == 8 and rows[0] == ["ID", "Country", "City", "Year", "Count"] and all(len(row) == 5 for row in rows)
    )


def csv_special_character(response: str) -> bool:
    """A header and 14 rows; a quoted field has a special character."""
    rows = list(csv.reader(response.strip().splitlines(), skipinitialspace=True))
    header = ["ProductID", "Category", "Brand", "Price", "Stock"]
    right = len(rows) == 15 and rows[0] == header and all(len(row) == 5 for row in rows)
    body = response.partition("\n")[2]
    return right and any(re.search(r"[^\w\s]", field) for field in re.findall(r'"([^"\n]*)"', body))


def csv_quotes(response: str) -> bool:
    """A header and 3 rows, separated by tabs, each field in double quotes."""
    rows = [[field.strip() for field in line.split("\t")] for line in response.strip().splitlines()]
    quoted = all(re.fullmatch(r'"[^"]*"', field) for row in rows for field in row)
    header = [f'"{name}"' for name in ("StudentID", "Subject", "Grade", "Semester", "Score")]
    return len(rows) == 4 and quoted and rows[0] == header and all(len(row) == 5 for row in rows)


def date_format_list(response: str) -> bool:
    """Dates of Napoleon's life, as YYYY-MM-DD, separated by commas."""
    for part in response.strip().split(","):
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", part.strip()):
            return False
        try:
            date = datetime.date.fromisoformat(part.strip())
        except ValueError:
            return False
        if not _NAPOLEON[0] <= date.year <= _NAPOLEON[1]:
            return False
    return True


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    "custom:multiples": multiples,
    "custom:mcq_count_length": mcq_count_length,
    "custom:reverse_newline": reverse_newline,
    "custom:word_reverse": word_reverse,
    "custom:character_reverse": character_reverse,
    "custom:sentence_alphabet": sentence_alphabet,
    "custom:european_capitals_sort": european_capitals_sort,
    "custom:csv_city": csv_city,
    "custom:csv_special_character": csv_special_character,
    "custom:csv_quotes": csv_quotes,
    "custom:date_format_list": date_format_list,
}
"""By the id that a row's `instruction_id_list` names."""
