"""`python -m colloid.engines.embedded`: loads a model and serves it until SIGTERM."""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path

from aiohttp import web

from colloid.engines.embedded.engine import Engine
from colloid.engines.embedded.invariance import required_rows
from colloid.engines.embedded.kernels import bound_kernel_caches
from colloid.engines.embedded.memory import cache_tokens, keep_freed_memory
from colloid.engines.embedded.model import Model
from colloid.engines.embedded.model_config import load_model_config
from colloid.engines.embedded.openai import OpenAIRoutes
from colloid.engines.embedded.routes import ControlRoutes
from colloid.engines.embedded.server import EngineServer, ServerInfo
from colloid.engines.embedded.shared_memory import DTYPES
from colloid.engines.embedded.text import Text
from colloid.engines.embedded.weights import WeightStore, load_weights
from colloid.engines.embedded.worker import Worker
from colloid.errors import ColloidError, ConfigError

logger = logging.getLogger("colloid.engines.embedded")
API_KEY_VARIABLE = "COLLOID_API_KEY"
DEFAULT_MEM_FRACTION = 0.3
DEFAULT_MAX_RUNNING = 64


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m colloid.engines.embedded", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model-path", required=True, help="directory of a Hugging Face model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: the kernel chooses one")
    parser.add_argument("--ready-file", help="written as JSON (url, pid) once the engine serves")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--context-length", type=int, help="default: what the model's config says")
    parser.add_argument("--max-running-requests", type=int, default=DEFAULT_MAX_RUNNING)
    parser.add_argument("--max-total-tokens", type=int, help="limit of the key-value cache; default: from the memory")
    parser.add_argument("--mem-fraction-static", type=float, default=DEFAULT_MEM_FRACTION, help="share of free memory")
    parser.add_argument("--random-seed", type=int, default=0, help="for requests without a sampling_seed")
    parser.add_argument("--served-model-name")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    parser.add_argument("--enable-deterministic-inference", action="store_true", help="check this machine's kernels")
    parser.add_argument("--enable-fp32-lm-head", action="store_true", help="logits in float32 in a bfloat16 model")
    parser.add_argument("--enable-return-routed-experts", action="store_true", help="answer return_routed_experts")
    parser.add_argument("--weights-dir", help=f"where weights may be read from later; several with {os.pathsep!r}")
    parser.add_argument("--skip-tokenizer-init", action="store_true", help="token ids only")
    args = parser.parse_args(argv)
    for name, low, high in (
        ("port", 0, 65535),
        ("context_length", 1, None),
        ("max_running_requests", 1, None),
        ("max_total_tokens", 1, None),
    ):
        value = getattr(args, name)
        if value is not None and (value < low or (high is not None and value > high)):
            parser.error(f"--{name.replace('_', '-')} must be from {low} to {high or '...'}, got {value}")
    if not 0 < args.mem_fraction_static < 1:
        parser.error(f"--mem-fraction-static must be between 0 and 1, got {args.mem_fraction_static}")
    return args


def build(args: argparse.Namespace) -> tuple[Engine, WeightStore, ServerInfo]:
    """Loads the model and sizes its cache. Raises ConfigError."""
    config, dtype = load_model_config(args.model_path), DTYPES[args.dtype]
    context_length = args.context_length or config.max_position_embeddings
    if context_length > config.max_position_embeddings:
        raise ConfigError(
            f"--context-length {context_length} is more than the model's {config.max_position_embeddings} positions"
        )
    model = Model(config, dtype, context_length, args.enable_fp32_lm_head)
    store = WeightStore(model)
    load_weights(store, args.model_path)
    tokens = args.max_total_tokens or cache_tokens(
        config, dtype, args.mem_fraction_static, limit=args.max_running_requests * context_length
    )
    rows = required_rows(model) if args.enable_deterministic_inference else {}
    engine = Engine(
        model,
        Text(args.model_path, config.eos_token_ids, skip=args.skip_tokenizer_init),
        capacity_tokens=tokens,
        context_length=context_length,
        max_running=args.max_running_requests,
        random_seed=args.random_seed,
        record_experts=args.enable_return_routed_experts,
        **rows,
    )
    info = ServerInfo(
        model_path=str(args.model_path),
        served_model_name=args.served_model_name or str(args.model_path),
        model_type=config.model_type,
        dtype=args.dtype,
        context_length=context_length,
        max_total_num_tokens=engine.capacity_tokens,
        max_running_requests=args.max_running_requests,
        vocab_size=config.vocab_size,
        deterministic=args.enable_deterministic_inference,
        weights_dirs=tuple(Path(place) for place in (args.weights_dir or "").split(os.pathsep) if place),
    )
    return engine, store, info


async def serve(args: argparse.Namespace, engine: Engine, store: WeightStore, info: ServerInfo) -> int:
    """Serves until SIGTERM or SIGINT (0), or until a generation step fails (1)."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    worker = Worker(engine, on_failure=lambda error: stopping.set())
    server = EngineServer(worker, engine.text, store, info, os.environ.get(API_KEY_VARIABLE))
    app = server.app()
    ControlRoutes(server).add_to(app)
    OpenAIRoutes(server).add_to(app)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, args.host, args.port)
    await site.start()
    worker.start()
    port = runner.addresses[0][1]
    host = f"[{args.host}]" if ":" in args.host else args.host
    url = f"http://{host}:{port}"
    if args.ready_file:
        write_ready_file(Path(args.ready_file), url)
    logger.info("serving %s at %s, %d tokens of key-value cache", info.model_path, url, info.max_total_num_tokens)
    await stopping.wait()
    failed = not worker.is_alive
    worker.stop()
    await runner.cleanup()
    return 1 if failed else 0


def write_ready_file(path: Path, url: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    os.replace(temporary, path)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    keep_freed_memory()
    bound_kernel_caches()
    try:
        engine, store, info = build(args)
        return asyncio.run(serve(args, engine, store, info))
    except (ColloidError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
