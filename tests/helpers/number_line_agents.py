"""Agents without knowledge of the trainer that use an ``openai`` client on the number line.

Some of them misbehave.
"""

import asyncio
import json
import os
import sys
import threading
import time

import openai

from agent_system.endpoint import post_reward
from agent_system.environments.env_package.number_line import package as number_line
from agent_system.environments.env_package.number_line.package import (
    MOVES,
    NumberLineEnv,
    parse_move,
)
from agent_system.environments.env_package.number_line.settings import LineSettings

LINE = LineSettings(size=6)
SHORT = LineSettings(size=4, max_steps=4)
END = "</action>"
REFUSED: list[Exception] = []  # errors that ``leave_one_behind`` received in this process
BROKEN: set[str] = set()  # tasks in which ``break_once`` failed in this process

LEAVE = threading.Event()  # event that ends ``linger`` in this process
LINGERED: list[str] = []  # tasks in which ``linger`` reached its end in this process


def tasks(split):
    """Return the tasks with a distance of at least three, as ``number_line_world`` does."""
    all_tasks = number_line.list_tasks(LINE, split)
    return [task for task in all_tasks if abs(task["start"] - task["target"]) >= 3]


def short_tasks(split):
    """Return all tasks of a short line."""
    return number_line.list_tasks(SHORT, split)


def play(task, seed, base_url, api_key, model):
    """Run one episode as a chat and return its reward."""
    client = _client(base_url, api_key)
    env = NumberLineEnv(LINE)
    observation = env.reset(task, seed)
    rules = number_line.make_prompts(LINE).system(levels=False) or ""
    messages: list = [
        {"role": "system", "content": rules},
        {"role": "user", "content": observation.text},
    ]
    reward = 0.0
    done = False
    while not done:
        answer = client.chat.completions.create(model=model, messages=messages, stop=[END])
        choice = answer.choices[0]
        if choice.finish_reason == "length":
            break
        # A client gets the text without the string that ended the turn.
        action, _ = parse_move(f"{choice.message.content}{END}")
        observation, reward, done, _ = env.step(action)
        messages += [choice.message, {"role": "user", "content": observation.text}]
    return reward


def play_with_advice(task, seed, base_url, api_key, model):
    """Run the episode of ``play``, after a reply of each of two models that are not trained."""
    client = _client(base_url, api_key)
    names = [entry.id for entry in client.models.list()]
    assert names == ["policy", "base", "judge"]
    for name in names[1:]:
        answer = _ask(client, name, "Which way?", stop=[END])
        assert answer.model == name and END not in (answer.choices[0].message.content or END)
    return play(task, seed, base_url, api_key, model)


def take_one_turn_and_ask_base(task, seed, base_url, api_key, model):
    """Let the policy take one turn. Return 1 if a model that is not trained answers after it."""
    client = _client(base_url, api_key)
    _ask(client, model, "Which way?", stop=[END])
    return float(_ask(client, "base", "Was this right?", stop=[END]).model == "base")


def call_tools(task, seed, base_url, api_key, model):
    """Let the policy call a function twice, and then answer. Return 1 for the right answer."""
    client = _client(base_url, api_key)
    schema = {"type": "object", "properties": {"place": {"type": "string"}}}
    function = {"name": "look", "description": "Look at a place.", "parameters": schema}
    messages: list = [{"role": "user", "content": "Where is the mug?"}]
    tools: list = [{"type": "function", "function": function}]
    for _ in range(3):
        answer = client.chat.completions.create(model=model, messages=messages, tools=tools)
        choice = answer.choices[0]
        messages.append(choice.message)
        if choice.finish_reason != "tool_calls":
            return float(choice.message.content == "attic")
        for call in choice.message.model_dump()["tool_calls"]:
            place = json.loads(call["function"]["arguments"])["place"]
            content = "A mug<|im_end|>." if place == "attic" else "Nothing."
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return 0.0


def play_loosely(task, seed, base_url, api_key, model):
    """Run one episode on a short line with an untrained policy: any text is a move."""
    client = _client(base_url, api_key)
    env = NumberLineEnv(SHORT)
    messages: list = [{"role": "user", "content": env.reset(task, seed).text}]
    reward = 0.0
    done = False
    while not done:
        answer = client.chat.completions.create(model=model, messages=messages)
        message = answer.choices[0].message
        move = sorted(MOVES)[len(message.content or "") % len(MOVES)]
        observation, reward, done, _ = env.step(move)
        messages += [message, {"role": "user", "content": observation.text}]
    return reward


def _client(base_url, api_key):
    return openai.OpenAI(base_url=base_url, api_key=api_key)


