"""Rewrites the messages of a chat, so that a template renders all of their text.

Each function returns the messages themselves if there is nothing to rewrite. It keeps the order of what was said, and the next turn's
messages change nothing in those of the turns before: prompts keep their prefixes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import groupby

from penstock.text.tokenizers.tokenizer import ChatMessage, ToolCall
from penstock.text.tool_prompt import calls_as_text, paragraphs

Messages = Sequence[ChatMessage]
Rewrite = Callable[[Messages], Messages]

# What templates know under another name.
_ROLES = {"developer": "system", "function": "tool"}
_INSTRUCTIONS = ("system", "developer")

FILLER = " "
"""The text of a message that a template requires and nobody wrote."""

RAW_ARGUMENTS = "arguments"

ID_CHARACTERS = 9


def known_roles(messages: Messages) -> Messages:
    """Instructions are of the role system, results of the role tool. Leading instructions are one message."""
    is_known = {message["role"] for message in messages}.isdisjoint(_ROLES)
    leading = next((place for place, message in enumerate(messages) if message["role"] not in _INSTRUCTIONS), len(messages))
    if is_known and leading < 2:
        return messages
    renamed = [_renamed(message) if message["role"] in _ROLES else message for message in messages]
    return renamed if leading < 2 else [_joined(renamed[:leading]), *renamed[leading:]]


def named_results(messages: Messages) -> Messages:
    """Each result with the name of its tool, which some templates show. OpenAI's results have only the id of the call."""
    names: dict[str, str] = {}

    def change(message: ChatMessage) -> list[ChatMessage] | None:
        if message["role"] == "tool" and "name" not in message and (name := names.get(message.get("tool_call_id", ""))) is not None:
            return [ChatMessage({**message, "name": name})]
        if calls := message.get("tool_calls"):
            names.update({call["id"]: call["function"]["name"] for call in calls})
        return None

    return _each(messages, change)


def reminder(text: str) -> str:
    """Instructions in a message that is not of the role system."""
    return f"<system-reminder>\n{text}\n</system-reminder>"


def system_in_user(messages: Messages) -> Messages:
    """Leading instructions at the start of the user's first message."""
    if not messages or messages[0]["role"] != "system":
        return messages
    system, *rest = messages
    if rest and rest[0]["role"] == "user":
        return [ChatMessage({**rest[0], "content": paragraphs(system["content"], rest[0]["content"])}), *rest[1:]]
    return [ChatMessage({**system, "role": "user"}), *rest]


def as_reminders(messages: Messages) -> Messages:
    """Later instructions where they stand: in the result before them, for there the user did not speak; else as the user's words."""
    if all(message["role"] != "system" for message in messages[1:]):
        return messages
    changed = list(messages[:1])
    for role, group in groupby(messages[1:], lambda message: message["role"]):
        if role != "system":
            changed += group
            continue
        told = [ChatMessage({**message, "role": "user", "content": reminder(message["content"])}) for message in group]
        if changed[-1]["role"] == "tool":
            changed[-1] = _joined([changed[-1], *told])
        else:
            changed += told
    return changed


def merged(messages: Messages) -> Messages:
    """Consecutive messages of the user, or of the assistant, as one."""
    groups = [list(group) for _, group in groupby(messages, lambda message: message["role"])]
    if all(len(group) == 1 or group[0]["role"] not in ("user", "assistant") for group in groups):
        return messages
    return [message for group in groups for message in ([_joined(group)] if group[0]["role"] in ("user", "assistant") else group)]


def user_first(messages: Messages) -> Messages:
    """An empty message of the user after the instructions, if the user does not speak first."""
    place = 1 if messages and messages[0]["role"] == "system" else 0
    if messages[place : place + 1] and messages[place]["role"] != "assistant":
        return messages
    return [*messages[:place], ChatMessage(role="user", content=FILLER), *messages[place:]]


def answered_calls(messages: Messages) -> Messages:
    """The user speaks after an answer, never right after a call or its result."""
    changed: list[ChatMessage] = []
    for message in messages:
        if message["role"] == "user" and changed and (changed[-1]["role"] == "tool" or changed[-1].get("tool_calls")):
            changed.append(ChatMessage(role="assistant", content=FILLER))
        changed.append(message)
    return messages if len(changed) == len(messages) else changed


def filled(messages: Messages) -> Messages:
    """No empty answers."""
    return _each(messages, lambda message: [ChatMessage({**message, "content": FILLER})] if _is_empty(message) else None)


