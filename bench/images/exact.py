"""Compares the embedded engine with transformers, token for token, over random prompts with images.

    python bench/images/exact.py [--prompts 60] [--seed 1]

Tiny random models of each family, in float32 on a CPU, greedy. Prompts with 0 to 5 pictures of random sizes; some of them share their
first pictures. They run on engines with random budgets, pages and slots for features, so that prompts are cut through images, preempted,
computed in rounds and reused; some are cancelled and sent again, and some continue in the middle of their answer. Integrity is checked
after every step. Ends with an error if a token differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from image_engine import ImageEngine, chat, expected_tokens
from tiny_models import make_submit
from tiny_vision import KINDS, VARIANTS, Kind, VisionPrompt, vision_model

COUNT = 36
AT_ONCE = 6


def random_prompts(kind: Kind, variant: str, draw: random.Random) -> list[VisionPrompt]:
    """Those with the same seed share their first pictures and words."""
    made = []
    for _ in range(AT_ONCE):
        seed, pictures = draw.randrange(3), draw.randrange(6)
        sizes = random.Random(seed)
        made.append(chat(kind, [(sizes.randint(20, 200), sizes.randint(20, 200)) for _ in range(5)][:pictures], variant, 10 * seed))
    return made


def run_some(kind: Kind, variant: str, draw: random.Random) -> tuple[int, int]:
    """Returns how many prompts were run, and how often one was preempted."""
    prompts = random_prompts(kind, variant, draw)
    expected = expected_tokens(prompts, kind, COUNT, variant)
    longest = max(len(prompt.token_ids) for prompt in prompts) + COUNT
    rig = ImageEngine(
        vision_model(kind, variant),
        slots=draw.choice([24, 40, 200]),
        kv_pages=-(-longest // 16) + draw.choice([3, 20, 400]),
        token_budget=draw.choice([17, 40, 512]),
    )
    requests = []
    for number, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
        offset = draw.choice([0, 0, 1, 5])
        rig.knows(prompt)
        request = make_submit(number, (*prompt.token_ids, *tokens[:offset]), COUNT, offset=offset, images=prompt.spans)
        rig.engine.submit(request)
        for _ in range(draw.randrange(4)):
            rig.step()
        if draw.random() < 0.2:
            rig.engine.cancel(request.id)
            request = make_submit(number + AT_ONCE, request.token_ids, COUNT, offset=offset, images=prompt.spans)
            rig.engine.submit(request)
        requests.append(request)
    rig.run()
    for request, tokens in zip(requests, expected, strict=True):
        found = rig.collected.tokens.get(request.id), rig.collected.terminals.get(request.id)
        if found[0] != tokens[request.offset :]:
            raise SystemExit(f"{kind} {variant}: expected {tokens[request.offset :]}, found {found}")
    preemptions = rig.engine.stats().preemptions
    rig.close()
    return len(requests), preemptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=60, help="of each model")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for kind in KINDS:
        for variant in VARIANTS:
            draw, began = random.Random(f"{kind} {variant} {arguments.seed}"), time.monotonic()
            prompts = preemptions = 0
            while prompts < arguments.prompts:
                more = run_some(kind, variant, draw)
                prompts, preemptions = prompts + more[0], preemptions + more[1]
            seconds = time.monotonic() - began
            print(f"{kind} {variant or 'usual'}: {prompts} prompts exact, {preemptions} preemptions, {seconds:.0f} s")


if __name__ == "__main__":
    main()
