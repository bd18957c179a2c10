"""Sixty conversations: ordinary ones, and the edge cases that people's data has."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]


def user(text: str, **keys: Any) -> Message:
    """A turn of the user."""
    return {"role": "user", "content": text, **keys}


def assistant(text: str, **keys: Any) -> Message:
    """A turn of the assistant."""
    return {"role": "assistant", "content": text, **keys}


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": text}


def outcome(text: str, call_id: str = "call12345") -> Message:
    """The outcome of a tool call."""
    return {"role": "tool", "content": text, "name": "get_weather", "tool_call_id": call_id}


def calling(arguments: Any, *more: Any, content: str = "", **keys: Any) -> Message:
    """A turn of the assistant that calls a tool, once for each of the arguments given."""
    calls = [
        {"id": f"call{number}", "type": "function", "function": {"name": "get_weather", "arguments": given}}
        for number, given in enumerate((arguments, *more), start=12345)
    ]
    return assistant(content, tool_calls=calls, **keys)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Name"}},
                "required": ["city"],
            },
        },
    }
]

ONE_CALL = [user("Weather in Oslo?"), calling({"city": "Oslo"}), outcome("minus four"), assistant("Cold today.")]
THOUGHT, OTHER_THOUGHT = "two plus two", "three plus three"
TAGGED = f"<think>\n{THOUGHT}\n</think>\n\nIt is four."
OTHER_TAGGED = f"<think>\n{OTHER_THOUGHT}\n</think>\n\nIt is six."

PLAIN: dict[str, list[Message]] = {
    "single": [user("What is Oslo?"), assistant("A town in Norway.")],
    "two_turns": [user("hi there"), assistant("hello you"), user("more please"), assistant("yes certainly")],
    "five_turns": [turn for k in range(5) for turn in (user(f"question {k} asked"), assistant(f"reply {k} given"))],
    "empty_answer": [user("say nothing"), assistant("")],
    "empty_answer_then": [user("say nothing"), assistant(""), user("now speak"), assistant("words")],
    "empty_last": [user("a question"), assistant("an answer"), user("say nothing"), assistant("")],
    "empty_user": [user(""), assistant("you said nothing")],
    "unicode": [user("日本語で話して"), assistant("はい、もちろんです。née naïve")],
    "emoji": [user("👩‍👩‍👧‍👦 ok?"), assistant("👍🏽 fine ✅")],
    "rtl": [user("مرحبا"), assistant("أهلا وسهلا"), user("שלום"), assistant("שלום לך")],
    "combining": [user("cafe\u0301"), assistant("cafe\u0301 au lait\u200b")],
    "trailing_space": [user("hi  "), assistant("hello there   ")],
    "leading_space": [user("  hi"), assistant("   hello there")],
    "newlines": [user("\n\nhi\n\n"), assistant("\n\nhello\n\n")],
    "newlines_two": [user("\nhi\n"), assistant("\nhello\n"), user("\nmore\n"), assistant("\nyes\n")],
    "tabs": [user("\thi\t"), assistant("\thello\n\n\tcode")],
    "only_space": [user("go"), assistant("   ")],
    "crlf": [user("line one\r\nline two"), assistant("answer one\r\nanswer two")],
    "quotes": [user('say "hi"'), assistant("he said \"hi\" and 'bye'")],
    "backslash": [user("a \\n b"), assistant("c \\n d \\\\ e")],
    "braces": [user("{{ x }} {% y %}"), assistant("{{ answer }} {% z %}")],
    "html": [user("<b>bold</b>"), assistant("<p>para &amp; more</p>")],
    "code": [user("write code"), assistant("```python\ndef f(x):\n    return x + 1\n```\n")],
    "json_answer": [user("as json"), assistant('{"city": "Oslo", "n": [1, 2]}')],
    "long": [user("word " * 500), assistant("reply " * 500)],
    "brackets": [user("[" * 3000), assistant("]" * 3000)],
    "ends_with_user": [user("hi"), assistant("hello"), user("bye now")],
    "user_name": [user("hi", name="ann"), assistant("hello ann")],
}
"""Turns of user and assistant that take turns."""

SYSTEM: dict[str, list[Message]] = {
    "system": [system("Be brief."), user("What is Oslo?"), assistant("A town.")],
    "system_two": [system("Be brief."), user("one"), assistant("uno"), user("two"), assistant("dos")],
    "system_empty": [system(""), user("one"), assistant("uno")],
}
"""The same after a system message, which some templates refuse."""

THINKING: dict[str, list[Message]] = {
    "field": [user("think"), assistant("It is four.", reasoning_content=THOUGHT)],
    "field_two": [
        user("think"),
        assistant("It is four.", reasoning_content=THOUGHT),
        user("again"),
        assistant("It is six.", reasoning_content=OTHER_THOUGHT),
    ],
    "field_last": [
        user("hi"),
        assistant("hello"),
        user("again"),
        assistant("It is six.", reasoning_content=OTHER_THOUGHT),
    ],
    "field_first": [
        user("again"),
        assistant("It is six.", reasoning_content=OTHER_THOUGHT),
        user("hi"),
        assistant("hello"),
    ],
    "field_empty": [user("think"), assistant("It is four.", reasoning_content="")],
    "thinking_key": [user("think"), assistant("It is four.", thinking=THOUGHT)],
    "tag": [user("think"), assistant(TAGGED)],
    "tag_two": [user("think"), assistant(TAGGED), user("again"), assistant(OTHER_TAGGED)],
    "tag_tight": [user("think"), assistant("<think>two plus two</think>It is four.")],
    "tag_empty": [user("think"), assistant("<think>\n\n</think>\n\nIt is four.")],
    "tag_first": [user("think"), assistant(TAGGED), user("hi"), assistant("hello")],
}
"""Answers with thinking, in a field of its own or in the content."""

ODD: dict[str, list[Message]] = {
    "tag_open": [user("think"), assistant("<think>\nnever closed")],
    "assistant_first": [assistant("Welcome aboard!"), user("thanks"), assistant("You are welcome.")],
    "assistant_first_system": [
        system("You greet."),
        assistant("Welcome aboard!"),
        user("thanks"),
        assistant("You are welcome."),
    ],
    "assistant_only": [assistant("Just me.")],
    "assistant_twice": [user("go"), assistant("part one"), assistant("part two")],
    "user_twice": [user("part one"), user("part two"), assistant("got both")],
    "system_late": [user("hi"), assistant("hello"), system("Now rhyme."), user("go"), assistant("so")],
    "system_only_answer": [system("Say hi."), assistant("hi")],
}
"""Turns in an order that many templates refuse, and thinking that does not end."""

TOOL_CALLS: dict[str, list[Message]] = {
    "tool_object": ONE_CALL,
    "tool_text": [user("Weather?"), calling('{"city": "Oslo"}'), outcome("minus four"), assistant("Cold today.")],
    "tool_no_arguments": [user("Weather?"), calling(None), outcome("minus four"), assistant("Cold today.")],
    "tool_content": [
        user("Weather?"),
        calling({"city": "Oslo"}, content="Let me look."),
        outcome("minus"),
        assistant("Cold."),
    ],
    "tool_two_calls": [
        user("Oslo and Rome?"),
        calling({"city": "Oslo"}, {"city": "Rome"}),
        outcome("minus four"),
        outcome("plus ten", "call12346"),
        assistant("Cold and mild."),
    ],
    "tool_call_last": ONE_CALL[:2],
    "tool_then_more": [*ONE_CALL, user("Rome?"), calling({"city": "Rome"}), outcome("plus ten"), assistant("Mild.")],
    "tool_thinking": [
        user("Weather?"),
        calling({"city": "Oslo"}, reasoning_content="I need the service"),
        outcome("minus four"),
        assistant("Cold today.", reasoning_content="now I know"),
    ],
    "tool_unused": [user("hi"), assistant("hello")],
    "tool_system": [system("Use tools."), *ONE_CALL],
}
"""Conversations with TOOLS."""

CONVERSATIONS = {**PLAIN, **SYSTEM, **THINKING, **ODD, **TOOL_CALLS}
