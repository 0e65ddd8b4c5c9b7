"""`oasiskv generate`: all prompts of one call run as one batch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from oasiskv.cli.options import add_engine_options, engine_config
from oasiskv.errors import RequestError


class _AddPrompt(argparse.Action):
    """Keeps --prompt and --prompt-file in the order given."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        namespace.prompts = [*(namespace.prompts or []), (option, values)]


def add_parser(commands: Any) -> None:
    p = commands.add_parser("generate", help="answer prompts", description=__doc__)
    add_engine_options(p)
    none: Any = argparse.SUPPRESS
    p.add_argument("--prompt", action=_AddPrompt, dest="prompts", metavar="TEXT", help="raw text; may be given several times")
    p.add_argument("--prompt-file", action=_AddPrompt, dest="prompts", metavar="FILE", help="UTF-8 text; may be given several times")
    p.add_argument("--chat", action="store_true", help="wrap each prompt in the model's chat template")
    p.add_argument("--json", action="store_true", help="one JSON object a line, in prompt order")
    p.add_argument("--max-tokens", type=int, default=128)
    for flag, kind in (("temperature", float), ("top-k", int), ("top-p", float), ("min-p", float), ("seed", int), ("min-tokens", int),
                       ("repetition-penalty", float), ("presence-penalty", float), ("frequency-penalty", float)):
        p.add_argument(f"--{flag}", type=kind, default=none)
    p.add_argument("--stop", action="append", default=none, metavar="TEXT", help="stop string; may be given several times")
    p.add_argument("--ignore-eos", action="store_true", default=none)
    p.set_defaults(run=run)


_SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "min_tokens", "repetition_penalty", "presence_penalty",
             "frequency_penalty", "stop", "ignore_eos")


def read_prompt(option: str, value: str) -> str:
    """Raises RequestError naming the file and what is wrong with it."""
    if option == "--prompt":
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"--prompt is not valid UTF-8 at character {error.start}") from None
        return value
    try:
        return Path(value).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"--prompt-file {value}: not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise RequestError(f"--prompt-file {value}: {error.strerror}") from None


def run(args: argparse.Namespace) -> int:
    from oasiskv.engine.sampling import SamplingParams

    if not args.prompts:
        raise RequestError("no prompt: give --prompt TEXT or --prompt-file FILE")
    params = SamplingParams(**{f: getattr(args, f) for f in _SAMPLING if hasattr(args, f)})
    config = engine_config(args)
    texts = [read_prompt(option, value) for option, value in args.prompts]

    from oasiskv.engine.llm import LLM

    with LLM(config) as llm:
        if args.chat:
            texts = [llm.tokenizer.apply_chat([{"role": "user", "content": t}]) for t in texts]
        results = llm.generate(texts, params)
    for r in results:
        if args.json:
            record = {"text": r.text, "token_ids": r.token_ids, "finish_reason": r.finish_reason, "stats": r.stats}
            print(json.dumps(record | ({"error": r.error} if r.error else {})), flush=True)
        else:
            print(r.text if r.error is None else f"error: {r.error}", flush=True)
    return 1 if any(r.error for r in results) else 0
