"""The endpoint server over HTTP: keys, rewards, and errors in OpenAI's form."""

import asyncio
import contextlib
import gzip
import socket
from typing import Any

import aiohttp
import openai
import pytest

from agent_system.endpoint.chat_completions import Reply, RequestRefusedError, SamplingRules
from agent_system.endpoint.reward_call import RewardRefusedError, post_reward
from agent_system.endpoint.server import EndpointServer
from tests.helpers.refusals import mentions
from verl.utils.sampling import StopReason

HELLO: Any = {"role": "user", "content": "hello"}
LENGTHS = (3, 5)


class FakeSession:
    """A session that gives every request the same reply."""

    def __init__(self):
        self.rules = SamplingRules(1.0, 1.0, -1, 16)
        self.requests = []
        self.finished = []
        self.error = None

    async def chat(self, request):
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        return Reply("hi", StopReason.LENGTH, *LENGTHS)

    def finish(self, reward, won):
        self.finished.append((reward, won))


def serve(scenario, count: int = 1):
    """Run ``scenario(addresses, sessions)`` in a thread, next to a server with these sessions."""

    async def main():
        server = EndpointServer()
        sessions = [FakeSession() for _ in range(count)]
        try:
            async with contextlib.AsyncExitStack() as stack:
                addresses = [
                    await stack.enter_async_context(server.register_session(session))
                    for session in sessions
                ]
                await asyncio.to_thread(scenario, addresses, sessions)
        finally:
            await server.close()
            await server.close()

    asyncio.run(main())


def make_client(address, **changes):
    options = {"base_url": address.base_url, "api_key": address.api_key, **changes}
    return openai.OpenAI(**options)


def chat(address, client=None, **options):
    client = client or make_client(address)
    return client.chat.completions.create(model=address.model, messages=[HELLO], **options)


def test_reply_has_the_form_of_openai():
    def scenario(addresses, sessions):
        reply = chat(addresses[0], max_tokens=7, stop="x")
        (choice,) = reply.choices
        assert (choice.message.role, choice.message.content) == ("assistant", "hi")
        assert choice.finish_reason == "length" and reply.model == "policy"
        usage = reply.usage
        counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
        assert counts == (3, 5, 8)
        assert (sessions[0].requests[0].max_tokens, sessions[0].requests[0].stop) == (7, ("x",))
        assert [model.id for model in make_client(addresses[0]).models.list()] == ["policy"]

    serve(scenario)


def test_key_selects_its_session_and_other_keys_are_refused():
    def scenario(addresses, sessions):
        first, second = addresses
        assert first.api_key != second.api_key and len(first.api_key) > 40
        chat(second)
        assert [len(session.requests) for session in sessions] == [0, 1]
        for invalid_key in ("policy", first.api_key[:-1], first.api_key.swapcase()):
            client = make_client(first, api_key=invalid_key)
            for call in (lambda c: chat(first, c), lambda c: c.models.list()):
                with pytest.raises(openai.AuthenticationError) as refusal:
                    call(client)
                assert refusal.value.code == "invalid_api_key"
        with pytest.raises(RewardRefusedError, check=mentions("api_key")):
            post_reward(first.base_url, "wrong", 1.0)
        assert [session.finished for session in sessions] == [[], []]

    serve(scenario, count=2)


def test_reward_ends_the_session_once():
    def scenario(addresses, sessions):
        address = (addresses[0].base_url, addresses[0].api_key)
        post_reward(*address, -0.5, won=True)
        with pytest.raises(RewardRefusedError, check=mentions("api_key")):
            post_reward(*address, 1.0)
        with pytest.raises(openai.AuthenticationError):
            chat(addresses[0])
        assert sessions[0].finished == [(-0.5, True)]

    serve(scenario)


def test_openai_client_can_post_the_reward():
    def scenario(addresses, sessions):
        client = make_client(addresses[0])
        client.post("/reward", body={"reward": 2}, cast_to=object)
        assert sessions[0].finished == [(2.0, True)]

    serve(scenario)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "reward=None: "),
        ({"reward": "1"}, "reward='1': "),
        ({"reward": 1e300}, "reward=1e+300: "),
        ({"reward": 1, "won": "yes"}, "won='yes'"),
        ({"reward": 1, "score": 2}, "score=2: "),
        ([1], "body=[1]: "),
    ],
)
def test_invalid_reward_is_refused_and_the_session_continues(body, problem):
    def scenario(addresses, sessions):
        client = make_client(addresses[0])
        with pytest.raises(openai.BadRequestError) as refusal:
            client.post("/reward", body=body, cast_to=object)
        message = refusal.value.message
        assert problem in message and "; allowed: " in message and "; fix: " in message
        assert sessions[0].finished == [] and chat(addresses[0]).choices

    serve(scenario)


def test_refusals_name_the_key_and_are_not_retried():
    def scenario(addresses, sessions):
        with pytest.raises(openai.BadRequestError) as refusal:
            chat(addresses[0], temperature=0.2)
        assert refusal.value.param == "temperature" and sessions[0].requests == []
        with pytest.raises(openai.NotFoundError) as unknown:
            make_client(addresses[0]).chat.completions.create(model="gpt-4o", messages=[HELLO])
        assert unknown.value.code == "model_not_found"
        sessions[0].error = RequestRefusedError("the engine failed", status=500)
        with pytest.raises(openai.InternalServerError):
            chat(addresses[0])
        assert len(sessions[0].requests) == 1

    serve(scenario)


def test_stream_is_refused():
    def scenario(addresses, sessions):
        with pytest.raises(openai.BadRequestError, check=mentions("stream=True", "False")):
            chat(addresses[0], stream=True)

    serve(scenario)


def test_other_calls_and_invalid_bodies_are_refused():
    def scenario(addresses, sessions):
        with pytest.raises(openai.NotFoundError, check=mentions("GET /v1/files", "POST")):
            make_client(addresses[0]).files.list()
        asyncio.run(_send_invalid_bodies(addresses[0]))

    serve(scenario)


async def _send_invalid_bodies(address):
    headers = {"Authorization": f"Bearer {address.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        compressed = gzip.compress(b" " * 10**6)
        for body, extra in (
            (b"{", {}),
            (b"\xff\xfe", {}),
            (b"", {}),
            (b"[" * 10**6, {}),
            (compressed, {"Content-Encoding": "gzip"}),
            (b"not compressed", {"Content-Encoding": "gzip"}),
            (b"a" * 10**6, {"Content-Type": "application/json; charset=punycode"}),
            (b"x", {"Content-Type": "application/json; charset=zip"}),
        ):
            url = f"{address.base_url}/chat/completions"
            async with session.post(url, data=body, headers=extra) as response:
                error = (await response.json())["error"]
                assert response.status == 400 and error["type"] == "invalid_request_error"
                assert error["message"].startswith("body: ")


def test_server_listens_only_on_the_loopback_address():
    def scenario(addresses, sessions):
        port = int(addresses[0].base_url.split(":")[2].split("/")[0])
        assert addresses[0].base_url == f"http://127.0.0.1:{port}/v1"
        # Every address of 127/8 is local: a server on all addresses would accept this connection.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5).close()

    serve(scenario)


def test_key_is_invalid_after_its_session():
    async def main():
        server = EndpointServer()
        async with server.register_session(FakeSession()) as ended:
            pass
        async with server.register_session(FakeSession()) as address:
            assert address.base_url == ended.base_url and address.api_key != ended.api_key
            with pytest.raises(openai.AuthenticationError):
                await asyncio.to_thread(chat, ended)
        await server.close()

    asyncio.run(main())
