"""Has a run's engines give their memory back while the trainer trains, and take it again, by tag."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from colloid.engines.contract_memory import TAGS
from colloid.engines.control import EngineControl
from colloid.errors import EngineError

logger = logging.getLogger(__name__)

Verb = Callable[[EngineControl, list[str]], None]

TIMEOUT = 300.0
"""Seconds that one call may take."""
IDLE_SECONDS = 60.0
"""Until what was aborted has ended."""


class EngineMemory:
    """What of the engines' memory is released. An engine that came meanwhile has all of its own.

    Args:
        api_key: of the engines.
    """

    def __init__(self, api_key: str):
        self._api_key = api_key
        self._released: dict[str, set[str]] = {}

    def release(self, urls: Sequence[str], tags: Collection[str]) -> None:
        """Has all engines release the tags that they hold; on return the memory is the system's.

        Raises:
            EngineError: names the engines that did not.
        """
        wanted = {url: [tag for tag in TAGS if tag in tags and tag not in self._of(url)] for url in urls}
        self._call(_release, wanted, lambda url: self._of(url).update(wanted[url]))

    def resume(self, urls: Sequence[str], tags: Collection[str]) -> None:
        """Has those of the engines that released any of the tags take them again. Weights are not there by it: a
        weight update brings them.

        Raises:
            EngineError: as `release`.
        """
        self._released = {url: self._of(url) for url in urls}
        wanted = {url: [tag for tag in TAGS if tag in tags and tag in self._of(url)] for url in urls}
        self._call(_resume, wanted, lambda url: self._of(url).difference_update(wanted[url]))

    @property
    def is_released(self) -> bool:
        """Whether any engine lacks any of its memory."""
        return any(self._released.values())

    def _of(self, url: str) -> set[str]:
        return self._released.setdefault(url, set())

    def _call(
        self,
        verb: Callable[[EngineControl, list[str]], None],
        wanted: dict[str, list[str]],
        done: Callable[[str], None],
    ) -> None:
        """`done` takes the address of each engine that did it."""
        calls = {url: tags for url, tags in wanted.items() if tags}
        if not calls:
            return
        with ThreadPoolExecutor(len(calls), thread_name_prefix="memory") as threads:
            running = {
                url: threads.submit(verb, EngineControl(url, self._api_key, TIMEOUT), tags)
                for url, tags in calls.items()
            }
        for url, call in running.items():
            if call.exception() is None:
                done(url)
        failed = [str(call.exception()) for call in running.values() if call.exception() is not None]
        if failed:
            raise EngineError(f"memory of {len(failed)} of {len(calls)} engines: {'; '.join(failed)}")


def _release(engine: EngineControl, tags: list[str]) -> None:
    """Ends first what runs there: the rollout is over, and nobody waits for it. (SGLang would end itself instead.)"""
    aborted = engine.post("/abort_request", {"abort_all": True}).get("num_aborted")
    if aborted:
        logger.warning("engine %s: %d samples that nobody waited for were aborted", engine.url, aborted)
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        try:
            engine.post("/flush_cache")  # which SGLang refuses while anything runs
            break
        except EngineError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    engine.post("/release_memory_occupation", {"tags": tags})


def _resume(engine: EngineControl, tags: list[str]) -> None:
    engine.post("/resume_memory_occupation", {"tags": tags})
