"""Tests of tools: parallel calls, errors as observations, graded answers, functions and MCP."""

import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent_system.environments.env_package.tools import example
from agent_system.environments.env_package.tools.calls import (
    Call,
    MalformedCallError,
    find_call_texts,
    format_call,
    format_response,
    parse_action_with_calls,
    parse_call,
    parse_tool_response,
)
from agent_system.environments.env_package.tools.package import PACKAGE, ToolPrompts, ToolsEnv
from agent_system.environments.env_package.tools.toolbox import PythonTool
from agent_system.environments.env_registry import read_env_settings
from agent_system.environments.manager import make_envs
from agent_system.environments.pool.environment_pool import EnvFailure, EnvironmentPool
from tests.helpers.number_line_world import make_config
from tests.helpers.refusals import mentions, missing_parts
from tests.helpers.solvability import collect_successes, follow_script
from verl.config.schema.env import EnvConfig
from verl.config.settings import ConfigError
from verl.trainer.launch.extensions import load_config
from verl.utils.limits import TimeLimitError

read = PACKAGE.read_settings
ROOT = Path(__file__).resolve().parents[5]
RESPONSE = re.compile(r"<tool_response>(.*?)</tool_response>")
SMALL = {"train_tasks": 24, "val_tasks": 6, "placement": "inline"}


def make_policy(task):
    """Return a policy with one turn of lookups, one of calculation and one with the answer."""
    extra = task["extra_info"]
    lookups = [format_call("lookup", {"item": i, "field": f}) for i, f in extra["lookups"]]
    compute = format_call("calculator", {"expression": extra["sum"]})
    return follow_script(["".join(lookups), compute, f"<answer>{task['ground_truth']}</answer>"])


def start_episode(section, split="train"):
    env = ToolsEnv(read(section))
    task = PACKAGE.tasks(env.settings, split)[0]
    return env, env.reset(task, 0), task


def read_results(observation):
    return [json.loads(text) for text in RESPONSE.findall(observation.text)]


@pytest.mark.parametrize(("history", "levels"), [("append", False), ("window", True)])
def test_example_is_solved_through_the_collector(history, levels):
    data = collect_successes("tools", make_policy, history=history, levels=levels, **SMALL)
    assert (data.non_tensor_batch["episode_rewards"] == 1.0).all()


def test_train_and_validation_have_disjoint_pairs():
    train, val = make_envs(make_config("tools", kwargs={**SMALL, "train_tasks": 400}, n=2))
    pairs = [{frozenset(t["task_id"].split("-")[1:3]) for t in e.task_list} for e in (train, val)]
    assert len(train.task_list) == 400 and len(val.task_list) == 6 and not pairs[0] & pairs[1]


def test_every_question_is_answered_by_its_lookups():
    for task in example.list_tasks(read({}), "train")[:60]:
        extra = task["extra_info"]
        looked_up = {str(example.lookup(item, field)) for item, field in extra["lookups"]}
        assert looked_up <= set(re.findall(r"\d+", extra["sum"])), task
        assert str(example.calculator(extra["sum"])) == task["ground_truth"]


def test_parallel_calls_keep_order_and_errors_are_observations():
    env, _, _ = start_episode({})
    action = "".join(
        [
            format_call("lookup", {"item": "lamp", "field": "price"}),
            format_call("lookup", {"item": "dragon", "field": "price"}),
            format_call("lookup", {"item": "lamp", "field": "colour"}),
            format_call("fly", {"to": "the moon"}),
            "<tool_call>{broken</tool_call>",
            format_call("calculator", {"expression": "2 * 3"}),
        ]
    )
    observation, reward, done, info = env.step(action)
    results = read_results(observation)
    price = example.generate_item_table()["lamp"]["price"]
    assert results[0] == {"name": "lookup", "result": price}
    errors = [result.get("error") for result in results]
    assert "KeyError" in errors[1] and "'dragon'" in errors[1]
    assert not missing_parts(errors[2], "lookup", "field")
    assert not missing_parts(errors[3], "'fly'", "calculator, lookup")
    assert errors[4] and "name" not in results[4]
    assert results[5] == {"name": "calculator", "result": 6}
    assert (reward, done, info) == (0.0, False, {"won": False, "is_action_valid": False})