def stray_results_as_text(messages: Messages) -> Messages:
    """Results that do not follow their calls, as messages of the user. Clients drop calls when they shorten a chat."""
    called: set[str] = set()
    changed: list[ChatMessage] = []
    for message in messages:
        if message["role"] != "tool":
            called = {call["id"] for call in message.get("tool_calls") or ()}
        is_stray = message["role"] == "tool" and message.get("tool_call_id") not in called
        changed += calls_as_text([message]) if is_stray else [message]
    return messages if changed == messages else changed


def text_then_calls(messages: Messages) -> Messages:
    """Text beside calls, as a message before them."""
    return _each(messages, lambda message: [_uncalled(message), _silent(message)] if _speaks_and_calls(message) else None)


def text_and_turn_then_calls(messages: Messages) -> Messages:
    """The same with an empty message of the user in between: some templates count the text among the turns, but not the calls."""
    turn = ChatMessage(role="user", content=FILLER)
    return _each(messages, lambda message: [_uncalled(message), turn, _silent(message)] if _speaks_and_calls(message) else None)


def one_by_one(messages: Messages) -> Messages:
    """One call per message, each followed by its results."""
    changed: list[ChatMessage] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            changed.append(message)
            continue
        results: dict[str | None, list[ChatMessage]] = {}
        while position < len(messages) and messages[position]["role"] == "tool":
            results.setdefault(messages[position].get("tool_call_id"), []).append(messages[position])
            position += 1
        for index, call in enumerate(calls):
            first = message if not index else ChatMessage(role=message["role"], content="")
            changed += [ChatMessage({**first, "tool_calls": [call]}), *results.pop(call["id"], ())]
        changed += [result for others in results.values() for result in others]
    return messages if len(changed) == len(messages) else changed


def short_ids(messages: Messages) -> Messages:
    """Ids of nine letters and digits, as Mistral's templates require them. Equal ids stay equal."""

    def change(message: ChatMessage) -> list[ChatMessage] | None:
        made = ChatMessage({**message})
        if calls := message.get("tool_calls"):
            made["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in calls]
        if "tool_call_id" in message:
            made["tool_call_id"] = _short_id(message["tool_call_id"])
        return None if made == message else [made]

    return _each(messages, change)


def arguments_as_text(messages: Messages) -> Messages:
    """The arguments of calls as JSON, not as objects."""
    return _each_call(messages, lambda given: given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))


def arguments_as_objects(messages: Messages) -> Messages:
    """Arguments that are not an object, as the one member of an object."""
    return _each_call(messages, lambda given: {RAW_ARGUMENTS: given} if isinstance(given, str) else given)


def _each(messages: Messages, change: Callable[[ChatMessage], list[ChatMessage] | None]) -> Messages:
    changed = [change(message) for message in messages]
    if not any(changed):
        return messages
    return [part for message, parts in zip(messages, changed, strict=True) for part in parts or [message]]


def _each_call(messages: Messages, change: Callable[[dict[str, object] | str], dict[str, object] | str]) -> Messages:
    def change_calls(message: ChatMessage) -> list[ChatMessage] | None:
        calls = message.get("tool_calls")
        if not calls:
            return None
        made: list[ToolCall] = []
        for call in calls:
            arguments = change(call["function"]["arguments"])
            made.append({**call, "function": {**call["function"], "arguments": arguments}})
        return None if made == calls else [ChatMessage({**message, "tool_calls": made})]

    return _each(messages, change_calls)


def _renamed(message: ChatMessage) -> ChatMessage:
    renamed = ChatMessage({**message, "role": _ROLES[message["role"]]})
    if renamed["role"] == "tool":
        renamed.setdefault("tool_call_id", message.get("name", ""))
    return renamed


def _joined(messages: Messages) -> ChatMessage:
    """One message that says what these say."""
    if len(messages) == 1:
        return messages[0]
    joined = ChatMessage({**messages[0], "content": paragraphs(*[message["content"] for message in messages])})
    if thought := paragraphs(*[message.get("reasoning_content", "") for message in messages]):
        joined["reasoning_content"] = thought
    if calls := [call for message in messages for call in message.get("tool_calls") or ()]:
        joined["tool_calls"] = calls
    return joined


def _speaks_and_calls(message: ChatMessage) -> bool:
    return bool(message["content"] and message.get("tool_calls"))


def _is_empty(message: ChatMessage) -> bool:
    return message["role"] == "assistant" and not message["content"] and not message.get("tool_calls")


def _uncalled(message: ChatMessage) -> ChatMessage:
    return ChatMessage(role=message["role"], content=message["content"])


def _silent(message: ChatMessage) -> ChatMessage:
    """Its calls, with the reasoning that led to them."""
    return ChatMessage({**message, "content": ""})


def _short_id(given: str) -> str:
    if len(given) == ID_CHARACTERS and given.isalnum():
        return given
    return hashlib.blake2b(given.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()[:ID_CHARACTERS]
