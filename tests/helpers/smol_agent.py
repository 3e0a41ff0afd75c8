"""Agent of the library ``smolagents``: it writes and runs Python until it knows the answer."""

from smolagents import CodeAgent, OpenAIModel


def tasks(split):
    """Return one question per split."""
    numbers = (6, 7) if split == "train" else (8, 9)
    question = "What is {} times {}?".format(*numbers)
    product = numbers[0] * numbers[1]
    return [{"task_id": split, "question": question, "answer": product}]


def play(task, seed, base_url, api_key, model):
    """Ask the agent and return 1 for the correct answer."""
    policy = OpenAIModel(model, api_base=base_url, api_key=api_key)
    agent = CodeAgent(tools=[], model=policy, max_steps=3, verbosity_level=0)
    return float(agent.run(task["question"]) == task["answer"])
