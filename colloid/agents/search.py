"""Search in a local corpus by BM25, in process or behind HTTP.

    python -m colloid.agents.search --corpus corpus.jsonl [--index DIRECTORY] [--port 0]

The corpus has a JSON object a line: `{"id": "1", "contents": "\\"Title\\"\\ntext"}`. The server speaks as Search-R1's
retrieval server does:

    POST /retrieve {"queries": ["…"], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id": "1", "contents": "…"}, "score": 2.7}, …]]}

one list a query, best first; without `return_scores` the documents themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colloid.errors import ConfigError, DataError, EngineError

logger = logging.getLogger(__name__)
TOKEN = r"(?u)\b\w+\b"
DEFAULT_TOPK = 3
MAX_REQUEST = 16 * 2**20


@dataclass(frozen=True)
class Found:
    """A document that a query found, and its BM25 score."""

    document: dict[str, Any]
    score: float


class Corpus:
    """The documents of a JSONL file, read when they are asked for: only where each begins is in memory."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise DataError(f"{path} is no file; a corpus has a JSON object with `contents` a line")
        self._starts = array("Q")
        with self.path.open("rb") as file:
            start = 0
            for line in file:
                if line.strip():
                    self._starts.append(start)
                start += len(line)
        if not self._starts:
            raise DataError(f"{path} is empty; a corpus has a JSON object with `contents` a line")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            return self._parse(file.readline(), index)

    def texts(self) -> list[str]:
        """All contents. Raises DataError with the document."""
        with self.path.open("rb") as file:
            lines = (line for line in file if line.strip())
            return [self._parse(line, index)["contents"] for index, line in enumerate(lines)]

    def _parse(self, line: bytes, index: int) -> dict[str, Any]:
        try:
            document = json.loads(line)
        except ValueError as error:
            raise DataError(f"{self.path}: document {index} is no JSON: {error}") from error
        if not isinstance(document, dict) or not isinstance(document.get("contents"), str):
            raise DataError(f"{self.path}: document {index} has no text `contents`: {line[:100]!r}")
        return document


class SearchIndex:
    """BM25 (as Lucene has it, k1 1.5, b 0.75) over a corpus; English stop words are not looked for.

    Args:
        corpus: a JSONL file.
        directory: where the index is kept; one that is there is loaded, else it is made. None: only in memory.

    Raises:
        DataError: the corpus is not as it should be, or the index is of another one.
    """

    def __init__(self, corpus: str | Path, directory: str | Path | None = None):
        import bm25s

        self.corpus = Corpus(corpus)
        if directory is not None and Path(directory, "params.index.json").is_file():
            self._index = bm25s.BM25.load(directory, mmap=True, show_progress=False)
            if (indexed := self._index.scores["num_docs"]) != len(self.corpus):
                raise DataError(
                    f"the index in {directory} has {indexed} documents, and {corpus} has {len(self.corpus)}; remove "
                    "it to have it made anew"
                )
            return
        self._index = bm25s.BM25(method="lucene")
        self._index.index(_tokens(self.corpus.texts(), return_ids=True), show_progress=False)
        if directory is not None:
            self._index.save(directory, show_progress=False)

    def search(self, queries: Sequence[str], topk: int = DEFAULT_TOPK) -> list[list[Found]]:
        """For each query the best documents, best first; fewer than `topk` where fewer have one of its words."""
        tokens = _tokens(list(queries), return_ids=False)
        known = [[token for token in query if token in self._index.vocab_dict] for query in tokens]
        asked = [index for index, query in enumerate(known) if query]
        results: list[list[Found]] = [[] for _ in known]
        if not asked:
            return results
        count = min(topk, len(self.corpus))
        documents, scores = self._index.retrieve([known[index] for index in asked], k=count, show_progress=False)
        for row, index in enumerate(asked):
            pairs = zip(documents[row].tolist(), scores[row].tolist(), strict=True)
            results[index] = [Found(self.corpus[document], score) for document, score in pairs if score > 0]
        return results


def _tokens(texts: list[str], *, return_ids: bool) -> Any:
    import bm25s

    return bm25s.tokenize(texts, token_pattern=TOKEN, stopwords="en", return_ids=return_ids, show_progress=False)


def make_app(search: Callable[[Sequence[str], int], list[list[Found]]]) -> Any:
    """The aiohttp application of a server: `/retrieve` and `/health`.

    Args:
        search: as `SearchIndex.search`; it is called in a thread.
    """
    from aiohttp import web

    def refuse(reason: str) -> web.Response:
        return web.json_response({"error": reason}, status=400)

    async def retrieve(request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.text())
        except ValueError as error:
            return refuse(f"the request is no JSON: {error}")
        queries = body.get("queries") if isinstance(body, dict) else None
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            return refuse('"queries" is to be a list of texts')
        topk = DEFAULT_TOPK if body.get("topk") is None else body["topk"]
        if not isinstance(topk, int) or isinstance(topk, bool) or topk < 1:
            return refuse(f'"topk" is to be a whole number from 1 on, not {topk!r}')
        found = await asyncio.to_thread(search, queries, topk)
        if body.get("return_scores"):
            result = [[{"document": one.document, "score": one.score} for one in row] for row in found]
        else:
            result = [[one.document for one in row] for row in found]
        return web.json_response({"result": result})

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application(client_max_size=MAX_REQUEST)
    app.add_routes([web.post("/retrieve", retrieve), web.get("/health", health)])
    return app


async def serve(search: Callable[[Sequence[str], int], list[list[Found]]], host: str, port: int) -> Any:
    """Starts a server; its runner (`await runner.cleanup()` ends it). `runner.addresses[0]` is where it listens."""
    from aiohttp import web

    runner = web.AppRunner(make_app(search))
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    return runner


async def retrieve(
    url: str, queries: Sequence[str], topk: int = DEFAULT_TOPK, timeout: float = 60.0
) -> list[list[dict]]:
    """Asks a retrieval server; for each query its documents, best first.

    Args:
        url: with the path, as `http://127.0.0.1:8000/retrieve`.
        timeout: seconds.

    Raises:
        EngineError: it does not answer, or with an error.
    """
    import aiohttp

    payload = {"queries": list(queries), "topk": topk, "return_scores": False}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(timeout)) as session,
            session.post(url, json=payload) as answer,
        ):
            if answer.status != 200:
                raise EngineError(f"{url} answers with {answer.status}: {(await answer.text())[:300]}")
            return (await answer.json())["result"]
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        raise EngineError(f"the retrieval server {url} does not answer: {error!r}") from error


async def _serve_forever(index: SearchIndex, host: str, port: int) -> None:
    runner = await serve(index.search, host, port)
    address, number = runner.addresses[0][:2]
    print(f"{len(index.corpus)} documents at http://{address}:{number}/retrieve", flush=True)
    await asyncio.Event().wait()


def main(argv: list[str] | None = None) -> None:
    """Serves a corpus until it is stopped."""
    parser = argparse.ArgumentParser(description="Serves BM25 search over a JSONL corpus.")
    parser.add_argument("--corpus", type=Path, required=True, help='a JSON object a line, with "contents"')
    parser.add_argument("--index", type=Path, help="directory that keeps the index; made where it is not there")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s, this machine alone")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one; default: %(default)s")
    options = parser.parse_args(argv)
    try:
        asyncio.run(_serve_forever(SearchIndex(options.corpus, options.index), options.host, options.port))
    except (DataError, ConfigError) as error:
        parser.exit(2, f"error: {error}\n")
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
