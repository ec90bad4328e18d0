"""Conversations of every form, as transformers wants them.

A turn has a role (`role`, `from`, ...) and a content (`content`, `value`, ...). Every name in use of a role is known;
what cannot be read so is one conversation less, for a reason that is counted. Empty system messages are dropped, and so
are answers to nothing, with which ShareGPT's conversations often begin.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.training.data.samples import MalformedError, UnusableError

__all__ = ["Conversation", "alternating", "conversation"]

_NAMES = {
    "system": "system developer",
    "user": "user human prompter person",
    "assistant": "assistant gpt chatgpt gpt4 gpt-4 bing bard gemini model claude llama ai bot chatbot",
    "tool": "tool function observation ipython tool_response function_response function-response tool_result",
    "call": "function_call function-call tool_call",  # an assistant's turn that is a call of a function
}
_ROLES = {name: role for role, names in _NAMES.items() for name in names.split()}
_ROLE_KEYS = ("role", "from", "speaker")
_CONTENT_KEYS = ("content", "value", "text")
_THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation.

    Attributes:
        messages: as transformers wants them: `role` (system, user, assistant or tool), `content`, and where there are
            any `tool_calls`, `reasoning_content`, `name` and `tool_call_id`.
        tools: descriptions of the functions that the assistant may call.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[Any, ...] | None = None

    @property
    def question(self) -> tuple[dict[str, Any], ...]:
        """The messages before the last answer; all of them where none ends the conversation."""
        end = len(self.messages)
        while end and self.messages[end - 1]["role"] == "assistant":
            end -= 1
        return self.messages[:end]


def conversation(turns: Any, system: Any = None, tools: Any = None) -> Conversation:
    """Read a list of turns.

    Args:
        turns: what the row has.
        system: a system message that stands beside them.
        tools: a list, or its JSON, that stands beside them.

    Raises:
        MalformedError: it is no list of turns.
        UnusableError: it has one of an unknown role, without content, or with content that is no text.
    """
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not all(isinstance(t, Mapping) for t in turns):
        raise MalformedError("that is no list of turns", f"got {turns!r:.80}")
    messages = [_message(turn) for turn in turns]
    if isinstance(system, str) and not any(message["role"] == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    messages = [message for message in messages if message["role"] != "system" or message["content"].strip()]
    first = next((place for place, message in enumerate(messages) if message["role"] != "system"), len(messages))
    while first < len(messages) and messages[first]["role"] == "assistant":
        messages.pop(first)
    if not any(message["role"] == "user" for message in messages):
        raise UnusableError("without a question")
    return Conversation(tuple(messages), _tools(tools))


def alternating(turns: Sequence[Any], system: Any = None) -> Conversation:
    """Read turns without roles: a question, its answer, the next question ...

    Raises:
        UnusableError: one of them is no text, or empty.
    """
    roles = ("user", "assistant")
    return conversation([{"role": roles[place % 2], "content": turn} for place, turn in enumerate(turns)], system)


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    named = next((turn[key] for key in _ROLE_KEYS if turn.get(key) is not None), None)
    role = _ROLES.get(str(named).strip().lower())
    if role is None:
        raise UnusableError("with a turn of an unknown role", f"got {named!r}")
    content = _content(next((turn[key] for key in _CONTENT_KEYS if turn.get(key) is not None), ""))
    calls = _calls(turn)
    if role == "call":
        role, calls = "assistant", calls or _parsed_calls(content)
        content = "" if calls else content
    if not content.strip() and not calls and role not in ("system", "tool"):
        raise UnusableError("with an empty turn", f"of role {named!r}")
    message: dict[str, Any] = {"role": role, "content": content}
    if calls:
        message["tool_calls"] = calls
    thought = next((turn[key] for key in _THOUGHT_KEYS if isinstance(turn.get(key), str)), None)
    if thought is not None and role == "assistant":
        message["reasoning_content"] = thought
    return message | {key: turn[key] for key in ("name", "tool_call_id") if isinstance(turn.get(key), str)}


def _content(content: Any) -> str:
    """A content of one text or of several parts as one text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        raise UnusableError("with a content that is no text", f"got {content!r:.80}")
    texts = []
    for part in content:
        if not isinstance(part.get("text"), str) or not str(part.get("type", "text")).endswith("text"):
            raise UnusableError("with a part of a content that is no text", f"got one of type {part.get('type')!r}")
        texts.append(part["text"])
    return "\n".join(texts)


def _calls(turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Calls of functions that a turn of OpenAI's form makes."""
    calls = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else [])
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise UnusableError("with tool calls that are no list", f"got {calls!r:.80}")
    return [_call(call) for call in calls]


def _call(call: Any) -> dict[str, Any]:
    """A call with its arguments as an object, which is what templates write."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UnusableError("with a tool call without a name", f"got {call!r:.80}")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        parsed = _json(arguments)
        arguments = parsed if isinstance(parsed, dict) else arguments
    named = {key: call[key] for key in ("id",) if isinstance(call.get(key), str)}
    arguments = {} if arguments is None else arguments
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _parsed_calls(content: str) -> list[dict[str, Any]]:
    """The calls that a turn's text is, if it is any."""
    parsed = _json(content)
    calls = parsed if isinstance(parsed, list) else [parsed]
    is_calls = all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls)
    return [_call(call) for call in calls] if is_calls else []


def _tools(tools: Any) -> tuple[Any, ...] | None:
    if isinstance(tools, str):
        tools = _json(tools) if tools.strip() else None
        if not isinstance(tools, list | None):
            raise UnusableError("with tools that are no JSON list")
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UnusableError("with tools that are no list of objects", f"got {tools!r:.80}")
    return tuple(tools)


def _json(text: str) -> Any:
    """What a text is in JSON; None if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None
