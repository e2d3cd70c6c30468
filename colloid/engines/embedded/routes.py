"""Everything but generation: health and facts, pausing and aborting, weights, metrics."""

import asyncio
import time
from typing import Any

from aiohttp import web

from colloid.engines.contract import AbortRequest, PauseRequest, WeightUpdateBucket, WeightUpdateEnd, WeightUpdateStart
from colloid.engines.contract_fields import BadRequest
from colloid.engines.contract_generate import GenerateInput, SamplingParams
from colloid.engines.contract_memory import MemoryTags
from colloid.engines.contract_weights import BroadcastBucket, DiskUpdate, GroupStart, group_name
from colloid.engines.embedded.server import (
    HEALTH_GENERATE_SECONDS,
    EngineServer,
    error_response,
    json_response,
    read_json,
)


class ControlRoutes:
    """One method an endpoint; state changes run in the compute thread."""

    def __init__(self, server: EngineServer):
        self.server, self.worker, self.engine = server, server.worker, server.worker.engine

    def add_to(self, app: web.Application) -> None:
        either = ("GET", "POST")
        for methods, paths, handler in (
            (("GET",), ("/health",), self.health),
            (("GET",), ("/health_generate",), self.health_generate),
            (("GET",), ("/model_info", "/get_model_info"), self.model_info),
            (("GET",), ("/server_info", "/get_server_info"), self.server_info),
            (("GET",), ("/weight_version", "/get_weight_version"), self.weight_version),
            (("GET",), ("/metrics",), self.metrics),
            (either, ("/flush_cache",), self.flush_cache),
            (("POST",), ("/abort_request",), self.abort_request),
            (("POST",), ("/pause_generation",), self.pause_generation),
            (("POST",), ("/continue_generation",), self.continue_generation),
            (("POST",), ("/release_memory_occupation",), self.release_memory_occupation),
            (("POST",), ("/resume_memory_occupation",), self.resume_memory_occupation),
            (("POST",), ("/begin_weight_update",), self.begin_weight_update),
            (("POST",), ("/update_weights_from_tensor",), self.update_weights_from_tensor),
            (("POST",), ("/update_weights_from_disk",), self.update_weights_from_disk),
            (("POST",), ("/update_weights_from_distributed",), self.update_weights_from_distributed),
            (("POST",), ("/init_weights_update_group",), self.init_weights_update_group),
            (("POST",), ("/destroy_weights_update_group",), self.destroy_weights_update_group),
            (("POST",), ("/end_weight_update",), self.end_weight_update),
            (either, ("/weights_checker",), self.weights_checker),
        ):
            for method in methods:
                for path in paths:
                    app.router.add_route(method, path, handler)

    # ---- health and facts

    async def health(self, request: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def health_generate(self, request: web.Request) -> web.Response:
        """Generates one token; an engine that is paused, or whose memory is released, only says that it lives."""
        if self.worker.is_paused:
            return json_response({"status": "ok", "paused": True})
        if self.server.memory.released:
            return json_response({"status": "ok", "released": self.server.memory.released})
        params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        generation = await self.server.start([GenerateInput((0,), None, params, None, False)], stream=False)
        try:
            await asyncio.wait_for(generation.finished(), HEALTH_GENERATE_SECONDS)
        except asyncio.TimeoutError:
            generation.cancel()
            return error_response(503, f"no token came within {HEALTH_GENERATE_SECONDS} s")
        return json_response({"status": "ok"})

    async def model_info(self, request: web.Request) -> web.Response:
        info = self.server.info
        return json_response(
            {
                "model_path": info.model_path,
                "tokenizer_path": info.model_path,
                "served_model_name": info.served_model_name,
                "is_generation": True,
                "model_type": info.model_type,
                "vocab_size": info.vocab_size,
                "max_context_length": info.context_length,
                "weight_version": self.engine.weight_version,
                "has_image_understanding": False,
                "has_audio_understanding": False,
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        info = self.server.info
        return json_response(
            {
                "model_path": info.model_path,
                "tokenizer_path": info.model_path,
                "served_model_name": info.served_model_name,
                "engine": "embedded",
                "device": "cpu",
                "dtype": info.dtype,
                "context_length": info.context_length,
                "max_total_num_tokens": info.max_total_num_tokens,
                "max_running_requests": info.max_running_requests,
                "enable_deterministic_inference": info.deterministic,
                "weights_dirs": [str(place) for place in info.weights_dirs],
                "tp_size": 1,
                "dp_size": 1,
                "weight_version": self.engine.weight_version,
                "is_paused": self.worker.is_paused,
                "released": self.server.memory.released,
                "weights_complete": self.server.updates.weights_complete,
                "internal_states": [self._load()],
            }
        )

    async def weight_version(self, request: web.Request) -> web.Response:
        return json_response({"weight_version": self.engine.weight_version})

    async def metrics(self, request: web.Request) -> web.Response:
        text = self.engine.metrics.text(self._load(), self.server.info.served_model_name)
        return web.Response(text=text, content_type="text/plain")

    def _load(self) -> dict[str, Any]:
        """Read from the event loop without stopping the compute thread: counts may be one step old."""
        scheduler = self.engine.scheduler
        used = scheduler.pages.num_used * scheduler.page_size
        return {
            "num_running_reqs": scheduler.num_running,
            "num_queued_reqs": len(scheduler.waiting),
            "num_used_tokens": used,
            "token_usage": used / self.engine.capacity_tokens,
            "generation_tokens_total": self.engine.tokens_generated,
            "prompt_tokens_total": self.engine.prompt_tokens_computed,
            "realtime_tokens_total": self.engine.tokens_generated + self.engine.prompt_tokens_computed,
        }

    # ---- requests under way

    async def flush_cache(self, request: web.Request) -> web.Response:
        await self.worker.call(self.engine.forget_prefixes)
        return json_response({"success": True, "message": "no later request shares what is in the cache now"})

    async def abort_request(self, request: web.Request) -> web.Response:
        """Answers when the samples are out of the batch; their own requests are answered with finish_reason abort."""
        body = AbortRequest.from_json(await read_json(request))
        count = await self.worker.call(self.engine.abort, None if body.abort_all else body.rid)
        return json_response({"success": True, "num_aborted": count})

    async def pause_generation(self, request: web.Request) -> web.Response:
        """Answers when the step under way has ended. Requests that come later wait for /continue_generation."""
        mode = PauseRequest.from_json(await read_json(request)).mode

        def pause() -> None:
            self.worker.is_paused = True
            if mode == "retract":
                self.engine.retract()
            elif mode == "abort":
                self.engine.abort(None, "generation was paused with mode abort")

        await self.worker.call(pause)
        return json_response({"status": "ok", "message": f"generation is paused ({mode})"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        def proceed() -> None:
            self.server.updates.check_can_continue()
            self.worker.is_paused = False

        await self.worker.call(proceed)
        return json_response({"status": "ok", "message": "generation continues"})

    # ---- memory

    async def release_memory_occupation(self, request: web.Request) -> web.Response:
        """Answers when the memory is given back."""
        body, memory = MemoryTags.from_json(await read_json(request)), self.server.memory
        await self.worker.call(memory.release, body)
        return json_response({"success": True, "released": memory.released})

    async def resume_memory_occupation(self, request: web.Request) -> web.Response:
        body, memory = MemoryTags.from_json(await read_json(request)), self.server.memory
        await self.worker.call(memory.resume, body)
        return json_response({"success": True, "released": memory.released})

    # ---- weights

    async def begin_weight_update(self, request: web.Request) -> web.Response:
        start = WeightUpdateStart.from_json(await read_json(request))
        updates = self.server.updates
        await self.worker.call(lambda: updates.begin(start, self.worker.is_paused))
        return json_response({"success": True, "message": f"send the tensors of version {start.weight_version}"})

    async def update_weights_from_tensor(self, request: web.Request) -> web.Response:
        bucket = WeightUpdateBucket.from_json(await read_json(request))
        started = time.perf_counter()
        await self.worker.call(self.server.updates.receive, bucket)
        seconds = time.perf_counter() - started
        return json_response({"success": True, "num_tensors": len(bucket.tensors), "seconds": seconds})

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        """`success` is false where parts of a delta are to be sent again."""
        update, updates = DiskUpdate.from_json(await read_json(request)), self.server.updates
        return json_response(await self.worker.call(lambda: updates.read(update, self.worker.is_paused)))

    async def update_weights_from_distributed(self, request: web.Request) -> web.Response:
        bucket = BroadcastBucket.from_json(await read_json(request))
        await self.worker.call(self.server.updates.receive_broadcast, bucket)
        return json_response({"success": True, "message": f"{len(bucket.tensors)} tensors"})

    async def init_weights_update_group(self, request: web.Request) -> web.Response:
        start = GroupStart.from_json(await read_json(request))
        await self.worker.call(self.server.updates.groups.join, start)
        return json_response({"success": True, "message": f"rank {start.rank} of {start.size} in {start.name}"})

    async def destroy_weights_update_group(self, request: web.Request) -> web.Response:
        name = group_name(await read_json(request))
        await self.worker.call(self.server.updates.groups.leave, name)
        return json_response({"success": True, "message": f"left {name}"})

    async def end_weight_update(self, request: web.Request) -> web.Response:
        end = WeightUpdateEnd.from_json(await read_json(request))
        await self.worker.call(self.server.updates.end, end)
        return json_response({"success": True, "weight_version": end.weight_version})

    async def weights_checker(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        action = body.get("action", "checksum") if isinstance(body, dict) else None
        if action != "checksum":
            raise BadRequest('the action must be "checksum"')

        def checksums() -> dict[str, Any]:
            if not self.server.updates.weights_complete:
                raise BadRequest("a weight update was not completed: the weights are a mixture")
            return {"weight_version": self.engine.weight_version, "checksums": self.server.store.checksums()}

        return json_response(await self.worker.call(checksums))
