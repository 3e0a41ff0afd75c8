"""Command line of ``main_ppo``, ``main_sft``, ``main_eval`` and ``main_audit``.

    compose -> read -> derive -> validate -> plan -> run

All problems are reported in one list: if single values are invalid, the checks across keys still
run on the valid keys.
"""

import argparse
import dataclasses
import hashlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from verl.config.compose import (
    expand_sweep,
    list_config_names,
    list_override_keys,
    quote_override,
)
from verl.config.devices import Machine, apply_machine, parse_machine
from verl.config.explain import explain_key
from verl.config.load import ParsedConfig, read_config, to_dict, to_yaml, warn_without_effect
from verl.config.plan import Plan, PlanFacts, gather_facts, make_plan
from verl.config.plugins import collect_all_keys, env_names
from verl.config.problems import RegisteredNames
from verl.config.registered_names import EXTERNAL_LIB_KEY, import_external_libs
from verl.config.run_code import TRUST_KEY, refuse_code_in_run_directory
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import ConfigError, Key, Problem, collect_section_keys, value_at_path
from verl.config.settings.hints import find_nearest_key, list_child_names
from verl.config.settings.keys import format_default
from verl.config.settings.secret_values import find_masked_keys, register_secrets
from verl.config.validate import find_problems
from verl.utils.commands import InterruptOnSignal, run_and_report_mistakes

# The name of a config, or a function that chooses it from the overrides.
ConfigDefault = str | Callable[[Sequence[str]], str]
COMPOSED_NOTE = "# composed, not checked: use --check to test whether this run could start"
MAX_JOB_NAME_LENGTH = 60  # characters of the name of a sweep job, without its hash
CHECKED_NOTE = "checked, nothing was started: run without --check to start"
Config = PPOConfig | SFTConfig
Schema = type[PPOConfig] | type[SFTConfig]


@dataclass
class Command:
    """Parsed command line: configs to run, or ``text`` to print instead of running anything."""

    config_name: str = ""
    configs: list[Config] = field(default_factory=list)
    text: str | None = None
    is_check_only: bool = False
    target_machine: Machine | None = None  # machine of ``--on``, for which the config is checked


@dataclass(frozen=True)
class PreflightResult:
    """Result of checks that open the files, models and environments which a config names.

    ``problems`` are error messages. ``facts`` are values that the printed plan of the run shows,
    such as the number of tasks. Their names are fields of ``PlanFacts``.
    """

    problems: Collection[Problem] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


PreflightCheck = Callable[..., PreflightResult]


def _build_parser(prog: str) -> argparse.ArgumentParser:
    # No abbreviations: a mistyped option must be refused, not guessed.
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--help",
        "-h",
        nargs="?",
        const="",
        metavar="SECTION",
        help="print this text, or the keys of SECTION",
    )
    parser.add_argument("--config-name", "-cn", metavar="NAME", help="config to start from")
    parser.add_argument(
        "--config-path",
        "--config-dir",
        "-cp",
        "-cd",
        metavar="DIR",
        help="directory with user-provided configs",
    )
    parser.add_argument("--cfg", "-c", choices=("job",), help="print the composed config and stop")
    parser.add_argument(
        "--resolve",
        action="store_true",
        help="with --cfg job: also resolve interpolations and derived values",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="do everything up to the start; exit status 0 if the run could start, else 2",
    )
    parser.add_argument(
        "--on",
        metavar="DEVICES",
        help="with --check: check for a machine with these devices instead of this machine, for "
        "example 8xH100 or 2x8xA100:40 (nodes x GPUs per node x name : GiB)",
    )
    parser.add_argument(
        "--explain", metavar="KEY", help="print the meaning of a key in this configuration and stop"
    )
    parser.add_argument(
        "--multirun",
        "-m",
        action="store_true",
        help="run one job after the other for key=a,b key=range(0,3)",
    )
    parser.add_argument(
        "--trust-run-code",
        action="store_true",
        help=f"execute code that the stored config of a run names; same as {TRUST_KEY}=true",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides, in Hydra's grammar"
    )
    return parser