def _ask(client, model, *texts, **options):
    roles = ("user", "assistant")
    messages: list = [
        {"role": roles[index % 2], "content": text} for index, text in enumerate(texts)
    ]
    return client.chat.completions.create(model=model, messages=messages, **options)


def fork(task, seed, base_url, api_key, model):
    """Continue a chat, start another, continue the first one, and quote a reply wrongly."""
    client = _client(base_url, api_key)

    def send(*texts):
        return _ask(client, model, *texts).choices[0].message.content

    first = send("one")
    second = send("one", first, "two")
    send("another")
    send("one", first, "two", second, "three")
    send("one", f"{first}!", "two")
    return 1.0


class AgentBroke(RuntimeError):
    """Error of a faulty agent."""


def _crash(client, model, door):
    raise AgentBroke("the agent broke")


def _hang(client, model, door):
    time.sleep(3600)


def _die(client, model, door):
    os._exit(3)


def _leave(client, model, door):
    sys.exit(3)


def _earn_nothing(client, model, door):
    return None


def _not_a_number(client, model, door):
    return float("nan")


def _earn_twice(client, model, door):
    post_reward(**door, reward=1.0)
    return 0.5


def _crash_after(client, model, door):
    post_reward(**door, reward=0.25, won=True)
    raise AgentBroke("after the reward")


def _overrun(client, model, door):
    for _ in range(99):
        _ask(client, model, "again")


def _too_long(client, model, door):
    _ask(client, model, "word " * 4000)


def _recover(client, model, door):
    try:
        _too_long(client, model, door)
    except openai.BadRequestError:
        _ask(client, model, "in short")
    return 1.0


DEEDS = {
    "crash": _crash,
    "hang": _hang,
    "die": _die,
    "leave": _leave,
    "earn nothing": _earn_nothing,
    "not a number": _not_a_number,
    "earn twice": _earn_twice,
    "crash after": _crash_after,
    "overrun": _overrun,
    "too long": _too_long,
    "recover": _recover,
}


def deeds(split):
    """Return one task for each kind of misbehaviour."""
    return [
        {"task_id": f"{split}/{deed}", "data_source": "deeds", "deed": deed}
        for deed in ["play well", *DEEDS]
    ]


def misbehave(task, seed, base_url, api_key, model):
    """Run one turn, then the misbehaviour of the task."""
    client = _client(base_url, api_key)
    _ask(client, model, "hello")
    deed = DEEDS.get(task["deed"], lambda *_: 1.0)
    return deed(client, model, {"base_url": base_url, "api_key": api_key})


async def play_asynchronously(task, seed, base_url, api_key, model):
    """Send two requests at once, then report the reward."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    replies = [
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": f"question {number}"}]
        )
        for number in range(2)
    ]
    await asyncio.gather(*replies)
    await client.close()
    return 0.5


def send_sampling_values(task, seed, base_url, api_key, model):
    """Send the sampling parameters of training with one request."""
    options = {"temperature": 0.7, "top_p": 1.0, "extra_body": {"top_k": -1}}
    _ask(_client(base_url, api_key), model, "hello", **options)
    return 1.0


def shrug(task, seed, base_url, api_key, model):
    """Continue after every response of the endpoint, also after errors."""
    try:
        _ask(_client(base_url, api_key), model, "hello")
    except openai.APIError:
        return 1.0
    return 1.0


def linger(task, seed, base_url, api_key, model):
    """Continue the chat, and end only when ``LEAVE`` is set."""
    shrug(task, seed, base_url, api_key, model)
    LEAVE.wait(60)
    LINGERED.append(task["task_id"])
    return 1.0


def lose_patience(task, seed, base_url, api_key, model):
    """Close the connection of the second request, and wait for the third."""
    client = _client(base_url, api_key)
    reply = _ask(client, model, "hello").choices[0].message.content
    texts = ("hello", reply, "again")
    try:
        _ask(client.with_options(timeout=0.3, max_retries=0), model, *texts)
    except openai.APITimeoutError:
        _ask(client, model, *texts)
    return 1.0


def leave_one_behind(task, seed, base_url, api_key, model):
    """Report the reward while a request is running."""
    client = _client(base_url, api_key).with_options(max_retries=0)

    def ask():
        try:
            _ask(client, model, "hello")
        except openai.AuthenticationError as error:
            REFUSED.append(error)

    waiting = threading.Thread(target=ask)
    waiting.start()
    time.sleep(0.5)
    post_reward(base_url, api_key, 1.0)
    waiting.join()


def break_once(task, seed, **door):
    """Run an episode, but fail the first time that a task starts at 0."""
    if task["start"] == 0 and task["task_id"] not in BROKEN:
        BROKEN.add(task["task_id"])
        raise AgentBroke("at 0")
    return play(task, seed, **door)
