"""A request between the event loop and the compute thread: what changes in one while the other is under way."""

import asyncio
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from aiohttp import web

from colloid.engines.contract_generate import GenerateInput, SamplingParams
from colloid.engines.contract_memory import MemoryTags
from colloid.engines.contract_openai import ChatRequest
from colloid.engines.embedded.answers import AnswerWriter
from colloid.engines.embedded.openai_choices import ChatChoices
from colloid.engines.embedded.request import FinishReason
from colloid.engines.embedded.server import EngineServer, ServerInfo
from colloid.engines.embedded.text import Text
from colloid.engines.embedded.worker import Worker
from tests.engine.models import add, make_engine

pytestmark = pytest.mark.timeout(60)
SECONDS = 20


class SlowText(Text):
    """A tokenizer that is loaded once `may_load` is set."""

    def __init__(self, model_path):
        super().__init__(model_path, ())
        self.available, self.loads, self.may_load = True, threading.Event(), threading.Event()

    @property
    def tokenizer(self):
        self.loads.set()
        assert self.may_load.wait(SECONDS)
        return None


@pytest.fixture
def parts(model_paths):
    return make_engine(model_paths["llama-gqa-tied"], tokens=4096, context_length=2048, max_running=8)


@asynccontextmanager
async def serving(parts, text: Text | None = None):
    worker = Worker(parts.engine, on_failure=lambda error: None)
    info = ServerInfo("model", "model", "llama", "float32", 2048, 4096, 8, 1003, False)
    worker.start()
    try:
        yield EngineServer(worker, text or parts.engine.text, parts.store, info)
        assert worker.is_alive, "a step failed"
    finally:
        worker.stop()


def asking(server: EngineServer) -> asyncio.Task:
    params = SamplingParams(max_new_tokens=1500, ignore_eos=True)
    return asyncio.create_task(server.start([GenerateInput((5, 6, 7), None, params, None, False)], stream=False))


@pytest.mark.parametrize(
    ("tag", "resumes", "words"),
    [("kv_cache", False, "key-value cache is released"), ("weights", True, "not completed")],
)
def test_a_request_whose_prompt_is_tokenised_while_memory_is_released_is_refused(parts, tag, resumes, words):
    text, tags = SlowText("model"), MemoryTags((tag,))

    async def release_meanwhile():
        async with serving(parts, text) as server:
            start = asking(server)
            assert await asyncio.to_thread(text.loads.wait, SECONDS)
            await server.worker.call(server.memory.release, tags)
            if resumes:  # the weights are still gone
                await server.worker.call(server.memory.resume, tags)
            text.may_load.set()
            with pytest.raises(web.HTTPServiceUnavailable) as refused:
                await start
            assert words in refused.value.text
            assert await server.worker.call(parts.engine.scheduler.in_engine) == []

    asyncio.run(release_meanwhile())


def test_a_client_that_goes_away_before_its_samples_are_queued_takes_them_with_it(parts):
    busy, may_go_on = threading.Event(), threading.Event()

    def step():
        busy.set()
        assert may_go_on.wait(SECONDS)

    async def go_away():
        async with serving(parts) as server:
            step_under_way = asyncio.create_task(server.worker.call(step))
            assert await asyncio.to_thread(busy.wait, SECONDS)
            start = asking(server)
            while not server.worker._inbox.qsize():
                await asyncio.sleep(0.001)
            start.cancel()
            with pytest.raises(asyncio.CancelledError):
                await start
            may_go_on.set()
            await step_under_way
            assert await server.worker.call(parts.engine.scheduler.in_engine) == []

    asyncio.run(go_away())


def test_what_is_told_of_a_sample_that_has_ended_since_is_not_cut_as_its_end_will_be(parts):
    text = Text("model", ())
    text.available = True
    text._tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(chr(97 + token) for token in ids))
    (sequence,) = add(parts.engine, "mine", (5, 6), max_new_tokens=4)
    for token in (1, 2, 3):
        sequence.append(token, -1.0, "0")
    ending = sequence.finish_reason = FinishReason("stop", matched=3)
    writer = AnswerWriter(text, lambda: "0", False, 0.0)
    assert writer.answer(sequence, 2, None, False)["text"] == "bc"
    assert writer.answer(sequence, 3, ending, False)["text"] == "bc"
    choices = ChatChoices(text, ChatRequest.from_json({"messages": [{"role": "user", "content": "a"}]}))
    chunks = [choices.chunk(0, sequence, length, reason) for length, reason in ((1, None), (2, None), (3, ending))]
    assert [chunk["delta"]["content"] for chunk in chunks] == ["b", "c", ""]
    assert choices.whole(0, sequence)["message"]["content"] == "bc"