def parse(
    argv: Sequence[str] | None = None,
    config_default: ConfigDefault = "ppo_trainer",
    schema: Schema = PPOConfig,
    prog: str = "verl.trainer.main_ppo",
) -> Command:
    """Parse ``argv`` (default: ``sys.argv``) into the configs to run, with derived values set.

    Raises ``ConfigError`` with all problems if names, keys, types or single values are invalid.
    """
    parser = _build_parser(prog)
    # parse_args would refuse a command line with overrides before and after an option.
    args = parser.parse_intermixed_args(argv)
    if args.help is not None:
        return Command(text=_format_help(parser, args.help, args.config_path, schema))
    config_name = args.config_name or config_default
    if not isinstance(config_name, str):
        config_name = config_name(args.overrides)
    _refuse_conflicting_options(args)
    target_machine = _parse_machine_option(args, schema)
    trusts_run_code = args.trust_run_code or f"{TRUST_KEY}=true" in args.overrides
    args.overrides = [override for override in args.overrides if override != f"{TRUST_KEY}=true"]
    if not trusts_run_code:
        refuse_code_in_run_directory(config_name, args.config_path, args.overrides, schema)
    if args.multirun:
        parsed_configs = _read_multirun_configs(config_name, args, schema)
    else:
        parsed_configs = [read_config(config_name, args.overrides, schema, args.config_path)]
    if args.cfg:
        config = parsed_configs[0].require_valid()
        # The first line is a comment, so that the output is a valid config file.
        text = f"{COMPOSED_NOTE}\n{to_yaml(config if args.resolve else parsed_configs[0].tree)}"
        return Command(config_name, text=text)
    if args.explain:
        text = explain_key(parsed_configs[0].require_valid(), args.explain)
        return Command(config_name, text=text)
    problems: list[Problem] = []
    for parsed in parsed_configs:
        problems += parsed.problems
        if parsed.problems:  # also check the keys that could be read
            names = _list_environment_names(parsed)
            problems += find_problems(parsed.config, names, lacks_invalid_keys=True)
        else:
            problems += _find_masked_values(parsed, args.overrides)
        problems += parsed.unused_keys
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    configs = [parsed.config for parsed in parsed_configs]
    if args.multirun:
        _require_distinct_run_directories(configs)
    return Command(config_name, configs, is_check_only=args.check, target_machine=target_machine)


def _refuse_conflicting_options(args: argparse.Namespace) -> None:
    for option, is_set in (("--check", args.check), ("--multirun", args.multirun)):
        if is_set and (args.cfg or args.explain):
            raise ConfigError(
                f"{option}: --cfg and --explain print one config and check nothing; allowed: "
                f"{option} without them; fix: remove {option}, and give each key one value",
                "conflicting_keys",
            )


def _parse_machine_option(args: argparse.Namespace, schema: Schema) -> Machine | None:
    if args.on is None:
        return None
    if not args.check or schema is not PPOConfig:
        raise ConfigError(
            f"--on {args.on}: only a check can be for another machine; allowed: with --check of "
            "main_ppo, main_eval or main_audit; fix: add --check, or remove --on",
            "conflicting_keys",
        )
    return parse_machine(args.on)


def _find_masked_values(parsed: ParsedConfig, overrides: Sequence[str]) -> Iterator[Problem]:
    override_keys = list_override_keys(overrides)
    for key in find_masked_keys(to_dict(parsed.config)):
        if key not in override_keys:
            # Write no colon after the key: the word after "KEY:" would be masked as a secret.
            text = f"{key} is masked in the stored config; allowed: its value; fix: set it on the "
            yield Problem(f"{text}command line", "missing_key")


def _list_environment_names(parsed: ParsedConfig) -> RegisteredNames:
    """Return the names of environments, or none if an ``external_lib`` may register more."""
    is_ppo = isinstance(parsed.config, PPOConfig)
    if is_ppo and value_at_path(parsed.config, EXTERNAL_LIB_KEY):
        return RegisteredNames()
    return RegisteredNames(environments=env_names() or None)


def _read_multirun_configs(
    config_name: str, args: argparse.Namespace, schema: Schema
) -> list[ParsedConfig]:
    """Return the configs of a multirun, each with a different experiment name and run directory."""
    has_experiment_name = "trainer.experiment_name" in list_override_keys(args.overrides)
    parsed_configs = []
    experiment_names: list[str] = []
    for job in expand_sweep(args.overrides):
        overrides = job.overrides
        parsed = read_config(config_name, overrides, schema, args.config_path)
        # Choose no default experiment name for an invalid config: the config is refused, and may
        # have no experiment name.
        if not has_experiment_name and not parsed.problems:
            base_name = parsed.config.trainer.experiment_name
            name = "-".join([base_name, *_format_job_names(job.swept_overrides, schema)])
            experiment_names.append(name)
            # A value that occurs twice gives two equal jobs: number the second one.
            name += f"-{experiment_names.count(name)}" if experiment_names.count(name) > 1 else ""
            overrides = [*overrides, quote_override("trainer.experiment_name", name)]
            parsed = read_config(config_name, overrides, schema, args.config_path)
        parsed_configs.append(parsed)
    return parsed_configs


