"""A turn on its way to the workers: the names of its blocks."""

from __future__ import annotations

from functools import partial
from itertools import chain

from front_end import Turns
from penstock.api.models import Models
from penstock.cluster.pool import WorkerPool
from penstock.cluster.sessions.sessions import Sessions
from penstock.cluster.sessions.turn import Turn
from penstock.fairness import LoopTurns
from penstock.kv.blocks import PIECE_BLOCKS, ROOT, block_hash_pieces, block_hashes
from penstock.router.affinity import MemoryStore
from penstock.router.policy import Hints

PROMPT = tuple(range(100_000))


async def test_the_blocks_of_a_long_prompt_are_named_in_pieces() -> None:
    turn = Turn(Sessions(MemoryStore(), WorkerPool([], "test", "", Models().prepare), quota=0), "", Hints())
    blocks = len(PROMPT) // 16
    async with Turns() as turns:
        await turn.name_blocks([PROMPT], 16, ROOT, partial(LoopTurns().take, "", 1))
        assert turns.count >= blocks // PIECE_BLOCKS
    names = turn.block_names(PROMPT, 16, ROOT)
    assert names == block_hashes(PROMPT, 16)
    assert turn.block_names(PROMPT, 16, ROOT) is names, "the router finds them done"
    assert len(turn.block_names(PROMPT, 32, ROOT)) == blocks // 2


def test_no_piece_is_long() -> None:
    pieces = list(block_hash_pieces(PROMPT[:-1], 16, b"root"))
    assert {len(piece) for piece in pieces[:-1]} == {PIECE_BLOCKS}
    assert list(chain.from_iterable(pieces)) == block_hashes(PROMPT[:-1], 16, b"root")
    assert len(block_hashes(PROMPT[:-1], 16)) == len(PROMPT) // 16 - 1
    assert block_hashes((), 16) == []