def test_function_error_is_a_valid_action():
    env, start, task = start_episode({})
    observation, *_, info = env.step(format_call("calculator", {"expression": "1 / 0"}))
    assert "ZeroDivisionError" in observation.text and info["is_action_valid"]
    assert start.text in observation.state
    _, reward, done, info = env.step("I believe it is <answer>-1</answer>")
    assert (reward, done, info["won"]) == (0.0, True, False)
    env.reset(task, 0)
    assert env.step(f"<answer>{task['ground_truth']}</answer>")[1:3] == (1.0, True)


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')",
        "().__class__",
        "9 ** 9",
        "10000000 * 10000000",
        "x",
        "1 +",
        "'a' * 9",
        "",
    ],
)
def test_calculator_refuses_other_expressions(expression):
    env, _, _ = start_episode({})
    results = read_results(env.step(format_call("calculator", {"expression": expression}))[0])
    assert set(results[0]) == {"name", "error"}


@pytest.mark.parametrize(
    ("text", "action", "well_formed"),
    [
        ("<think>2 + 2</think> 4", "4", True),
        ("", "", False),
        ("<think>never ends", "", False),
        ('call <tool_call>{"name": "f"}</tool_call>?</think> 4', "4", True),
        ('<tool_response>7</think><tool_call>{"name": "f"}', '<tool_call>{"name": "f"}', False),
        ("<think>a</think>b</think>", "", False),
        ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', True),
        ('<tool_call>{"name": "f"}', '<tool_call>{"name": "f"}', False),
        ("<level>2</level><think>so</think><action>4</action>", "4", True),
        (
            "<tool_call>{}</tool_call><tool_response>7</tool_response> 7",
            "<tool_call>{}</tool_call>",
            True,
        ),
    ],
)
def test_thoughts_and_invented_results_are_removed(text, action, well_formed):
    assert parse_action_with_calls(text) == (action, well_formed)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        '{"arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "{"}',
        "[" * 100_000,
        json.dumps({"name": "f", "arguments": "[" * 100_000}),
    ],
)
def test_text_that_is_no_call_is_refused(text):
    with pytest.raises(MalformedCallError):
        parse_call(text)


def test_arguments_may_be_a_json_string():
    assert parse_call('{"name": "f", "arguments": "{\\"a\\": 1}"}') == Call("f", {"a": 1})


def sample(count: int, names: list[str] | None = None, loud: bool = False) -> str:
    """Says it."""
    return f"{count} {names} {loud}"


def test_written_call_is_read_with_any_argument_names():
    arguments = {"name": "lamp", "arguments": [1, {"a": None}]}
    call = f"text {format_call('lookup', arguments)}"
    assert ToolPrompts(read(SMALL)).format_call("lookup", arguments) in call
    assert parse_call(find_call_texts(call)[0]) == Call("lookup", arguments)


@pytest.mark.parametrize(
    "text",
    [
        "<think>a</think>b",
        "<level>2</level>",
        "<action>look</action>",
        "a</tool_call>b",
        "<tool_call>{}</tool_call>",
        "<tool_response>x",
        "a < b <i>\\u003cthink> \\<think>",
    ],
)
@pytest.mark.parametrize("before", ["", "<think>hm</think>"])
def test_tags_in_arguments_do_not_change_a_call(text, before):
    """With ``env.history=chat`` a call in the format of the model is passed on by ``format_call``.

    The environment reads tags around calls, and must not find any in their arguments.
    """
    calls = [Call("write", {"text": text, text: [text]}), Call("look", {})]
    written = before + "\n".join(format_call(call.name, call.arguments) for call in calls)
    action, is_well_formed = PACKAGE.project(written)
    assert is_well_formed
    assert [parse_call(call_text) for call_text in find_call_texts(action)] == calls


def test_results_of_tools_are_text_that_tokenizers_take():
    """A file name that is no UTF-8 has lone surrogates in Python."""
    for result, error in ((["\udcff"], None), ("caf\udce9", None), (None, "no file \udcff")):
        response = format_response("look", result, error, 100)
        assert parse_tool_response(response).encode()
    assert parse_tool_response(format_response("look", "caf\udce9", None, 100)) == "caf?"


def test_schema_follows_the_signature():
    tool = PythonTool(sample, None)
    function = tool.openai_schema["function"]
    assert (function["name"], function["description"]) == ("sample", "Says it.")
    parameters = function["parameters"]
    assert parameters["required"] == ["count"] and "title" not in json.dumps(parameters)
    assert parameters["properties"]["count"] == {"type": "integer"}
    assert parameters["properties"]["loud"] == {"default": False, "type": "boolean"}
    assert tool.run({"count": 1, "names": ["a"]}) == "1 ['a'] False"
    with pytest.raises(MalformedCallError, check=mentions("sample", "count: ", "more: ")):
        tool.run({"more": 1})