def _format_job_names(swept_overrides: Sequence[str], schema: Schema) -> list[str]:
    """Return a name such as ``seed=3`` for each swept override, which can be part of a path.

    Different overrides have different names, so that no sweep uses the directories of another.
    """
    job_names = []
    for override in swept_overrides:
        path, _, value = override.lstrip("+").partition("=")
        short_override = f"{_shorten_key(path, schema)}={value}"
        job_name = re.sub(r"[^\w.=+-]", "_", short_override)[:MAX_JOB_NAME_LENGTH]
        digest = hashlib.sha256(short_override.encode()).hexdigest()[:8]
        job_names.append(job_name if job_name == short_override else f"{job_name}-{digest}")
    return job_names


def _shorten_key(path: str, schema: Schema) -> str:
    """Return the shortest end of ``path`` that no other key has: ``actor.optim.lr``."""
    if path.startswith("trainer."):
        return path.removeprefix("trainer.")
    keys = collect_section_keys(schema)
    path_names = path.split(".")
    for length in range(1, len(path_names)):
        ending = ".".join(path_names[-length:])
        if [key for key in keys if f".{key}".endswith(f".{ending}")] == [path]:
            return ending
    return path


def _require_distinct_run_directories(configs: Sequence[Config]) -> None:
    # With resume_mode=auto the second job would resume from the checkpoints of the first job. In
    # the other directories its files would replace those of the first job.
    fix = "remove trainer.default_local_dir and trainer.experiment_name: the defaults differ by job"
    fixes = {"trainer.default_local_dir": fix}
    keys = ["model.save_path"]
    if isinstance(configs[0], PPOConfig):
        keys = ["trainer.rollout_data_dir", "trainer.validation_data_dir"]
    for key in keys:
        fixes[key] = f"{key}='DIR/${{trainer.experiment_name}}', which differs by job"
    problems = []
    for key, fix in fixes.items():
        directories = [value_at_path(cfg, key) for cfg in configs]
        directories = [os.path.abspath(directory) for directory in directories if directory]
        if len(set(directories)) < len(directories):
            text = f"{key}: jobs of a multirun share {value_at_path(configs[0], key)!r}; allowed: "
            text += f"one directory per job; fix: {fix}"
            problems.append(Problem(text, "conflicting_keys"))
    if problems:
        raise ConfigError(problems)


def run(
    main: Callable[[Any], object],
    config_default: ConfigDefault = "ppo_trainer",
    schema: Schema = PPOConfig,
    prog: str = "verl.trainer.main_ppo",
    argv: Sequence[str] | None = None,
    names: Callable[[], RegisteredNames] | None = None,
    preflight_check: PreflightCheck | None = None,
    dry_run: PreflightCheck | None = None,
) -> int:
    """Run ``main(cfg)`` for each config of the command line, after checks and plan.

    Args:
        main: starts the run of a config. It may raise ``ConfigError``.
        config_default: config to use without ``--config-name``.
        prog: module name of the program, for the help text.
        names: returns the registered names with which those in the configs are checked. It is
            called after the ``external_lib`` of the configs was imported.
        preflight_check: opens the files and devices that a valid config names, and returns their
            problems. With ``--on`` it gets ``ignores_local_devices=True``.
        dry_run: with ``--check``, calls parts of the run on dummy rows and returns their problems.

    Returns:
        Exit status. 0: all runs ended, or the requested text was printed. 2: refused, with all
        problems on standard error. 143: ended by SIGTERM after cleanup. 130: ended by Ctrl-C.
    """
    parse_command = partial(parse, argv, config_default, schema, prog)
    # An OSError inside a run is not a mistake on the command line.
    return run_and_report_mistakes(
        _parse_and_run,
        main,
        parse_command,
        names,
        preflight_check,
        dry_run,
        catches_os_errors=False,
    )


def _parse_and_run(
    main: Callable[[Any], object],
    parse_command: Callable[[], Command],
    names: Callable[[], RegisteredNames] | None,
    preflight_check: PreflightCheck | None,
    dry_run: PreflightCheck | None,
) -> int:
    command = parse_command()
    if command.text is not None:
        sys.stdout.write(command.text.rstrip("\n") + "\n")
        return 0
    # Import these modules before names() is called: they register names that names() returns.
    if import_external_libs(command.configs):
        # Parse again: names that these modules register determine the values of unset keys.
        command = parse_command()
    for cfg in command.configs:
        register_secrets(to_dict(cfg))  # so that logs and error messages mask them
    registered_names = names() if names else RegisteredNames(environments=env_names() or None)
    # Plan and check every job before the first one starts, so that none is refused in the middle
    # of a multirun.
    target_machine = command.target_machine
    problems: list[Problem] = []
    for cfg in command.configs:
        if target_machine and isinstance(cfg, PPOConfig):
            problems += apply_machine(cfg, target_machine)
        problems += find_problems(cfg, registered_names)
    facts = [_gather_plan_facts(cfg, target_machine) for cfg in command.configs]
    if preflight_check and target_machine:
        preflight_check = partial(preflight_check, ignores_local_devices=True)
    preflight_checks = [preflight_check, dry_run] if command.is_check_only else [preflight_check]
    plans = _make_checked_plans(command.configs, facts, problems, preflight_checks)
    if command.is_check_only:
        for cfg, plan in zip(command.configs, plans, strict=True):
            warn_without_effect(cfg)
            machine_text = f" for {target_machine}" if target_machine else ""
            print_plan(plan, f"config {command.config_name}{machine_text}; {CHECKED_NOTE}")
        return 0
    with InterruptOnSignal() as interruption:
        for cfg, plan in zip(command.configs, plans, strict=True):
            warn_without_effect(cfg)
            print_plan(plan, f"config {command.config_name}")
            main(cfg.as_frozen())
    return interruption.exit_status


