"""The OpenAI-shaped endpoints, as far as a rollout needs them: models, completions, chat completions."""

from dataclasses import replace
from typing import Any

from aiohttp import web

from colloid.engines.contract_fields import BadRequest
from colloid.engines.contract_generate import GenerateInput
from colloid.engines.contract_openai import ChatRequest, CompletionRequest, OpenAIRequest
from colloid.engines.embedded.openai_choices import ChatChoices, Choices, CompletionChoices
from colloid.engines.embedded.server import (
    EngineServer,
    Generation,
    Snapshot,
    error_response,
    json_response,
    read_json,
    stream_events,
)


class OpenAIRoutes:
    def __init__(self, server: EngineServer):
        self.server = server

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{name:.+}", self.model)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat_completions)

    def _card(self) -> dict[str, Any]:
        info = self.server.info
        return {
            "id": info.served_model_name,
            "object": "model",
            "created": self.server.started,
            "owned_by": "colloid",
            "root": info.model_path,
            "max_model_len": info.context_length,
        }

    async def models(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: web.Request) -> web.Response:
        name, own = request.match_info["name"], self.server.info.served_model_name
        if name != own:
            return error_response(404, f"there is no model {name[:80]!r}; this engine serves {own!r}")
        return json_response(self._card())

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = CompletionRequest.from_json(await read_json(request))
        text = self.server.text
        if not text.available:
            raise BadRequest("the engine has no tokenizer: use /generate with input_ids")
        start = 0 if body.echo and body.logprobs else -1
        inputs = [
            GenerateInput(
                None if isinstance(prompt, str) else prompt,
                prompt if isinstance(prompt, str) else None,
                body.params,
                body.rid if body.rid is None or len(body.prompts) == 1 else f"{body.rid}_{row}",
                body.logprobs,
                start,
                body.num_top,
            )
            for row, prompt in enumerate(body.prompts)
        ]
        return await self._answer(request, inputs, body, CompletionChoices(text, body))

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        body = ChatRequest.from_json(await read_json(request))
        ids = await self.server.chat_ids(list(body.messages), body.variables)
        inputs = [GenerateInput(ids, None, body.params, body.rid, body.logprobs, -1, body.num_top)]
        return await self._answer(request, inputs, body, ChatChoices(self.server.text, body))

    async def _answer(
        self, request: web.Request, inputs: list[GenerateInput], body: OpenAIRequest, choices: Choices
    ) -> web.StreamResponse:
        inputs = [replace(each, return_logprob=body.logprobs) for each in inputs]
        generation = await self.server.start(inputs, body.stream)
        head = {
            "id": f"{choices.prefix}-{generation.sequences[0].rid}",
            "created": int(generation.started),
            "model": body.model or self.server.info.served_model_name,
        }

        def event(index: int, snapshot: Snapshot) -> dict[str, Any]:
            """Only what is new since the sample's last event."""
            chunk = choices.chunk(index, generation.sequences[index], snapshot.length, snapshot.finish_reason)
            usage = {"usage": self._usage(generation, len(inputs))} if body.continuous_usage else {}
            return {**head, "object": choices.chunk_kind, "choices": [chunk], **usage}

        def last() -> list[dict[str, Any]]:
            if not body.include_usage:
                return []
            usage = self._usage(generation, len(inputs))
            return [{**head, "object": choices.chunk_kind, "choices": [], "usage": usage}]

        try:
            if body.stream:
                return await stream_events(request, generation, event, last)
            await generation.finished()
        except BaseException:
            generation.cancel()
            raise
        all_choices = [choices.whole(i, sequence) for i, sequence in enumerate(generation.sequences)]
        usage = self._usage(generation, len(inputs))
        return json_response({**head, "object": choices.whole_kind, "choices": all_choices, "usage": usage})

    def _usage(self, generation: Generation, num_prompts: int) -> dict[str, Any]:
        """A prompt counts once, however many samples it has."""
        sequences = generation.sequences
        firsts = sequences[:: len(sequences) // num_prompts]
        prompt_tokens = sum(len(sequence.prompt_ids) for sequence in firsts)
        completion_tokens = sum(len(sequence.output_ids) for sequence in sequences)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(sequence.cached_tokens for sequence in firsts)},
        }
