"""Modules that are mutated, and the fast tests of each."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

# Files that are not mutated, because they contain only names and annotations.
UNMUTATED_FILES = {"__init__.py", "shapes.py"}

# Libraries that are imported before the first fork. They must not start threads or import packages
# of this repository.
LIBRARIES = (
    "beartype",
    "hypothesis",
    "jaxtyping",
    "numpy",
    "omegaconf",
    "pydantic",
    "ray",
    "tensordict",
    "torch",
    "transformers",
)


@dataclass(frozen=True)
class Target:
    """Modules (glob patterns relative to the checkout) and the tests that must kill the mutants."""

    name: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]
    deselected_tests: tuple[str, ...] = ()

    def list_modules(self) -> list[Path]:
        """Return the paths of the modules that exist, sorted."""
        module_paths = {path for pattern in self.modules for path in ROOT.glob(pattern)}
        return sorted(path for path in module_paths if path.name not in UNMUTATED_FILES)

    def list_test_paths(self) -> list[str]:
        """Return the test files and folders that exist, relative to the checkout."""
        return [test for test in self.tests if (ROOT / test).exists()]


TARGETS = (
    Target(
        "algos",
        ("verl/algos/*.py",),
        ("tests/unit/verl/algos", "tests/property/test_core_algos_properties.py"),
    ),
    Target(
        "method",
        (
            "rlvcr/research/audit.py",
            "rlvcr/core_rlvcr.py",
            "rlvcr/level_metrics.py",
            "rlvcr/research/level_rules.py",
            "rlvcr/levels.py",
            "rlvcr/thinking.py",
            "rlvcr/token_bytes.py",
        ),
        (
            "tests/unit/rlvcr/research/test_audit.py",
            "tests/unit/rlvcr/test_core_rlvcr.py",
            "tests/unit/rlvcr/test_level_groups.py",
            "tests/unit/rlvcr/test_level_metrics.py",
            "tests/unit/rlvcr/test_level_prompts.py",
            "tests/unit/rlvcr/research/test_level_rules.py",
            "tests/unit/rlvcr/test_levels.py",
            "tests/unit/rlvcr/test_rlvcr_rules.py",
            "tests/unit/rlvcr/test_thinking.py",
            "tests/unit/rlvcr/test_token_bytes.py",
        ),
        # This test takes 15 seconds to build the converter of a real tokenizer.
        ("test_a_real_tokenizer_with_tags_of_several_tokens",),
    ),
    Target(
        "seams",
        # rlvcr/report_sections.py is not mutated: it contains labels and colours, and a test that
        # repeats a label tests nothing.
        ("rlvcr/records.py", "rlvcr/settings.py"),
        (
            "tests/unit/rlvcr/test_records.py",
            "tests/unit/rlvcr/test_rlvcr_settings.py",
            "tests/unit/verl/record/test_report.py",
            "tests/unit/verl/test_report_sections.py",
            "tests/unit/verl/config/test_plugins.py",
        ),
    ),
    Target(
        "services",
        ("rlvcr/alternatives.py", "rlvcr/score_table.py", "rlvcr/scoring.py"),
        # test_forced_levels and test_rlvcr_rules_scored are not used: they generate with a model
        # for a minute. test_score_rows and test_score_table check the same numbers.
        (
            "tests/unit/rlvcr/test_alternatives.py",
            "tests/unit/rlvcr/test_score_rows.py",
            "tests/unit/rlvcr/test_score_table.py",
            "tests/unit/rlvcr/test_scoring.py",
        ),
    ),
    Target(
        "tokens",
        (
            "agent_system/tokens/ledger.py",
            "agent_system/tokens/conversation.py",
        ),
        ("tests/unit/agent_system/tokens", "tests/property/test_ledger_properties.py"),
        ("test_every_chat_template_of_trl_is_classified",),
    ),
    Target(
        "rollout",
        (
            "agent_system/multi_turn_rollout/packing.py",
            "agent_system/multi_turn_rollout/collector_worker.py",
        ),
        # test_branches, test_audit_rollouts and tests/golden are not used: they generate whole
        # batches, and the other tests find the same mutants sooner.
        (
            "tests/unit/agent_system/multi_turn_rollout/test_partial_rollouts.py",
            "tests/unit/agent_system/multi_turn_rollout/test_collector.py",
            "tests/unit/agent_system/multi_turn_rollout/test_collector_worker.py",
            "tests/unit/agent_system/multi_turn_rollout/test_dataset_rewards.py",
            "tests/unit/agent_system/multi_turn_rollout/test_packing.py",
            "tests/unit/rlvcr/test_forced_levels.py",
        ),
    ),
    Target(
        "trainer",
        ("verl/trainer/ppo/ray_trainer.py",),
        ("tests/unit/verl/trainer/ppo",),
    ),
)
