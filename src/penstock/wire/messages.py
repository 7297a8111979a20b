"""The messages between the parts. Plain data, no behaviour.

New fields go last and have defaults, so that a newer peer can talk to an older one.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from penstock.wire.images import ImageRules, ImageSpan

PROTOCOL_VERSION = 6
GENERATION_ID_BYTES = 16
DEFAULT_SESSION_SECONDS = 300.0
MAX_TOKENIZER_BYTES = 64 * 2**20
TOKENIZER_PIECE_BYTES = 128 * 1024
"""Small enough that tokens behind it do not wait: 10 ms at 100 Mbit/s."""

FinishReason = Literal["stop", "length", "cancelled"]


class TokenLogprob(Struct, frozen=True, array_like=True, gc=False):
    """The log probability of one token, and of the likeliest alternatives as (token id, logprob)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


SessionState = Literal["open", "over_quota", "unknown"]
Tier = Literal["device", "host", "disk"]
"""Where a worker keeps KV, the fastest first."""


class Mark(Struct, frozen=True, array_like=True, gc=False):
    """The first `tokens` tokens of a prompt are kept for `seconds` after the last use, in preference to other KV."""

    tokens: int
    seconds: float


class PromptReport(Struct, frozen=True, array_like=True, gc=False):
    """What the worker reports about a prompt: how many tokens were cached, the logprobs if asked for, and whether its session has a
    lease.

    The logprobs are those of `codec.pack_logprobs`: there may be hundreds of thousands, and a reader unpacks them piece by piece.
    `retained` has what each mark of the request leases now, in whole blocks. `written` has, for each mark, the tokens that were computed
    for this request and not counted for an earlier mark. `tier` is where the leased KV is; None: nothing is leased, or it is unknown.
    """

    cached_tokens: int
    logprobs: tuple[bytes, ...] | None = None
    session: SessionState | None = None
    retained: tuple[Mark, ...] = ()
    written: tuple[int, ...] = ()
    tier: Tier | None = None


class Delta(Struct, frozen=True, array_like=True, gc=False):
    """A disjoint segment of one generation.

    `offset` counts the tokens before it. Only the first delta has `prompt`. Every field has a rule in `stream.slot.MERGE_RULES`.
    All values are immutable, so a delta can be shared, kept and merged.
    `gc=False`, here and below, is safe because such data cannot form a cycle.
    """

    offset: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt: PromptReport | None = None


class Finish(Struct, frozen=True, tag="finish", gc=False):
    """The generation ended normally."""

    reason: FinishReason


class Fault(Struct, frozen=True, tag="fault", omit_defaults=True, gc=False):
    """The generation failed. `retryable`: another worker could continue it from the next offset."""

    code: str
    message: str
    retryable: bool = False


Terminal = Finish | Fault


class Segment(Struct, frozen=True, array_like=True, gc=False):
    """One generation in a step: its new tokens, and its terminal if it ended."""

    id: bytes
    delta: Delta | None = None
    terminal: Terminal | None = None


class BlocksStored(Struct, frozen=True, tag="stored", omit_defaults=True, gc=False):
    """KV blocks that can be reused now. They form a chain; the first one follows `parent`."""

    parent: bytes
    blocks: tuple[bytes, ...]
    tier: Tier = "device"


class BlocksRemoved(Struct, frozen=True, tag="removed", omit_defaults=True, gc=False):
    """KV blocks that are gone from this tier. They may still be in another one."""

    blocks: tuple[bytes, ...]
    tier: Tier = "device"


class BlocksCleared(Struct, frozen=True, tag="cleared", gc=False):
    """All KV blocks are gone."""


KvEvent = BlocksStored | BlocksRemoved | BlocksCleared


class KvEvents(Struct, frozen=True, array_like=True, gc=False):
    """Changes of a worker's cached KV, in order. Events are numbered without a gap; `first` is the number of the first one here."""

    first: int
    events: tuple[KvEvent, ...]


