"""litellm: a prompt that is too long has its own error, over chat and over Anthropic's API, streamed and not."""

import os
from typing import Any

import litellm

CHAT = {"model": f"openai/{os.environ['MODEL']}", "api_base": os.environ["OPENAI_BASE_URL"]}
MESSAGES = {"model": f"anthropic/{os.environ['MODEL']}", "api_base": os.environ["ANTHROPIC_BASE_URL"], "max_tokens": 500}


def too_long(target: Any, is_streamed: bool) -> None:
    try:
        list(litellm.completion(**target, messages=[{"role": "user", "content": "word " * 30_000}], stream=is_streamed))
    except litellm.ContextWindowExceededError:
        print("too long")


litellm.suppress_debug_info = True
for target in (CHAT, MESSAGES):
    for is_streamed in (False, True):
        too_long(target, is_streamed)
