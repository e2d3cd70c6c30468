"""The local search server: BM25 by its formula, and the wire format of Search-R1's retrieval server."""

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys

import aiohttp
import pytest

from colloid.agents.search import SearchIndex, retrieve, serve
from colloid.errors import ConfigError, DataError, EngineError

TEXTS = [
    '"Rome"\nRome is the capital of Italy.',
    '"Paris"\nParis is the capital of France, and Paris has a tower.',
    '"Cats"\nA cat sleeps. Cats sleep long.',
    '"Zürich"\nZürich lies at a lake; its code is 7.',
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [json.dumps({"id": str(n), "contents": text}, ensure_ascii=n % 2 == 0) for n, text in enumerate(TEXTS)]
    path.write_text("\n".join([rows[0], "", *rows[1:]]), encoding="utf-8")
    return path


def ids(found):
    return [[one.document["id"] for one in row] for row in found]


def test_the_best_come_first_and_what_has_no_word_in_common_does_not_come(corpus):
    index = SearchIndex(corpus)
    assert ids(index.search(["capital of France", "the cat", "zürich 7", "quantum", "", "the"])) == [
        ["1", "0"],
        ["2"],
        ["3"],
        [],
        [],
        [],
    ]
    assert ids(index.search(["capital"], 1)) == [["0"]], "the shorter one"
    assert len(index.search(["capital"], 100)[0]) == 2
    assert index.search([]) == []


def test_scores_are_those_of_the_formula(corpus):
    """Robertson and Zaragoza, The Probabilistic Relevance Framework, with the idf of Lucene."""
    stop = {"is", "the", "of", "and", "a", "at"}
    kept = [[w for w in re.findall(r"\w+", text.lower()) if w not in stop] for text in TEXTS]
    mean = sum(map(len, kept)) / len(kept)
    (found,) = SearchIndex(corpus).search(["paris capital"])
    for one in found:
        words, expected = kept[int(one.document["id"])], 0.0
        for word in ("paris", "capital"):
            holding = sum(word in other for other in kept)
            idf = math.log(1 + (len(kept) - holding + 0.5) / (holding + 0.5))
            count = words.count(word)
            expected += idf * count / (count + 1.5 * (1 - 0.75 + 0.75 * len(words) / mean))
        assert one.score == pytest.approx(expected, rel=1e-5)


def test_an_index_is_kept_and_belongs_to_its_corpus(corpus, tmp_path):
    kept = tmp_path / "index"
    made = SearchIndex(corpus, kept).search(["capital of Italy"])
    assert SearchIndex(corpus, kept).search(["capital of Italy"]) == made
    corpus.write_text(json.dumps({"contents": "one"}))
    with pytest.raises(DataError, match="has 4 documents, and .* has 1; remove it"):
        SearchIndex(corpus, kept)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is empty"), ("{", "document 0 is no JSON"), ('{"text": "a"}', "document 0 has no text `contents`")],
)
def test_a_corpus_that_is_none_is_refused(tmp_path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        SearchIndex(path)


def test_the_wire_format(corpus):
    async def ask():
        runner = await serve(SearchIndex(corpus).search, "127.0.0.1", 0)
        host, port = runner.addresses[0]
        url = f"http://{host}:{port}/retrieve"
        with pytest.raises(ConfigError, match="cannot listen"):
            await serve(lambda queries, topk: [], host, port)
        bodies = [
            {"queries": ["Rome", "capital"], "topk": 1, "return_scores": True},
            {"queries": ["capital"]},
            {"queries": "Rome"},
            {"queries": ["Rome"], "topk": 0},
        ]
        async with aiohttp.ClientSession() as session:
            answers = []
            for body in bodies:
                async with session.post(url, json=body) as answer:
                    answers.append((answer.status, await answer.json()))
        asked = await retrieve(url, ["capital", "nothing"], 1)
        with pytest.raises(EngineError, match="answers with 400"):
            await retrieve(url, ["capital"], 0)
        await runner.cleanup()
        with pytest.raises(EngineError, match="does not answer"):
            await retrieve(url, ["capital"])
        return [*answers, asked]

    scored, plain, *refused, asked = asyncio.run(ask())
    rome = {"id": "0", "contents": TEXTS[0]}
    assert scored[0] == 200 and [row[0]["document"] for row in scored[1]["result"]] == [rome, rome]
    assert scored[1]["result"][0][0]["score"] > scored[1]["result"][1][0]["score"] > 0
    assert [document["id"] for document in plain[1]["result"][0]] == ["0", "1"]
    assert asked == [[rome], []]
    assert [status for status, _ in refused] == [400, 400]
    assert "list of texts" in refused[0][1]["error"] and "not 0" in refused[1][1]["error"]


@pytest.mark.timeout(60)
def test_the_command_serves_on_loopback(corpus):
    command = [sys.executable, "-m", "colloid.agents.search", "--corpus", str(corpus), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        line = process.stdout.readline()
        assert re.fullmatch(r"4 documents at http://127\.0\.0\.1:\d+/retrieve\n", line)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    ended = subprocess.run([*command[:-3], "nowhere.jsonl"], capture_output=True, text=True)
    assert ended.returncode == 2 and "nowhere.jsonl is no file" in ended.stderr