class WorkerStats(Struct, frozen=True, array_like=True):
    """What a worker holds at the moment of sending. The fields from `kv_blocks_evicted` to `sessions_evicted` count from its start.

    Rates are measured, 0 until they are: prompt tokens computed per second while nothing else runs, and bytes pulled per second from
    other workers, or loaded from its own host memory and disk. `tokens_to_compute` are those of prompts that run or wait.
    `kv_tier_events` counts blocks since its start, by tier and by what happened to them, such as `host loaded`: see `kv.tiers`.
    `images_encoded` counts images that its tower encoded since its start, `images_reused` images found among the features that it keeps.
    """

    running: int = 0
    queued: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_total: int = 0
    kv_blocks_leased: int = 0
    sessions: int = 0
    kv_blocks_evicted: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    memory_failures: int = 0
    sessions_evicted: int = 0
    other_front_ends: int = 0
    prefill_rate: float = 0.0
    pull_rate: float = 0.0
    tokens_to_compute: int = 0
    exports: int = 0
    imports: int = 0
    kv_host_blocks: int = 0
    kv_host_total: int = 0
    kv_disk_blocks: int = 0
    kv_disk_total: int = 0
    host_rate: float = 0.0
    disk_rate: float = 0.0
    kv_tier_events: dict[str, int] = {}
    images_encoded: int = 0
    images_reused: int = 0
    image_positions_to_encode: int = 0


Role = Literal["aggregated", "prefill", "decode", "encode"]
KvHandover = Literal["blocks", "ticket", "meeting"]
"""How KV gets to another worker.

`blocks`: the target pulls it by the names of blocks, also while the source computes. `ticket`: an external engine pulls it with the ticket
that the source's engine gave after it computed the prompt. `meeting`: two external engines work on the same prompt at the same time; both
get the id of the transfer, and the target also gets the address of the source.
"""
Capability = Literal["kv_events", "sessions", "logprobs", "prompt_logprobs", "grammar", "isolation"]


class ModelInfo(Struct, frozen=True):
    """What a front end must know about a worker's model and how the worker serves it.

    `tokenizer` is `words` for the built-in tokenizer, else the fingerprint of the tokenizer's files. The front end looks for these on
    its own machine, else fetches them with TokenizerRequest. `max_batch` is how many generations the worker computes at once; 0: unknown.
    `tool_parser` and `reasoning_parser` name the formats of tool calls and reasoning; None: no known format. A worker with the capability
    `isolation` shares no KV between roots. Workers with the same `kv_fingerprint` can use each other's KV, which is pulled from
    `kv_address`; a block has `kv_block_bytes`. Without a fingerprint, KV does not move. `kv_handover` says how KV moves. `images`: how
    the model wants its images; None: it reads only text. Workers with the same `image_fingerprint` compute the same features of an image.
    A worker with the role `encode` computes only features; other workers pull them from its `kv_address`.
    """

    name: str
    engine: str
    tokenizer: str
    vocab_size: int
    context_length: int
    block_size: int
    created: int = 0
    max_batch: int = 0
    roles: tuple[Role, ...] = ("aggregated",)
    capabilities: tuple[Capability, ...] = ()
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    kv_fingerprint: bytes = b""
    kv_address: str = ""
    kv_block_bytes: int = 0
    kv_handover: KvHandover = "blocks"
    images: ImageRules | None = None
    image_fingerprint: bytes = b""


class Sampling(Struct, frozen=True, omit_defaults=True):
    """How to choose the next token. The simulator ignores it: its tokens follow from the seed."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]


class Grammar(Struct, frozen=True, gc=False):
    """What the generated text must match. `source` is the schema or the list of choices as JSON, the regex, or the grammar itself."""

    kind: GrammarKind
    source: str = ""


SessionAction = Literal["open", "continue", "close"]


class SessionTurn(Struct, frozen=True, omit_defaults=True, gc=False):
    """The session of a generation. `id` is the session's key in the store. A later incarnation of the same id has a greater `epoch`."""

    id: str
    action: SessionAction = "continue"
    timeout: float = DEFAULT_SESSION_SECONDS
    epoch: int = 0


TRANSFER_ID_BYTES = 16


class KvSource(Struct, frozen=True, omit_defaults=True, gc=False):
    """Where a worker pulls blocks that it lacks: from another worker, under the id of this transfer.

    `waits`: the source computes them at this moment, under a Submit with an Export of the same id. `ticket` is what an engine of others
    needs to find them. The source has the first `blocks` of them; 0: it will have all.
    """

    transfer: bytes
    address: str
    waits: bool = False
    ticket: bytes = b""
    blocks: int = 0


class Export(Struct, frozen=True, gc=False):
    """On a Submit: another worker pulls its blocks, while they are computed and for `lease_seconds` after its end."""

    transfer: bytes
    lease_seconds: float


