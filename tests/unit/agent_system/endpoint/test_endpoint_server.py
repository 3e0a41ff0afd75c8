"""The server as clients meet it: keys, rewards, errors in OpenAI's form."""

import asyncio
import contextlib
import socket
from typing import Any

import aiohttp
import openai
import pytest

from agent_system.endpoint.chat_request import SamplingRules
from agent_system.endpoint.forms import Reply, RequestRefused
from agent_system.endpoint.reward_call import RewardRefused, post_reward
from agent_system.endpoint.server import EndpointServer
from tests.helpers.refusals import mentions
from verl.utils.sampling import StopReason

HELLO: Any = {"role": "user", "content": "hello"}
LENGTHS = (3, 5)


class Host:
    """A play that answers everything alike."""

    def __init__(self):
        self.rules = SamplingRules(1.0, 1.0, -1, 16)
        self.asked = []
        self.finished = []
        self.error = None

    async def chat(self, request):
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        return Reply("hi", StopReason.LENGTH, *LENGTHS)

    def finish(self, reward, won):
        self.finished.append((reward, won))


def served(scenario, guests: int = 1):
    """Run ``scenario(doors, hosts)`` in a thread, beside a server with plays of these hosts."""

    async def main():
        server = EndpointServer()
        hosts = [Host() for _ in range(guests)]
        try:
            async with contextlib.AsyncExitStack() as stack:
                doors = [
                    await stack.enter_async_context(server.register_session(host)) for host in hosts
                ]
                await asyncio.to_thread(scenario, doors, hosts)
        finally:
            await server.close()
            await server.close()

    asyncio.run(main())


def client_of(door, **changes):
    options = {"base_url": door.base_url, "api_key": door.api_key, **changes}
    return openai.OpenAI(**options)


def chat(door, client=None, **options):
    client = client or client_of(door)
    return client.chat.completions.create(model=door.model, messages=[HELLO], **options)


def test_a_client_is_answered_in_openais_form():
    def scenario(doors, hosts):
        answer = chat(doors[0], max_tokens=7, stop="x")
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content) == ("assistant", "hi")
        assert choice.finish_reason == "length" and answer.model == "policy"
        usage = answer.usage
        counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
        assert counts == (3, 5, 8)
        assert (hosts[0].asked[0].max_tokens, hosts[0].asked[0].stop) == (7, ("x",))
        assert [model.id for model in client_of(doors[0]).models.list()] == ["policy"]

    served(scenario)


def test_a_key_names_its_play_and_no_other_opens_the_door():
    def scenario(doors, hosts):
        mine, yours = doors
        assert mine.api_key != yours.api_key and len(mine.api_key) > 40
        chat(yours)
        assert [len(host.asked) for host in hosts] == [0, 1]
        for wrong in ("policy", mine.api_key[:-1], mine.api_key.swapcase()):
            stranger = client_of(mine, api_key=wrong)
            for call in (lambda c: chat(mine, c), lambda c: c.models.list()):
                with pytest.raises(openai.AuthenticationError) as refused:
                    call(stranger)
                assert refused.value.code == "invalid_api_key"
        with pytest.raises(RewardRefused, check=mentions("api_key")):
            post_reward(mine.base_url, "wrong", 1.0)
        assert [host.finished for host in hosts] == [[], []]

    served(scenario, guests=2)


def test_a_reward_ends_the_play_once():
    def scenario(doors, hosts):
        place = (doors[0].base_url, doors[0].api_key)
        post_reward(*place, -0.5, won=True)
        with pytest.raises(RewardRefused, check=mentions("api_key")):
            post_reward(*place, 1.0)
        with pytest.raises(openai.AuthenticationError):
            chat(doors[0])
        assert hosts[0].finished == [(-0.5, True)]

    served(scenario)


def test_the_openai_client_can_post_the_reward_itself():
    def scenario(doors, hosts):
        client = client_of(doors[0])
        client.post("/reward", body={"reward": 2}, cast_to=object)
        assert hosts[0].finished == [(2.0, True)]

    served(scenario)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "reward=None: "),
        ({"reward": "1"}, "reward='1': "),
        ({"reward": 1e300}, "reward=1e+300: "),
        ({"reward": 1, "won": "yes"}, "won='yes'"),
        ({"reward": 1, "score": 2}, "score=2: "),
        ([1], "body=[1]: "),
    ],
)
def test_what_is_no_reward_is_refused_and_the_play_goes_on(body, said):
    def scenario(doors, hosts):
        client = client_of(doors[0])
        with pytest.raises(openai.BadRequestError) as refused:
            client.post("/reward", body=body, cast_to=object)
        message = refused.value.message
        assert said in message and "; allowed: " in message and "; fix: " in message
        assert hosts[0].finished == [] and chat(doors[0]).choices

    served(scenario)


def test_refusals_name_the_key_and_are_not_tried_again():
    def scenario(doors, hosts):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(doors[0], temperature=0.2)
        assert refused.value.param == "temperature" and hosts[0].asked == []
        with pytest.raises(openai.NotFoundError) as unknown:
            client_of(doors[0]).chat.completions.create(model="gpt-4o", messages=[HELLO])
        assert unknown.value.code == "model_not_found"
        hosts[0].error = RequestRefused("the engine failed", status=500)
        with pytest.raises(openai.InternalServerError, match="the engine failed"):
            chat(doors[0])
        assert len(hosts[0].asked) == 1

    served(scenario)


def test_a_stream_is_refused():
    def scenario(doors, hosts):
        with pytest.raises(openai.BadRequestError, check=mentions("stream=True", "False")):
            chat(doors[0], stream=True)

    served(scenario)


def test_other_calls_and_broken_bodies_are_refused_in_the_same_form():
    def scenario(doors, hosts):
        with pytest.raises(openai.NotFoundError, check=mentions("GET /v1/files", "POST")):
            client_of(doors[0]).files.list()
        asyncio.run(_sends_garbage(doors[0]))

    served(scenario)


async def _sends_garbage(door):
    headers = {"Authorization": f"Bearer {door.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for garbage in (b"{", b"\xff\xfe", b""):
            url = f"{door.base_url}/chat/completions"
            async with session.post(url, data=garbage) as answer:
                error = (await answer.json())["error"]
                assert answer.status == 400 and error["type"] == "invalid_request_error"
                assert error["message"].startswith("body: not JSON")


def test_it_listens_on_the_loopback_alone():
    def scenario(doors, hosts):
        port = int(doors[0].base_url.split(":")[2].split("/")[0])
        assert doors[0].base_url == f"http://127.0.0.1:{port}/v1"
        # Every address of 127/8 is the machine's own: a server on all addresses would answer here.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5).close()

    served(scenario)


def test_keys_are_void_when_their_play_is_over():
    async def main():
        server = EndpointServer()
        async with server.register_session(Host()) as door:
            pass
        async with server.register_session(Host()) as other:
            assert other.base_url == door.base_url and other.api_key != door.api_key
            with pytest.raises(openai.AuthenticationError):
                await asyncio.to_thread(chat, door)
        await server.close()

    asyncio.run(main())
