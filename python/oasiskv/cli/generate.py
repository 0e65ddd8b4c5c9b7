"""Complete prompts, all of a call as one batch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oasiskv.cli.engine_options import add_engine_arguments, engine_config
from oasiskv.engine.sampling import SamplingParams
from oasiskv.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from oasiskv.engine.llm import GenerationResult

_FLOATS = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action=_Prompt, dest="prompts", metavar="TEXT", help="repeatable", default=argparse.SUPPRESS)
    parser.add_argument(
        "--prompt-file", action=_Prompt, dest="prompts", metavar="FILE", help="UTF-8; repeatable", default=argparse.SUPPRESS
    )
    parser.add_argument("--chat", action="store_true", help="send each prompt as a user's message through the chat template")
    parser.add_argument("--json", action="store_true", help="one object a line, in prompt order")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=128)
    sampling.add_argument("--min-tokens", type=int, default=0)
    for name, default in _FLOATS.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", type=float, default=default)
    sampling.add_argument("--top-k", type=int, default=0, help="0: off")
    sampling.add_argument("--seed", type=int, default=0)
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    sampling.add_argument("--ignore-eos", action="store_true")
    add_engine_arguments(parser)


class _Prompt(argparse.Action):
    """Keeps prompts and prompt files in the order in which they were given."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        namespace.prompts = [*getattr(namespace, "prompts", []), (option_string == "--prompt-file", values)]


def run(args: argparse.Namespace) -> int:
    """0; 1 when a request failed. Raises ConfigError, CheckpointError, RequestError."""
    from oasiskv.cli.ending import FAILED, OK, interruptible

    given = getattr(args, "prompts", [])
    if not given:
        raise ConfigError("no prompt: give --prompt or --prompt-file")
    params = _params(args)
    prompts = [read_prompt(Path(value)) if is_file else value for is_file, value in given]
    config = engine_config(args)
    from oasiskv.engine.llm import LLM

    interruptible()
    with LLM(config) as llm:
        if args.chat:
            prompts = [llm.tokenizer.apply_chat([{"role": "user", "content": p}]) for p in prompts]
        results = llm.generate(prompts, params)
    for result in results:
        print(_line(result, args.json, len(results) > 1), flush=True)
    return FAILED if any(r.finish_reason == "error" for r in results) else OK


def read_prompt(path: Path) -> str:
    """Raises ConfigError naming the file, and the offset of what is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"--prompt-file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompt-file {path}: not UTF-8 at byte {error.start}: convert it to UTF-8") from None


def _params(args: argparse.Namespace) -> SamplingParams:
    try:
        return SamplingParams(
            max_tokens=args.max_tokens, min_tokens=args.min_tokens, top_k=args.top_k, seed=args.seed, stop=tuple(args.stop),
            ignore_eos=args.ignore_eos, **{name: getattr(args, name) for name in _FLOATS},
        )  # fmt: skip
    except RequestError as error:
        field, _, rest = str(error).partition(" ")
        raise ConfigError(f"--{field.replace('_', '-')} {rest}") from None


def _line(result: GenerationResult, as_json: bool, many: bool) -> str:
    if as_json:
        body = {"text": result.text, "token_ids": result.token_ids, "finish_reason": result.finish_reason, "stats": result.stats}
        return json.dumps(body | ({"error": result.error} if result.finish_reason == "error" else {}))
    text = f"[error: {result.error}]" if result.finish_reason == "error" else result.text
    return text + ("\n" if many else "")