USER_FUNCTIONS = '''
import time


def wait(seconds: float) -> str:
    """Waits."""
    time.sleep(seconds)
    return "done"


def shout(word: str) -> str:
    """Loud."""
    return word.upper() * 100


def greedy(*words):
    """No names."""
'''


def test_user_provided_functions_have_time_and_length_limits(tmp_path):
    (tmp_path / "own.py").write_text(USER_FUNCTIONS)
    import_paths = [f"{tmp_path}/own.py:{name}" for name in ("wait", "shout")]
    section = {
        "functions": import_paths,
        "call_timeout_s": 0.2,
        "max_chars": 30,
        "max_calls": 2,
        "schemas": {"shout": {"type": "object"}},
    }
    env, _, _ = start_episode(section)
    calls = [format_call("wait", {"seconds": 30}), format_call("shout", {"word": "ab"})]
    results = read_results(env.step("".join([*calls, calls[1]]))[0])
    assert "0.2 s" in results[0]["error"]
    assert results[1]["result"] == f"{'AB' * 15} ... (170 characters cut)"
    assert not missing_parts(results[2]["error"], 2)
    assert env.toolbox.tools["shout"].openai_schema["function"]["parameters"] == {"type": "object"}
    system_prompt = PACKAGE.prompts(env.settings).system(False)
    assert (
        system_prompt is not None
        and '"name": "wait"' in system_prompt
        and "lookup" not in system_prompt
    )


@pytest.mark.parametrize(
    ("import_paths", "error", "parts"),
    [
        (["own.py"], ValueError, ["functions='own.py'", "own.py:NAME"]),
        (["nowhere.py:f"], FileNotFoundError, ["functions='nowhere.py:f'"]),
        (["{file}:howl"], AttributeError, [":howl'"]),
        (["{file}:greedy"], TypeError, ["greedy", "*words"]),
        (["{file}:wait", "{file}:wait"], ValueError, ["'wait'"]),
    ],
)
def test_wrong_import_paths_of_functions_are_refused(tmp_path, import_paths, error, parts):
    file = tmp_path / "own.py"
    file.write_text(USER_FUNCTIONS)
    with pytest.raises(error, check=mentions(*parts)):
        ToolsEnv(
            read({"functions": [import_path.format(file=file) for import_path in import_paths]})
        )


