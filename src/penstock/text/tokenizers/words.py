"""The built-in tokenizer of the simulator: readable words, and bytes for everything else.

Ids 0-255 are bytes, then come the words, each with a space before it, then the special tokens. Any text decodes to itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from penstock.text.detokenizer import ByteDetokenizer, ByteTables
from penstock.text.tokenizers.tokenizer import Answer, ChatMessage, ChatPrompt
from penstock.text.tool_prompt import calls_text
from penstock.wire.errors import RequestError

_WORDS = """
able about above across action active actor adapt add admit adult advice affair after again age agent agree ahead air album alert alike
alive allow alone along alter amber amount ample anchor angle animal ankle answer apple april arch area arena argue arm army arrive arrow art
ask aspect asset atlas atom aunt author autumn average awake award aware away axis baby back badge bag bake balance ball bamboo band bank bar
bare barrel base basic basin basket bat bath beach beam bean bear beauty become bed beef begin behave behind bell belong below belt bench
bend benefit best better between beyond bicycle bid big bike bind biology bird birth bit bite bitter black blade blanket blend blind block bloom
blow blue blur board boat body boil bold bolt bone bonus book boost boot border borrow boss bottle bottom bounce bowl box boy bracket brain branch
brand brass brave bread break breath breeze brick bridge brief bright bring brisk broad bronze brook broom brother brown brush bubble bucket buddy budget
build bulb bulk bundle burden burst bus bush busy butter button buyer cabin cable cactus cage cake call calm camel camera camp canal candle cannon
canoe canvas canyon capable captain car carbon card care cargo carpet carry cart case cash castle casual cat catch cattle cause cave cedar ceiling celery
cell cement center cereal certain chain chair chalk champion change chapter charge chart chase cheap check cheese chef cherry chest chief child chime choice
choose chunk circle citizen city civil claim clap clarify class clay clean clear clerk clever client cliff climb clock close cloth cloud clover club clump
coach coast coconut code coffee coil coin cold collect color column come comfort common company concert conduct confirm connect consider control convince cook
cool copper copy coral core corn corner correct cost cotton couch country couple course cousin cover cradle craft crane crater cream credit creek crew cricket
crisp crop cross crowd crown crucial cruise crumble crush crystal cube culture cup curious current curtain curve cushion custom cycle daily dairy damage damp
dance daring dark data daughter dawn day deal debate decade decide deck deep deer define degree delay deliver demand den denial depart depend deposit depth
deputy derive desert design desk detail develop device diagram dial diamond diary diesel diet differ digital dinner direct dirt discover dish display distance
divide doctor dog dolphin domain door double dove draft dragon drama draw dream dress drift drill drink drive drop drum dry duck dune during dust duty dwarf
dynamic eager eagle early earn earth easily east easy echo ecology edge edit educate effort egg eight either elbow elder electric elegant element elephant
elevator elite else embark ember emerge empty enable energy engage engine enjoy enough enrich enter entire entry episode equal equip era escape essay estate
eternal even evening event evidence evolve exact example excess exchange excite exercise exhibit exist exit expand expect expert explain express extend extra
eye fabric face faculty faint faith fall family famous fancy fantasy farm fashion father favorite feature fence festival fetch fiber field figure file film
filter final find fine finger finish fire firm first fish fit five flag flame flat flavor flight float flock floor flower fluid fly foam focus fog foil fold
follow food forest forget fork form fortune forum forward fossil found fox frame fresh friend fringe frog front frost frozen fruit fuel fun furnace future
gadget galaxy gallery game garage garden garlic garment gate gather gauge gaze general genius gentle genuine gesture giant gift giraffe give glad glance glass
glide globe glory glove glow goal goat gold good goose gospel grace grain grant grape grass gravity great green grid grocery group grow guard guess guide
guitar half hammer hand happy harbor hard harvest hat have hawk hazel head health heart heavy hedge height hello helmet help hen hero hidden high hill hint
history hobby hold hollow home honey hood hope horn horse hospital host hotel hour hover hub human humble humor hundred hungry hunt hurdle hurry ice icon idea
identify idle image imitate impact improve impulse inch include income index indoor industry infant inform inhale initial inner input inquiry insect inside
inspire install intact interest into invest invite island item ivory jacket jaguar jar jazz jeans jelly jewel join joke journey joy judge juice jump jungle
junior just keen keep kernel key kick kidney kind kingdom kiss kit kitchen kite kiwi knee knife knock know label ladder lake lamp language laptop large later
latin laugh laundry lava lawn layer leader leaf learn leave lecture left leg legend leisure lemon lend length lens leopard lesson letter level liberty library
license life lift light like limb limit link lion liquid list little live lizard load loan lobster local lock logic long loop lottery loud lounge love loyal
lucky lumber lunar lunch lyrics machine magic magnet maid mail main major make mammal manage mandate mango mansion manual maple marble march margin marine
market mask mass master match material math matrix matter maximum maze meadow mean measure melody melt member memory mention menu mercy merge merit merry mesh
message metal method middle midnight milk million mimic mind minimum minor minute miracle mirror mix mobile model modify moment monitor month moon moral
more morning motion motor mountain mouse move movie much muffin mule multiply muscle museum music must mutual myself mystery napkin narrow nation nature near
neck need nephew nest net network neutral never news next nice night noble noise noodle normal north note notice novel now number nurse oak oasis object
oblige observe obtain ocean october odor offer office often oil olive olympic once onion online only open opera opinion orange orbit orchard order ordinary
organ orient original ostrich other outdoor outer output outside oval oven over own owner oxygen oyster ozone paddle page pair palace palm panda panel paper
parade parent park parrot party pass patch path patient patrol pattern pause pave payment peace peanut pear pelican pen people pepper perfect permit person
phone photo phrase piano picnic picture piece pigeon pilot pink pioneer pipe pitch pizza place planet plastic plate play please pledge pluck plug plunge poem
poet point polar pole pond pony pool popular portion position possible potato pottery powder power practice praise predict prefer prepare present pretty prevent
price pride primary print prize process produce profit program project promote proof property prosper protect proud provide public pulse pumpkin punch pupil puppy
purchase purity purpose puzzle pyramid quality quantum quarter question quick quiz quote rabbit raccoon race rack radar radio rail rain raise rally ramp ranch
random range rapid rare rate rather raven reach ready real reason recall receive recipe record recycle reduce reflect reform region regular relax release relief
rely remain remember remind renew rent repair repeat reply report rescue resemble resist resource response result retreat return reunion reveal review reward
rhythm ribbon rice rich ride ridge right rigid ring ripple rise river road roast robot robust rocket romance roof rookie room rose rotate round route royal
rubber rug rule runway rural saddle sail salad salmon salon salt salute same sample sand satisfy sauce sausage save scale scan scatter scene school science
scout screen script scrub sea search season seat second secret section security seed seek segment select senior sense sentence series service session settle
setup seven shadow shaft shallow share shed shell shelter sheriff shield shift shine ship shoe shop short shoulder shrimp shuffle sibling side siege sight sign
silent silk silver similar simple since sing siren sister situate six size skate sketch skill skin skirt slab sleep slender slice slide slim slogan slot slow
small smart smile smooth snack snake snow soap soccer social sock soft solar soldier solid solution solve someone song soon soul sound soup source south space
spare spatial spawn speak special speed spell spend sphere spice spider spin spirit split sponsor spoon sport spot spray spread spring square squirrel stable
stadium staff stage stairs stamp stand start state stay steak steel stem step stereo stick still stock stomach stone stool story stove strategy street strong
student studio stuff style subject subway success sudden sugar suggest suit summer sun sunny super supply support sure surface surge surprise survey sustain swap
swarm swift swim swing symbol system table tackle tail talent talk tank tape target task taste team tell ten tenant tennis tent term test text thank theme theory
there they thing think thought three thrive throw thumb thunder ticket tide tiger tilt timber time tiny tip title toast today together token tomato tomorrow tone
tongue tonight tool topic torch tornado tortoise total tourist toward tower town toy track trade traffic trail train transfer travel tray treat tree trend trial
tribe trick trigger trim trip trophy truck trumpet trust truth try tube tuition tumble tuna tunnel turbine turkey turn turtle twelve twenty twice twin twist
type typical umbrella unable uncle under unfold uniform unique unit universe unknown until unusual update upgrade uphold upon upper urban usage use useful usual
utility vacant vacuum valid valley value valve vanish vapor various vast vault vehicle velvet vendor venture verb verify version very vessel veteran viable vibrant
victory video view village vintage violin virtual visit visual vital vivid vocal voice volcano volume vote voyage wagon wait walk wall walnut want warm wash
water wave way wealth wear weather web wedding weekend welcome west wet whale wheat wheel when where whisper wide width wild will wind window wine wing winner
winter wire wisdom wise wish witness wolf wonder wood wool word work world worth wrap wrist write yard year yellow young youth zebra zero zone zoo
""".split()  # noqa: SIM905, a block of words reads better

_SPECIAL = ("<|end|>", "<|message|>", "<|role|>")
# They stand for the special tokens in rendered text. UTF-8 has no bytes for surrogates, so no message can contain one.
_END, _MESSAGE, _ROLE = _MARKS = "\ud800\ud801\ud802"
_EACH_MARK = tuple(re.compile(mark) for mark in _MARKS)
_PIECES = re.compile(r" ?[a-z]+|[^a-z ]+| +(?![a-z])| ")
# A text can be cut after this: no word, and no space before a word, continues there. _SLICE: minimum characters between two cuts.
_EDGE = re.compile("[a-z](?=[^a-z])|[^a-z ]")
_SLICE = 4096


class WordTokenizer:
    """See the module's docstring. It needs no files, so a new clone can serve at once."""

    def __init__(self) -> None:
        words = [f" {word}".encode() for word in _WORDS]
        pieces = [*(bytes([byte]) for byte in range(256)), *words, *(token.encode() for token in _SPECIAL)]
        self._tables = ByteTables(pieces, {token: 256 + len(words) + index for index, token in enumerate(_SPECIAL)})
        self._table = self._tables.plain
        self._ids = {word.decode(): 256 + index for index, word in enumerate(words)}
        self.vocab_size = len(self._table)
        self.max_token_bytes = max(map(len, self._table))
        self.definition: str | None = None
        self.chat_template: str | None = None
        self.renders_tools = True
        self.ordinary_ids: Sequence[int] = range(256, 256 + len(words))
        self.end_id, self._message_id, self._role_id = range(256 + len(words), len(self._table))

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = []
        for piece in _PIECES.findall(text):
            word = self._ids.get(piece)
            if word is None:
                token_ids += piece.encode()
            else:
                token_ids.append(word)
        return token_ids

    def encode_steps(self, text: str) -> Iterator[list[int]]:
        return map(self.encode, _slices(text))

    def encode_infill(self, prefix: str, suffix: str) -> list[int] | None:  # noqa: ARG002
        return None

    def render_chat(self, prompt: ChatPrompt) -> str:
        """Roles and contents. Tools and documents are JSON in messages of their own, calls are text after the content."""
        if prompt.template not in (None, "default"):
            raise RequestError(f"`chat_template` is {prompt.template!r}: expected 'default', the only one", param="chat_template")
        if prompt.continues and (prompt.begins_answer or not prompt.messages):
            message = "`continue_final_message` needs a message to continue, and excludes `add_generation_prompt`"
            raise RequestError(message, param="continue_final_message")
        given = [("tools", prompt.tools), ("documents", prompt.documents)]
        shown = [(role, "\n".join([json.dumps(value, ensure_ascii=False) for value in values])) for role, values in given if values]
        shown += [(message["role"], _content(message)) for message in prompt.messages]
        text = "".join([f"{_ROLE}{role}{_MESSAGE}{content}{_END}" for role, content in shown])
        if prompt.continues:
            return text.removesuffix(_END)
        return f"{text}{_ROLE}assistant{_MESSAGE}" if prompt.begins_answer else text

    def parts(self, rendered: str) -> list[str]:
        # One search per mark is ten times as fast as one for all.
        edges = sorted([found.start() for mark in _EACH_MARK for found in mark.finditer(rendered, 1)])
        return [rendered[start:stop] for start, stop in pairwise([0, *edges, len(rendered)])]

    def begins_part(self, rendered: str, position: int) -> bool:
        return rendered.startswith(tuple(_MARKS), position)

    def encode_part(self, part: str) -> list[int]:
        if not self.begins_part(part, 0):
            return self.encode(part)
        return [self.end_id + _MARKS.index(part[0]), *self.encode(part[1:])]

    def encode_part_steps(self, part: str) -> Iterator[list[int]]:
        return map(self.encode_part, _slices(part))

    def read_answer(self, before: str, token_ids: Sequence[int]) -> Answer | None:  # noqa: ARG002
        if token_ids and token_ids[-1] == self.end_id:
            token_ids = token_ids[:-1]
        if any(token_id >= self.end_id for token_id in token_ids):
            return None
        try:
            return Answer(b"".join([self._table[token_id] for token_id in token_ids]).decode(), token_ids)
        except UnicodeDecodeError:
            return None

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join([self._table[token_id] for token_id in token_ids]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._table[token_id]

    def detokenizer(self, visible: frozenset[str] = frozenset(), skip_special_tokens: bool = True) -> ByteDetokenizer:
        return ByteDetokenizer(self._tables.find(visible, skip_special_tokens))


def _content(message: ChatMessage) -> str:
    calls = message.get("tool_calls")
    return "\n".join(filter(None, (message["content"], calls_text(calls)))) if calls else message["content"]


def _slices(text: str) -> Iterator[str]:
    start = 0
    while (edge := _EDGE.search(text, start + _SLICE)) is not None:
        yield text[start : edge.end()]
        start = edge.end()
    yield text[start:]
