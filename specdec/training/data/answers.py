"""Where a conversation's answers lie in its text: what drafters learn.

An answer is all that the assistant has to write: its text or its calls, whatever the template puts around them between
the prompt and the text, and the mark by which it ends its turn. It is found in one of three ways:

1. The template marks it (`{% generation %}`): what it marks.
2. The conversation up to the answer, rendered as a prompt, and up to the answer's end, rendered alone, are both
   beginnings of the whole text: what the second has more than the first.
3. Templates that write an earlier turn in another way than a last one, as those that drop old thoughts do, break the
   second way. Then what is left of the answer's own text is found by two characters that are put around it, and with it
   goes the mark that ends its turn.

An answer that none of them finds is not learnt; the rest of its conversation is.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specdec.training.data.chat_templates import ChatTemplate
from specdec.training.data.conversations import Conversation
from specdec.training.data.samples import Sample, UnusableError, masked

__all__ = ["EncodedConversation", "answer_spans", "encode_conversation"]

_START, _END = "\ufdd0", "\ufdd1"  # Unicode keeps them for a program's own use: no text has them
_MARKS = {ord(_START): None, ord(_END): None}

Span = tuple[int, int]
"""The first character and the one behind the last."""


@dataclass(frozen=True, slots=True)
class EncodedConversation:
    """A conversation's tokens.

    Attributes:
        sample: its token ids, and which of them are learnt.
        num_answers: turns of the assistant.
        num_hidden: those of them that were not found in the text.
    """

    sample: Sample
    num_answers: int
    num_hidden: int


def encode_conversation(conversation: Conversation, template: ChatTemplate) -> EncodedConversation:
    """A conversation through its chat template, with its answers to be learnt.

    Raises:
        UnusableError: it has no answer, or the template refuses it or leaves out its calls of functions.
    """
    messages, tools = conversation.messages, conversation.tools
    num_answers = sum(message["role"] == "assistant" for message in messages)
    if not num_answers:
        raise UnusableError("without an answer")
    text = template.render(messages, tools)
    if not _writes_calls(conversation, text, template):
        raise UnusableError("with calls of functions that the chat template does not write")
    if template.marks_answers(tools):
        tokens, marks = template.encode_marked(messages, tools)
        starts = [place for place, mark in enumerate(marks) if mark]
        num_found = num_answers if starts else 0
        return EncodedConversation(masked(tokens, [(s, s + 1) for s in starts]), num_answers, num_answers - num_found)
    spans = answer_spans(conversation, text, template)
    encoded = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)  # templates write them
    starts = [start for start, _ in encoded.offset_mapping]
    places = [(bisect_left(starts, first), bisect_left(starts, last)) for first, last in spans]
    return EncodedConversation(masked(encoded.input_ids, places), num_answers, num_answers - len(spans))


def answer_spans(conversation: Conversation, text: str, template: ChatTemplate) -> list[Span]:
    """Where in a conversation's text its answers lie, in order; those that cannot be found are left out.

    Args:
        conversation: the conversation.
        text: what the template makes of it.
        template: the template.
    """
    answers = [place for place, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    spans = {place: _as_beginning(place, conversation, text, template) for place in answers}
    if None in spans.values():
        found = dict(_by_marks(answers, conversation, text, template))
        spans = {place: span or found.get(place) for place, span in spans.items()}
    return sorted(span for span in spans.values() if span and span[0] < span[1])


def _writes_calls(conversation: Conversation, text: str, template: ChatTemplate) -> bool:
    """Whether all calls of functions, if there are any, are in the text."""
    for place, message in enumerate(conversation.messages):
        if "tool_calls" in message:
            messages = list(conversation.messages)
            messages[place] = {key: value for key, value in message.items() if key != "tool_calls"}
            try:
                if template.render(messages, conversation.tools) == text:
                    return False
            except UnusableError:  # a turn without content is not for every template
                continue
    return True


def _as_beginning(place: int, conversation: Conversation, text: str, template: ChatTemplate) -> Span | None:
    """What an answer adds to the conversation before it, where the later turns change neither."""
    messages, tools = conversation.messages, conversation.tools
    try:
        before = template.render(messages[:place], tools, prompting=True)
        after = template.render(messages[: place + 1], tools).rstrip()
    except UnusableError:  # a part of a conversation may be refused where the whole is not
        return None
    if not text.startswith(after) or not after.startswith(before.rstrip()):
        return None
    return len(before), len(after)


def _by_marks(
    answers: Sequence[int], conversation: Conversation, text: str, template: ChatTemplate
) -> Iterator[tuple[int, Span]]:
    """What the template leaves of each answer's own text, and the mark behind it that ends its turn."""
    for place in answers:
        messages = list(conversation.messages)
        content = messages[place]["content"]
        if not content.strip():  # calls of functions alone
            continue
        messages[place] = {**messages[place], "content": _marked(content)}
        try:
            whole = template.render(messages, conversation.tools)
            alone = template.render(messages[: place + 1], conversation.tools)
        except UnusableError:
            continue
        if whole.count(_END) != 1 or whole.translate(_MARKS) != text:
            continue
        end = whole.index(_END) - whole.count(_START)
        start = whole.index(_START) if _START in whole else end - _common_end(text[:end], content.rstrip())
        closing = alone.rpartition(_END)[2].rstrip()
        if start < end:
            yield place, (start, end + len(closing) if text.startswith(closing, end) else end)


def _marked(content: str) -> str:
    """A text between the two characters; white space around it stays outside, as templates trim it."""
    inner = content.strip()
    before, _, behind = content.partition(inner)
    return f"{before}{_START}{inner}{_END}{behind}"


def _common_end(text: str, content: str) -> int:
    """Length of the longest end of a text that an answer ends with too, without white space in front."""
    length = 0
    while length < min(len(text), len(content)) and text[-1 - length] == content[-1 - length]:
        length += 1
    ending = content[len(content) - length :]
    return length if length == len(content) else len(ending.lstrip())