def test_questions_from_files_keep_their_system_message(tmp_path):
    rows = [
        {
            "prompt": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "2 + 2?"},
            ],
            "reward_model": {"ground_truth": "4"},
        }
    ]
    for split in ("train", "val"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {f"{split}_files": [str(tmp_path / f"{split}.jsonl")] for split in ("train", "val")}
    env, start, task = start_episode(files)
    assert (start.text, task["task_id"]) == ("2 + 2?", "tools/train/0")
    assert start.opening[0]["content"].startswith("Be brief.\n\nYou answer a question")
    assert env.step(r"It is \boxed{4}")[1:3] == (1.0, True)


def test_max_steps_equals_that_of_other_environments():
    sokoban = load_config("ppo_trainer", ["env.env_name=sokoban"])
    config = load_config("ppo_trainer", ["env.env_name=tools"])
    assert config.env.max_steps == sokoban.env.max_steps > 1


def test_answers_are_graded_with_time_limit_and_parts(tmp_path):
    grader = tmp_path / "grade.py"
    grader.write_text(
        "import time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    while solution_str == 'hang': time.sleep(0.01)\n"
        "    return {'score': 0.5, 'style': 1.0}\n"
    )
    env, _, task = start_episode({**SMALL, "grade_s": 0.1, "reward": {"path": str(grader)}})
    _, reward, done, info = env.step("something")
    assert (reward, done) == (0.5, True)
    assert info["reward_parts"] == {"score": 0.5, "style": 1.0}
    with pytest.raises(TimeLimitError, check=mentions(task["task_id"], "0.1 s")):
        env.step("hang")


def make_mcp_section(**server):
    command = {"command": sys.executable, "args": ["-m", "tests.helpers.mcp_server"]}
    return {"mcp_servers": [{**command, "env": {"PYTHONPATH": str(ROOT)}, **server}]}


def test_mcp_tools_are_called_and_the_server_process_ends():
    pytest.importorskip("mcp")
    env, _, _ = start_episode({**make_mcp_section(), "call_timeout_s": 60.0})
    assert sorted(env.toolbox.tools) == ["add", "fail", "get_memory_limit", "sleep"]
    first_tool = next(iter(env.toolbox.tools.values()))
    function = first_tool.openai_schema["function"]
    assert function["name"] == "add" and set(function["parameters"]["required"]) == {"a", "b"}
    calls = [
        format_call("add", {"a": 1, "b": 2}),
        format_call("fail", {"reason": "too late"}),
        format_call("add", {"a": "x"}),
    ]
    results = read_results(env.step("".join(calls))[0])
    assert results[0] == {"name": "add", "result": 3}
    assert "too late" in results[1]["error"] and "error" in results[2]
    env.settings = env.settings.model_copy(update={"call_timeout_s": 0.5})
    late = read_results(env.step(format_call("sleep", {"seconds": 60}))[0])
    assert late == [{"name": "sleep", "error": late[0]["error"]}] and "0.5 s" in late[0]["error"]
    env.close()
    assert not find_mcp_servers()


def find_mcp_servers() -> list[int]:
    """Return the ids of the MCP servers that this process started."""
    command = ["ps", "-eo", "pid,ppid,args"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=20)
    lines = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
    return [
        int(pid)
        for pid, parent, args in lines
        if parent == str(os.getpid()) and "tests.helpers.mcp_server" in args
    ]


def test_dead_mcp_server_fails_its_trajectory_and_is_replaced():
    """Its calls are no errors of the policy: without a server every later episode would fail."""
    pytest.importorskip("mcp")
    section = {**make_mcp_section(), "call_timeout_s": 60.0}
    task = PACKAGE.tasks(read(section), "train")[0]
    call = format_call("add", {"a": 1, "b": 2})

    async def run_episodes() -> tuple[EnvFailure, str]:
        async with EnvironmentPool("tools", section, placement="inline") as pool:
            async with pool.open_session() as env:
                await env.reset(task, 0)
                for process_id in find_mcp_servers():
                    os.kill(process_id, signal.SIGKILL)
                with pytest.raises(EnvFailure) as failure:
                    await env.step(call)
            async with pool.open_session() as env:
                await env.reset(task, 0)
                return failure.value, (await env.step(call))[0].text

    failure, text = asyncio.run(run_episodes())
    assert failure.kind == "error" and "ToolServerLostError" in failure.detail
    assert '"result": 3' in text and not find_mcp_servers()


def test_mcp_server_does_not_inherit_the_memory_limit():
    pytest.importorskip("mcp")
    code = (
        "import json, subprocess, sys\n"
        "from agent_system.environments.env_package.tools.package import PACKAGE, ToolsEnv\n"
        "from verl.utils.limits import limit_memory\n"
        "settings = PACKAGE.read_settings(json.loads(sys.argv[1]))\n"
        "limit_memory(4)\n"
        "env = ToolsEnv(settings)\n"
        "print(env.toolbox.tools['get_memory_limit'].run({}))\n"
        "env.close()"
    )
    args = [sys.executable, "-c", code, json.dumps(make_mcp_section())]
    process = subprocess.run(args, capture_output=True, text=True, timeout=120, cwd=ROOT)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    assert process.stdout.split() == [str(hard)], process.stderr


@pytest.mark.parametrize(
    ("server", "parts"),
    [
        ({"command": "/no/such/program"}, ["/no/such/program"]),
        ({"args": ["-c", "pass"]}, ["python"]),
        ({"tools": ["add", "fly"]}, ["fly", "add, fail, sleep, get_memory_limit"]),
    ],
)
def test_mcp_server_without_the_required_tools_is_refused(server, parts):
    pytest.importorskip("mcp")
    with pytest.raises(RuntimeError, check=mentions(*parts)):
        ToolsEnv(read(make_mcp_section(**server)))


@pytest.mark.parametrize(
    ("section", "is_refused"),
    [
        ({}, False),
        ({"functions": ["own.py:area"]}, True),
        ({"functions": ["agent_system.environments.env_package.tools.example:calculator"]}, True),
        ({"functions": ["agent_system.environments.env_package.tools.example:lookup"]}, False),
        ({"mcp_servers": [{"command": "python"}]}, True),
        ({"functions": ["own.py:area"], "train_files": ["q.jsonl"]}, False),
        ({"functions": ["own.py:area"], "val_files": ["q.jsonl"]}, False),
    ],
)
def test_example_questions_are_refused_without_the_lookup_function(section, is_refused):
    env_config = EnvConfig(env_name="tools", kwargs=section)
    if is_refused:
        with pytest.raises(ConfigError, check=mentions("train_files")):
            read_env_settings(env_config)
    else:
        assert read_env_settings(env_config).max_steps == env_config.max_steps