class Submit(Struct, frozen=True, tag="submit", omit_defaults=True):
    """Front end to worker: begin a generation.

    `offset` is the position of the first token to make. It is above zero for a generation that continues on another worker: then the
    last `offset` ids of `token_ids` were generated before. Each of `stop_ids` ends the generation, like the model's own end
    token. For `retention_seconds` after the end, other KV is evicted before its KV. Each of `marks` does the same for the start of the
    prompt, for its own seconds; marks are sorted, the longest time first. A higher `priority` also keeps KV longer.
    `is_seed_drawn`: no client asked for this `seed`, so an engine may use its own randomness. KV is shared only with generations of
    the same `root`; all tenants share the empty one. Waiting generations are served in turn by `lane`, in proportion to `weight`;
    without tenants the lane is "". `prompt` names a prompt that several generations share: on a link it travels once, as a Prompt, and
    `token_ids` then has only the last `offset` ids. `export`: another worker pulls its blocks. `source`: where missing blocks are pulled
    from; the generation begins when the pull has ended or failed. `images` are those of the prompt, in order. A worker with the role
    `encode` gets one image and an `export`: it computes the features and makes no token.
    """

    id: bytes
    token_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    min_tokens: int = 0
    ignore_eos: bool = False
    offset: int = 0
    logprobs: int | None = None
    prompt_logprobs: bool = False
    sampling: Sampling = Sampling()
    stop_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    session: SessionTurn | None = None
    retention_seconds: float = 0.0
    priority: int = 0
    is_seed_drawn: bool = False
    root: bytes = b""
    lane: str = ""
    weight: int = 1
    prompt: bytes = b""
    export: Export | None = None
    source: KvSource | None = None
    marks: tuple[Mark, ...] = ()
    images: tuple[ImageSpan, ...] = ()


class Prompt(Struct, frozen=True, tag="prompt", gc=False):
    """Front end to worker: a prompt that the Submits with this name share. It is kept until DropPrompt."""

    name: bytes
    token_ids: tuple[int, ...]


class DropPrompt(Struct, frozen=True, tag="drop_prompt", gc=False):
    """Front end to worker: no Submit will name this prompt any more."""

    name: bytes


class Fetch(Struct, frozen=True, tag="fetch", omit_defaults=True):
    """Front end to worker: pull the blocks of this prompt now. A Submit whose source has the same id comes later, or an EndTransfer.

    The pulled blocks are kept from eviction for `lease_seconds` after the last came. `root`, `lane` and `prompt` are those of a Submit.
    """

    source: KvSource
    token_ids: tuple[int, ...]
    lease_seconds: float
    root: bytes = b""
    lane: str = ""
    prompt: bytes = b""


class EndTransfer(Struct, frozen=True, tag="end_transfer"):
    """Front end to worker, to the source or the target: these transfers are over. What they hold is freed; unknown ones are ignored."""

    ids: tuple[bytes, ...]


TransferOutcome = Literal["done", "failed", "expired"]


class TransferReport(Struct, frozen=True, array_like=True, gc=False):
    """Worker to front end: a transfer has ended at this worker. `seconds` is from its first request to its end.

    From the target: `done` or `failed`, for this `reason`; `blocks` of `size` bytes in all were pulled either way and can be used. From
    the source: `expired`, when nobody has ended it within its lease; or, before the end, a `ticket` for the target.
    """

    id: bytes
    outcome: TransferOutcome | None = None
    blocks: int = 0
    size: int = 0
    seconds: float = 0.0
    reason: str = ""
    ticket: bytes = b""


IMAGE_PIECE_BYTES = 128 * 1024


class ImagesWanted(Struct, frozen=True, tag="images_wanted", gc=False):
    """Worker to front end: this generation needs these images, and the worker has neither their features nor their pixels.

    `failed`: their features could not be pulled from where an ImageSource said.
    """

    generation: bytes
    names: tuple[bytes, ...]
    failed: str = ""


class ImagePiece(Struct, frozen=True, tag="image_piece", gc=False):
    """Front end to worker: the pixels of an image from this byte on, of `total` bytes. Other messages pass between the pieces.

    Three bytes for each pixel, so that `total` is 3 × width × height of `size`: RGB, row by row; if the model's rules say `is_prepared`,
    as its family lays it out. The end of the name is a hash of it: `wire.images.seal_of`.
    """

    name: bytes
    offset: int
    total: int
    size: tuple[int, int]
    data: bytes


class ImageSource(Struct, frozen=True, tag="image_source", gc=False):
    """Front end to worker: another worker computes the features of this image: pull them from there."""

    name: bytes
    source: KvSource


class ImageRefused(Struct, frozen=True, tag="image_refused", gc=False):
    """Front end to worker: this image cannot be had. The generations that need it here fail; `retryable` is for their Fault."""

    name: bytes
    reason: str
    retryable: bool = True


class Cancel(Struct, frozen=True, tag="cancel"):
    """Front end to worker: stop these generations, queued or running. Each still gets its terminal."""

    ids: tuple[bytes, ...]