def _make_checked_plans(
    configs: Sequence[Config],
    facts: list[PlanFacts],
    problems: Sequence[Problem],
    preflight_checks: Sequence[PreflightCheck | None],
) -> list[Plan]:
    """Check the configs and return their plans, which are printed before the runs start.

    Each preflight check opens the files, models and environments that the configs name. It
    returns problems, and facts for the plans such as the number of tasks. ``problems`` are those
    found before. If there are problems, raise ``ConfigError``; later checks do not run.
    """
    plans = _make_plans(configs, facts, problems)
    for preflight_check in filter(None, preflight_checks):
        preflight_results = [preflight_check(cfg) for cfg in configs]
        problems = [
            problem
            for preflight_result in preflight_results
            for problem in preflight_result.problems
        ]
        facts = [
            dataclasses.replace(config_facts, **preflight_result.facts)
            for config_facts, preflight_result in zip(facts, preflight_results, strict=True)
        ]
        plans = _make_plans(configs, facts, problems)
    return plans


def _make_plans(
    configs: Sequence[Config], facts: Sequence[PlanFacts], problems: Sequence[Problem]
) -> list[Plan]:
    """Return the plan of each config, or raise ``ConfigError`` if there are problems."""
    plans = [make_plan(cfg, config_facts) for cfg, config_facts in zip(configs, facts, strict=True)]
    plan_problems = [problem for plan in plans for problem in plan.find_problems()]
    if problems or plan_problems:
        raise ConfigError(dict.fromkeys([*problems, *plan_problems]))
    return plans


def _gather_plan_facts(cfg: Config, target_machine: Machine | None) -> PlanFacts:
    facts = gather_facts(cfg)
    if target_machine is None:
        return facts
    # The host memory of the target machine is unknown; this machine's does not apply.
    memory_facts = {"device_memory_gb": target_machine.memory_gb, "memory_gb": None}
    return dataclasses.replace(facts, device="cuda", **memory_facts)


def print_plan(plan: Plan, caption: str = "") -> None:
    """Print the plan of a run: a table on a terminal, otherwise plain lines."""
    if sys.stdout.isatty():
        from rich.console import Console

        table = plan.build_table()
        table.caption = caption
        Console().print(table)
    else:
        sys.stdout.write(f"{plan.format_text()}\n  ({caption})\n")
        sys.stdout.flush()


def _format_help(
    parser: argparse.ArgumentParser, section: str, config_path: str | None, schema: Schema
) -> str:
    if section:
        return _format_section_help(section, schema)
    keys = collect_section_keys(schema)
    section_names = list_child_names("", keys)
    sections_text = "\n".join(f"  {name:<24}{keys[name].help_text}" for name in section_names)
    return (
        f"{parser.format_help()}\n"
        f"configs (--config-name):\n  {', '.join(list_config_names(config_path))}\n\n"
        f"sections (--help SECTION lists the keys of one, for example --help {section_names[0]}):\n"
        f"{sections_text}\n"
    )


def _format_section_help(section: str, schema: Schema) -> str:
    keys = collect_all_keys(schema)
    prefix = f"{section}."
    section_keys = [key for path, key in keys.items() if path == section or path.startswith(prefix)]
    if not section_keys:
        similar_key = find_nearest_key(section, keys)
        hint = f"; did you mean {similar_key}?" if similar_key else ""
        raise ConfigError(f"--help {section}: no such section{hint}", "unknown_key")
    return "\n".join(_format_key_help(key) for key in section_keys if not key.is_section)


def _format_key_help(key: Key) -> str:
    note = " [GPU only]" if key.is_gpu_only else ""
    if key.unused_annotation and key.unused_annotation.instead:
        note = f" [refused: {key.unused_annotation.why}; instead: {key.unused_annotation.instead}]"
    elif key.unused_annotation:
        annotation = key.unused_annotation
        note = f" [no effect: {annotation.why}; accepted for {annotation.set_by}]"
    allowed_text = f"{key.describe_allowed()}; default {format_default(key)}"
    return f"{key.path}  ({allowed_text})\n    {key.help_text}{note}"