class CloseSession(Struct, frozen=True, tag="close_session"):
    """Front end to worker: end this session, now or after its last active turn. Ignored for another epoch.

    `frees`: the client is done with it, so KV that only this session held is freed. Otherwise it stays cached, without a lease.
    """

    id: str
    epoch: int
    frees: bool = True


class SessionQuery(Struct, frozen=True, tag="session_query"):
    """Front end to worker: report these sessions. The answer has the same `number`."""

    number: int
    ids: tuple[str, ...]
    with_tokens: bool = False


class SessionReport(Struct, frozen=True, array_like=True, gc=False):
    """What a worker knows about a session. `expires_in` is None while a turn is active. `tier` is the slowest that has a part of its KV;
    None without any. If asked for, it has the tokens whose KV the session leases, with the `root`, the `lane` and the `images` of their
    Submit."""

    id: str
    epoch: int
    kv_blocks: int
    turns: int
    active_turns: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    expires_in: float | None = None
    tier: Tier | None = None
    token_ids: tuple[int, ...] = ()
    root: bytes = b""
    lane: str = ""
    images: tuple[ImageSpan, ...] = ()


class SessionReports(Struct, frozen=True, tag="session_reports"):
    """Worker to front end: the answer to a SessionQuery. Unknown sessions are left out."""

    number: int
    reports: tuple[SessionReport, ...]


class SnapshotRequest(Struct, frozen=True, tag="snapshot_request"):
    """Front end to worker: send a Snapshot. For a new link, and after missed events."""


class Snapshot(Struct, frozen=True, tag="snapshot"):
    """Worker to front end: all cached blocks, as BlocksStored. The next event has `next_number`."""

    next_number: int
    events: tuple[KvEvent, ...]


class Step(Struct, frozen=True, tag="step"):
    """Worker to front end: the news of all its generations in one frame, and the changes of the cached KV. `emits` grows whenever the
    engine goes on: a worker reports its figures though its engine hangs. 0: not counted."""

    segments: list[Segment]
    stats: WorkerStats
    events: KvEvents | None = None
    transfers: tuple[TransferReport, ...] = ()
    emits: int = 0


class Ready(Struct, frozen=True, tag="ready"):
    """Front end to worker: the readers of the last Step are being served; send the next.

    At most one Step is on its way. So while the front end is busy, tokens wait in the worker, where they are merged, and not in the
    socket.
    """


class Challenge(Struct, frozen=True, tag="challenge"):
    """Worker to front end: the first message of every connection."""

    version: int
    nonce: bytes


class Hello(Struct, frozen=True, tag="hello"):
    """Front end to worker: its nonce, and its proof. `address` is the worker that it wants, `reached` where its connection went."""

    version: int
    name: str
    nonce: bytes
    proof: bytes
    address: str = ""
    reached: str = ""


class Welcome(Struct, frozen=True, tag="welcome"):
    """Worker to front end: its proof, and the model that it serves."""

    name: str
    proof: bytes
    model: ModelInfo


class Ping(Struct, frozen=True, tag="ping"):
    """Front end to worker, on a silent link: answer with Pong."""


class Pong(Struct, frozen=True, tag="pong"):
    """Worker to front end: the link and the worker's event loop work. It says nothing about the engine."""


class TokenizerRequest(Struct, frozen=True, tag="tokenizer_request"):
    """Front end to worker: send the piece of the packed tokenizer that begins at this byte."""

    offset: int


class TokenizerPiece(Struct, frozen=True, tag="tokenizer_piece"):
    """Worker to front end: the requested piece, of at most TOKENIZER_PIECE_BYTES. The whole has `total` bytes.

    Only one piece is requested at a time, so that tokens can pass between the pieces.
    """

    offset: int
    total: int
    data: bytes


class Draining(Struct, frozen=True, tag="draining"):
    """Worker to front end: send no new generations. Running ones are finished."""


class Goodbye(Struct, frozen=True, tag="goodbye"):
    """Either way: the link is closed, for this reason."""

    code: str
    message: str


Message = (
    Submit
    | Prompt
    | DropPrompt
    | Fetch
    | EndTransfer
    | ImagesWanted
    | ImagePiece
    | ImageSource
    | ImageRefused
    | Cancel
    | CloseSession
    | SessionQuery
    | SessionReports
    | SnapshotRequest
    | Snapshot
    | Step
    | Ready
    | Challenge
    | Hello
    | Welcome
    | Draining
    | Goodbye
    | TokenizerRequest
    | TokenizerPiece
    | Ping
    | Pong
)
